#!/usr/bin/env bash
# Trains on this machine: starts torchrun with one process or more, restarts it, keeps the log.
#   ./launch_single.sh                              two epochs on a small sample set, made on first use
#   ./launch_single.sh --max_steps 5                the same with a setting of your own
#   ./launch_single.sh --coco_image_path DIR --annotation_path FILE ...      arguments go to demo_coco_resnet18.py
#   GPUS=4 ./launch_single.sh ...                   four processes (default 1); GPUS=all: one per GPU.
#                                                   GPUS_PER_NODE is another name for it
#   tools/series.py --processes 1,2,4 -- ...        a run with each number, then their comparison
# Other environment variables and their defaults:
#   RESTARTS=0         how many times to restart from the last checkpoint after a failure
#   LOG_DIR=logs       (in the current folder) the log is LOG_DIR/RUN_NAME/node0.log
#   RUN_NAME           default: date, time and a number, as in 20260131-235959-4711
#   OMP_NUM_THREADS    threads per process: cores / processes
# Exit code: 0: finished; 2: an error that you can fix; 75: stopped by a signal after saving;
# 128 + N: stopped by signal N, not saved; else failed.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

if [[ " $* " =~ \ (-h|--help)\  ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    echo "The script's own options: python demo_coco_resnet18.py --help"
    exit
fi

# The Python of the active environment, or of .venv, which is made on first use; `here`: for this machine.
python=$("$root/tools/environment.sh" here)
processes=${GPUS:-${GPUS_PER_NODE:-1}}
[ "$processes" != all ] || processes=$("$python" "$root/tools/run.py" --count) || exit

# run.py keeps the log, passes stop signals on and restarts. For the sample set ({sample}) it has these arguments.
sample="--coco_image_path {sample}/train2017 --annotation_path {sample}/annotations/instances_train2017.json"
sample+=" --val_image_path {sample}/val2017 --val_annotation_path {sample}/annotations/instances_val2017.json"
sample+=" --weights none --batch_size 16 --image_size 96 --lr 2e-4 --num_epochs 2"

# --local-addr: torchrun would otherwise use this machine's name, which may not resolve.
exec "$python" "$root/tools/run.py" --restarts="${RESTARTS:-0}" --log_dir="${LOG_DIR:-logs}" --run_name="${RUN_NAME:-}" \
    --sample="$sample" -- \
    torchrun --standalone --local-addr=127.0.0.1 --nnodes=1 --nproc_per_node="$processes" \
    "$root/demo_coco_resnet18.py" "$@"
