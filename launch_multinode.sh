#!/usr/bin/env bash
# Trains on several nodes: starts torchrun on this one, which waits for the others. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
# Under SLURM, one srun starts all nodes, and these four values come from the job:
#   srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=16 --gpus-per-node=2 ./launch_multinode.sh ...
# Arguments go to demo_coco_resnet18.py. Without paths it trains 40 steps on a small sample set, which each node makes.
# Other environment variables and their defaults. Only GPUS_PER_NODE and the names of interfaces may differ between nodes:
#   WORLD_SIZE           another name for NNODES: the number of nodes, not of processes
#   MASTER_PORT=29500    first port; each start (probe, training, each restart) uses the next one
#   GPUS_PER_NODE        processes on this node: one per GPU, or 1 if there is no GPU; `all` fails without a GPU
#   IFNAME, NETWORK      where to keep the traffic: eth0, or mlx5_0, or mlx5_0,ib0; infiniband or ethernet
#   NETWORKS             "ethernet=eth0 infiniband=mlx5_0": trains once over each network, then compares them
#   LINK_GBPS            "ethernet=10 infiniband=100": the networks' rates, of all adapters of a node together, in Gb/s
#   REPEATS=1            with NETWORKS: how many runs over each, in rounds; their logs are LABEL/r1/nodeK.log and so on
#   PROBE=1              1: measure the link before multi-process training; 0: skip that
#   RESTARTS=0           how many times to restart from the last checkpoint after a failure
#   CONNECT_TIMEOUT=300  seconds to wait for the other nodes
#   LOG_DIR=logs         this node's log is LOG_DIR/RUN_NAME/nodeK.log; with NETWORKS LOG_DIR/RUN_NAME/LABEL/nodeK.log
#   RUN_NAME             the date and time; a name is the same on all nodes, and has to be where they share the folder
#   OMP_NUM_THREADS      threads per process: cores / processes
# Exit code: 0: finished; 2: an error of the script that you can fix; 75: stopped by a signal after saving;
# 128 + N: signal N came before training; else failed.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/tools/environment.sh"
# shellcheck source=tools/launcher/job.sh
source "$root/tools/launcher/job.sh" # set_job
# shellcheck source=tools/launcher/networks.sh
source "$root/tools/launcher/networks.sh" # set_networks, check_networks, use_network

leave_after_help "$@"

# ---- Settings

set_job
set_number RESTARTS 0 0 1000
set_number REPEATS 1 1 1000
[ "$REPEATS" -eq 1 ] || [ -n "${NETWORKS:-}" ] || die "REPEATS repeats the runs of NETWORKS: set it"
set_number PROBE 1 0 1
set_number CONNECT_TIMEOUT 300 1 1000000
set_processes GPUS_PER_NODE
set_threads "$GPUS_PER_NODE"
set_networks "$@"
ports_per_run=$((2 + RESTARTS))
set_number MASTER_PORT 29500 1 "$((65536 - ports_per_run * REPEATS * $(wc -w <<<"$networks")))"

# ---- Starts over one network

# on_all_nodes START PROGRAM ARGUMENTS...: runs torchrun, and sets `outcome` and `reason` as judge_end does.
# A start has the same number and port on every node, so that a node in start 1 never joins start 2. The id is a part of a
# file's name for torchrun: without a slash.
on_all_nodes() {
    local port=$((first_port + $1))
    local id=${RUN_NAME:-demo}-$label-$1
    start_torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
        --rdzv_backend=static --rdzv_endpoint="$MASTER_ADDR:$port" --rdzv_id="${id//\//-}" \
        --rdzv_conf="timeout=$rendezvous_timeout" "${@:2}"
    if [ "$outcome" = apart ]; then
        reason="the nodes did not meet at $MASTER_ADDR:$port: ${reason%.}. Has the launcher been started on all $NNODES \
nodes, each with its own NODE_RANK and the same RUN_NAME? Is this port free on node 0, and open in its firewall? Try tools/preflight.py"
    fi
    # From now on a node may need --timeout to notice that another has failed.
    rendezvous_timeout=$((CONNECT_TIMEOUT + timeout + 60))
}

count_traffic() { # the kernel's counters, before and after: which interface carried the training
    "$PYTHON" "$root/tools/counters.py" "$@" 2>&1 | tee -a "$log" || true
}

train_over() { # LABEL=NAMES ARGUMENTS...
    local start=1
    first_port=$next_port
    next_port=$((first_port + ports_per_run))
    variables=("OMP_NUM_THREADS=$OMP_NUM_THREADS")
    prefer_for_cpus
    use_network "$1"
    shift
    if [ -z "${!NCCL_DEBUG*}" ]; then # for tools/nccl_log.py: which network NCCL uses, and why
        variables+=(NCCL_DEBUG=INFO "NCCL_DEBUG_SUBSYS=INIT,NET,ENV")
        variables+=("NCCL_DEBUG_FILE=${log%/*}/nccl.node$NODE_RANK.%h.%p.log")
    fi
    [ "$RESTARTS" -eq 0 ] || set -- "$@" --checkpoint "$checkpoint" # what a restart resumes from
    if [ "$PROBE" -eq 1 ] && [ $((NNODES * GPUS_PER_NODE)) -gt 1 ]; then
        on_all_nodes 0 "$root/tools/probe_link.py" "$@"
        [ "$outcome" = complete ] || return 0 # `outcome` says why there is no training
    fi
    count_traffic
    on_all_nodes 1 "$root/demo_coco_resnet18.py" "$@"
    while starts_again; do
        on_all_nodes "$start" "$root/demo_coco_resnet18.py" "$@" --resume
    done
    count_traffic --since "$log"
}

# ---- The run

check_networks
find_python
[ "$gpus" -eq 0 ] || [ "$node_gpus" -eq 0 ] || set -- --device cuda "$@" # without it the script may take the CPU
if names_no_data "$@"; then
    make_sample
    # Small enough that, even on a slow CPU, a step spends less time computing than sending at 1 Gb/s.
    set -- "${sample[@]}" --batch_size 4 --image_size 64 --num_epochs 100 --max_steps 40 "$@"
fi
timeout=$(option --timeout "$@") # the script's, which takes 1e3 as well; bash needs a whole number
timeout=$(LC_ALL=C printf '%.0f' "${timeout:-none}" 2>/dev/null) || timeout=300
rendezvous_timeout=$CONNECT_TIMEOUT
next_port=$MASTER_PORT
set_folder

[ -z "${NETWORKS:-}" ] || train_each network "$networks" "$@" # and leave

label=run
open_log "$folder/node$NODE_RANK.log" "$@"
train_over "$networks" "$@"
finish
