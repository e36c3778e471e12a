#!/usr/bin/env bash
# Trains on this machine.
#   ./launch_single.sh                              two epochs on a synthetic sample set, made on first use
#   ./launch_single.sh --coco_image_path DIR --annotation_path FILE ...      arguments go to demo_coco_resnet18.py
#   GPUS=4 ./launch_single.sh ...                   four processes (default 1); GPUS=all: one for each GPU
# RESTARTS, LOG_DIR, RUN_NAME and OMP_NUM_THREADS have the same meaning as in launch_multinode.sh.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
GPUS=${GPUS:-1}
if ! [[ $GPUS =~ ^([1-9][0-9]{0,3}|all)$ ]]; then
    echo "launch_single.sh: error: GPUS is '$GPUS': give a number of processes, 1 or more, or all" >&2
    exit 1
fi
unset WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT
export NNODES=1 GPUS_PER_NODE="$GPUS"
exec bash "$ROOT/launch_multinode.sh" "$@"
