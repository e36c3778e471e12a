#!/usr/bin/env bash
# Trains on this machine.
#   ./launch_single.sh                              two epochs on a synthetic sample set, made on first use
#   ./launch_single.sh --coco_image_path DIR --annotation_path FILE ...      arguments go to demo_coco_resnet18.py
#   GPUS=4 ./launch_single.sh ...                   four processes (default 1); GPUS=all: one for each GPU
# RESTARTS, LOG_DIR, RUN_NAME and OMP_NUM_THREADS have the same meaning as in launch_multinode.sh.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() {
    echo "launch_single.sh: error: $*" >&2
    exit 1
}

GPUS=${GPUS:-1}
if [ "$GPUS" = all ]; then
    GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') ||
        die "GPUS=all, but nvidia-smi finds no GPU: give the number of processes, GPUS=2"
fi
[[ $GPUS =~ ^[1-9][0-9]{0,3}$ ]] || die "GPUS is '$GPUS': give a number of processes, 1 or more, or all"

if [ "$#" -eq 0 ]; then
    data=$ROOT/data/sample_coco
    [ -f "$ROOT/tools/make_sample_coco.py" ] ||
        die "the sample set needs tools/make_sample_coco.py, which is missing: give --coco_image_path and --annotation_path"
    PYTHON=$(bash "$ROOT/tools/python_env.sh") || exit 1
    export PYTHON
    "$PYTHON" "$ROOT/tools/make_sample_coco.py" "$data"
    set -- --coco_image_path "$data/train2017" --annotation_path "$data/annotations/instances_train2017.json" \
        --val_image_path "$data/val2017" --val_annotation_path "$data/annotations/instances_val2017.json" \
        --weights none --batch_size 16 --num_epochs 2
fi

unset WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT
export NNODES=1 GPUS_PER_NODE="$GPUS"
exec bash "$ROOT/launch_multinode.sh" "$@"
