#!/usr/bin/env bash
# Trains on this machine.
#   ./launch_single.sh                              two epochs on a small sample set, made on first use
#   ./launch_single.sh --max_steps 5                the same with a setting of your own
#   ./launch_single.sh --coco_image_path DIR --annotation_path FILE ...      arguments go to demo_coco_resnet18.py
#   GPUS=4 ./launch_single.sh ...                   four processes (default 1); GPUS=all: one per GPU
# Other environment variables and their defaults:
#   RESTARTS=0         how many times to restart from the last checkpoint after a failure
#   LOG_DIR=logs       the log is LOG_DIR/RUN_NAME/node0.log
#   RUN_NAME           the date and time
#   OMP_NUM_THREADS    threads per process: cores / processes
# Exit code: 0: finished; 2: an error of the script that you can fix; 75: stopped by a signal after saving;
# 128 + N: signal N came before training; else failed.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/tools/environment.sh"

leave_after_help "$@"
GPUS=${GPUS:-1}
set_processes GPUS "$@"
set_number RESTARTS 0 0 1000
find_python
check_build "$@"
if names_no_data "$@"; then
    make_sample
    set -- "${sample[@]}" --val_image_path "$root/data/sample_coco/val2017" \
        --val_annotation_path "$root/data/sample_coco/annotations/instances_val2017.json" \
        --num_epochs 2 --batch_size 16 --image_size 128 --lr 3e-4 "$@"
fi
open_log "${LOG_DIR:-logs}/${RUN_NAME:-$(date +%Y%m%d-%H%M%S)}/node0.log" "$@"
set_checkpoint "$@"
[ "$RESTARTS" -eq 0 ] || set -- "$@" --checkpoint "$checkpoint" # what a restart resumes from

variables=("OMP_NUM_THREADS=$OMP_NUM_THREADS")
start=1
start_torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node="$GPUS" "$root/demo_coco_resnet18.py" "$@"
while may_restart "$start"; do
    start=$((start + 1))
    start_torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node="$GPUS" "$root/demo_coco_resnet18.py" "$@" --resume
done
finish
