#!/usr/bin/env bash
# Trains on this machine: starts torchrun with one process or more, restarts it, keeps the log.
#   ./launch_single.sh                              two epochs on a small sample set, made on first use
#   ./launch_single.sh --max_steps 5                the same with a setting of your own
#   ./launch_single.sh --coco_image_path DIR --annotation_path FILE ...      arguments go to demo_coco_resnet18.py
#   GPUS=4 ./launch_single.sh ...                   four processes (default 1); GPUS=all: one per GPU
#   GPUS="1 2 4" ./launch_single.sh ...             a run with each number (none above that of the GPUs), then their
#                                                   comparison. Without paths: 20 steps each, without validation
# Other environment variables and their defaults:
#   REPEATS=1          with several numbers in GPUS: how many runs of each, in rounds; the logs are p1/r1/node0.log and so on
#   RESTARTS=0         how many times to restart from the last checkpoint after a failure
#   LOG_DIR=logs       the log is LOG_DIR/RUN_NAME/node0.log; of several runs LOG_DIR/RUN_NAME/p1/node0.log and so on
#   RUN_NAME           the date and time
#   OMP_NUM_THREADS    threads per process: cores / processes; of several runs cores / the largest number
# Exit code: 0: finished; 2: an error of the script that you can fix; 75: stopped by a signal after saving;
# 128 + N: signal N came before training; else failed.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/tools/environment.sh"

leave_after_help "$@"

# ---- Settings

NODE_RANK=0
runs=
most=0 # processes
several=
global=$(option --global_batch_size "$@")
[ "$(wc -w <<<"${GPUS:-}")" -le 1 ] || several=yes
for GPUS in ${GPUS:-1}; do
    set_processes GPUS
    if [ -n "$several" ] && [ "$gpus" -gt 0 ] && [ "$GPUS" -gt "$gpus" ] &&
        [ "$(option --device "$@")" != cpu ] && [ "$(option --backend "$@")" != gloo ]; then
        say "note: no run with $GPUS processes: there are $gpus GPU(s) here"
        continue
    fi
    [[ ! $several || ! $global =~ ^[0-9]{1,9}$ ]] || [ $((10#$global % GPUS)) -eq 0 ] ||
        die "--global_batch_size $global is not a multiple of $GPUS, a number of processes in GPUS"
    runs+="p$GPUS=$GPUS "
    most=$((GPUS > most ? GPUS : most))
done
[ "$most" -gt 0 ] || die "GPUS leaves no run ('$GPUS'): give a number of processes, or several, as in '1 2 4'"
set_threads "$most" # the same in all runs
set_number RESTARTS 0 0 1000
set_number REPEATS 1 1 1000
[ "$REPEATS" -eq 1 ] || [ -n "$several" ] || die "REPEATS repeats the runs of several GPUS, as in '1 2': give them"
[ -z "$several" ] || check_series GPUS "$runs" "$@"

# ---- The run

train_over() { # LABEL=PROCESSES ARGUMENTS...
    local start=1 torchrun
    torchrun=(--standalone --local-addr=127.0.0.1 --nnodes=1 --nproc_per_node="${1#*=}" "$root/demo_coco_resnet18.py")
    shift
    variables=("OMP_NUM_THREADS=$OMP_NUM_THREADS")
    prefer_for_cpus
    [ "$RESTARTS" -eq 0 ] || set -- "$@" --checkpoint "$checkpoint" # what a restart resumes from
    start_torchrun "${torchrun[@]}" "$@"
    while starts_again; do
        start_torchrun "${torchrun[@]}" "$@" --resume
    done
}

find_python
[ "$gpus" -eq 0 ] || [ "$node_gpus" -eq 0 ] || set -- --device cuda "$@" # without it the script may take the CPU
if names_no_data "$@"; then
    make_sample
    sample+=(--batch_size 16 --image_size 128 --lr 3e-4)
    if [ -n "$several" ]; then
        sample+=(--num_epochs 100 --max_steps 20)
    else
        sample+=(--num_epochs 2 --val_image_path "$root/data/sample_coco/val2017"
            --val_annotation_path "$root/data/sample_coco/annotations/instances_val2017.json")
    fi
    set -- "${sample[@]}" "$@"
fi
set_folder
[ -z "$several" ] || train_each run "$runs" "$@" # and leave

open_log "$folder/node0.log" "$@"
train_over "${runs% }" "$@"
finish
