#!/usr/bin/env bash
# Starts torchrun on this node, using static rendezvous with the other nodes. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
# On SLURM one srun does it, and these four values come from the job:
#   srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=16 --gpus-per-node=2 ./launch_multinode.sh ...
# Arguments go to demo_coco_resnet18.py. Without any it trains 40 steps on a small sample set, which each node makes.
# Other environment variables and their defaults. Give all nodes the same, except for NODE_RANK and interface names:
#   WORLD_SIZE           another name for NNODES: the number of nodes, not of processes
#   MASTER_PORT=29500    first port; each start (probe, training, restart, next network) uses one of those after it
#   GPUS_PER_NODE        processes on this node: one per GPU, or 1 if there is no GPU; `all` fails without a GPU
#   IFNAME, NETWORK      interface or adapter to keep the traffic on, such as eth0, or mlx5_0,ib0; infiniband or ethernet
#   NETWORKS             "ethernet=eth0 infiniband=mlx5_0": trains once over each network, then compares them
#   PROBE=1              measures the link before training with several processes; 0: does not
#   RESTARTS=0           restarts from the last checkpoint after a failure, at most this many times
#   CONNECT_TIMEOUT=300  seconds to wait for the other nodes
#   LOG_DIR=logs         this node's log is LOG_DIR/RUN_NAME/nodeK.log
#   RUN_NAME             the date and time
#   OMP_NUM_THREADS      threads per process: cores / processes
# Exit code: 0 done; 75 stopped by a signal, and saved; 128 + N if signal N came before the training; else failure.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/tools/environment.sh"

# ---- Settings

NNODES=${NNODES:-${WORLD_SIZE:-}}
[ "${WORLD_SIZE:-$NNODES}" = "$NNODES" ] ||
    die "NNODES is $NNODES but WORLD_SIZE is $WORLD_SIZE: here both mean the number of nodes, set one of them"
if [ -z "$NNODES" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    # A batch script has no SLURM_STEP_ID.
    [ -n "${SLURM_STEP_ID:-}" ] ||
        die "in a SLURM job, but not started by srun: write 'srun --ntasks-per-node=1 $me ...', or set NNODES"
    [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
        die "srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes: give it --ntasks-per-node=1"
    NNODES=$SLURM_STEP_NUM_NODES
    NODE_RANK=$SLURM_NODEID
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 600 * 20))} # other jobs may run on these nodes
    GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    RUN_NAME=${RUN_NAME:-job$SLURM_JOB_ID-step$SLURM_STEP_ID} # a requeued job finds its folder again
fi
[ -n "$NNODES" ] || die "set NNODES (nodes), NODE_RANK (0 to NNODES - 1) and MASTER_ADDR (node 0's address)"
set_number NNODES 1 1 1000000
[ "$NNODES" -eq 1 ] || [ -n "${NODE_RANK:-}" ] ||
    die "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to $((NNODES - 1)) on the others"
[ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] ||
    die "MASTER_ADDR is not set: give an address of node 0 that all nodes can reach"
MASTER_ADDR=${MASTER_ADDR:-localhost}
set_number NODE_RANK 0 0 "$((NNODES - 1))"
set_number RESTARTS 0 0 1000
set_number PROBE 1 0 1
set_number CONNECT_TIMEOUT 300 1 1000000
set_processes GPUS_PER_NODE
[[ ${NETWORK:-} =~ ^(ethernet|infiniband|)$ ]] || die "NETWORK is '$NETWORK': give ethernet or infiniband"
[ -z "${NETWORK:-}" ] || [ -n "${IFNAME:-}" ] || die "NETWORK=$NETWORK needs IFNAME: for example eth0, ib0 or mlx5_0"
[[ ${IFNAME:-} != *" "* ]] || die "IFNAME is '$IFNAME': separate names by commas"
NETWORKS=${NETWORKS:-}
if [ -n "$NETWORKS" ]; then
    [ -z "${NETWORK:-}${IFNAME:-}" ] || die "NETWORKS and NETWORK or IFNAME are set: unset the latter"
    [[ " $* " != *" --resume "* ]] || die "--resume would go on from the network before: leave it out with NETWORKS"
    twice=$(tr ' ' '\n' <<<"$NETWORKS" | sed 's/=.*//' | sort | uniq -d)
    [ -z "$twice" ] || die "NETWORKS names $twice twice: give each network a label of its own"
fi
networks=${NETWORKS:-"${NETWORK:-}=${IFNAME:-}"} # LABEL=NAMES of each
ports_per_network=$((2 + RESTARTS))
set_number MASTER_PORT 29500 1 "$((65536 - ports_per_network * $(wc -w <<<"$networks")))"

# ---- The network

is_adapter() { # mlx5_0, or mlx5_0:1 for one of its ports
    [ -e "/sys/class/infiniband/${1%%:*}" ]
}

check_network() { # LABEL=NAMES: ends the launcher if one of the names is not there, or down
    local name state
    for name in $(tr ',' ' ' <<<"${1#*=}"); do
        if is_adapter "$name"; then
            state=$(cat "/sys/class/infiniband/${name%%:*}/ports"/*/state)
            [[ $state == *ACTIVE* ]] || die "no port of $name is active: look at its cable, ibstat, the subnet manager"
        else
            [ -e "/sys/class/net/$name" ] ||
                die "this node has no $name: 'ip -br link' lists interfaces, 'ls /sys/class/infiniband' adapters"
            [ "$(cat "/sys/class/net/$name/carrier" 2>/dev/null)" = 1 ] ||
                die "interface $name is down, or has no cable: 'ip -br link' shows it"
        fi
    done
}

use_network() { # LABEL=NAMES: adds to `variables` what keeps NCCL and Gloo on this network
    local name sockets="" adapters="" efa=""
    for name in $(tr ',' ' ' <<<"${1#*=}"); do
        if ! is_adapter "$name"; then
            sockets+=",$name"
        elif [[ $(readlink "/sys/class/infiniband/${name%%:*}/device/driver") == */efa ]]; then
            efa=$name
        else
            adapters+=",$name"
        fi
    done
    if [ -n "$efa" ]; then
        say "$efa is of EFA: NCCL's plugin for it chooses among the adapters"
    elif [ -n "$adapters" ] || [ "${NETWORK:-}" = infiniband ]; then
        [ "${NETWORK:-}" != ethernet ] || die "NETWORK=ethernet, but ${adapters#,} is an InfiniBand adapter"
        prefer NCCL_IB_DISABLE 0
        prefer NCCL_NET IB # otherwise NCCL may silently fall back to sockets
        [ -z "$adapters" ] || prefer NCCL_IB_HCA "=${adapters#,}"
    elif [ -n "$sockets" ]; then
        prefer NCCL_IB_DISABLE 1
        prefer NCCL_NET Socket
    elif [ "$NNODES" -gt 1 ]; then
        leave_out_virtual
    fi
    if [ -n "$sockets" ]; then
        prefer NCCL_SOCKET_IFNAME "=${sockets#,}" # without the = eth1 would also match eth10
        prefer GLOO_SOCKET_IFNAME "${sockets#,}"
    fi
}

leave_out_virtual() { # NCCL may take a container bridge for a network between the nodes
    local address found virtual="(docker|br-|veth|virbr)"
    compgen -G "/sys/class/net/*" | grep -qE "/$virtual" || return 0
    ! compgen -G "/sys/class/net/ib*" >/dev/null || return 0 # which NCCL takes first
    address=$(getent ahosts "$MASTER_ADDR" | sed -n '1s/ .*//p' || true)
    found=$(ip -o route get "$address" 2>/dev/null; ip -o address show to "$address" 2>/dev/null) || true
    grep -qE " $virtual" <<<"$found" || prefer NCCL_SOCKET_IFNAME "^lo,docker,br-,veth,virbr"
}

# ---- Starts over one network

# on_all_nodes START PROGRAM ARGUMENTS...: torchrun. A start has the same number and port on every node, so that a node
# in start 1 can never join another one in start 2.
on_all_nodes() {
    local port=$((first_port + $1))
    start_torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
        --rdzv_backend=static --rdzv_endpoint="$MASTER_ADDR:$port" --rdzv_id="$label-$1" \
        --rdzv_conf="timeout=$rendezvous_timeout" "${@:2}"
    if [ "$outcome" = apart ]; then
        reason="the nodes did not meet at $MASTER_ADDR:$port: ${reason%.}. Has the launcher been started on all $NNODES \
nodes, each with its own NODE_RANK? Is this port free on node 0, and open in its firewall? Try tools/preflight.py"
    fi
    # From now on a node may need --timeout to notice that another has failed.
    rendezvous_timeout=$((CONNECT_TIMEOUT + timeout + 60))
}

train_over() { # LABEL=NAMES ARGUMENTS...
    local start=1
    variables=("OMP_NUM_THREADS=$OMP_NUM_THREADS")
    use_network "$1"
    shift
    if [ -z "${!NCCL_DEBUG@}" ]; then # for tools/nccl_log.py: which network NCCL uses, and why
        variables+=(NCCL_DEBUG=INFO "NCCL_DEBUG_SUBSYS=INIT,NET,ENV")
        variables+=("NCCL_DEBUG_FILE=${log%/*}/nccl.node$NODE_RANK.%h.%p.log")
    fi
    set_checkpoint "$@"
    [ "$RESTARTS" -eq 0 ] || set -- "$@" --checkpoint "$checkpoint"
    if [ "$PROBE" -eq 1 ] && [ $((NNODES * GPUS_PER_NODE)) -gt 1 ]; then
        on_all_nodes 0 "$root/tools/probe_link.py" "$@"
        [ "$outcome" = complete ] || return 0
    fi
    run "$PYTHON" "$root/tools/counters.py" || true
    on_all_nodes 1 "$root/demo_coco_resnet18.py" "$@"
    while may_restart "$start"; do
        start=$((start + 1))
        on_all_nodes "$start" "$root/demo_coco_resnet18.py" "$@" --resume
    done
    run "$PYTHON" "$root/tools/counters.py" --since "$log" || true
}

# ---- The run

for network in $networks; do
    [ -z "$NETWORKS" ] || [[ $network =~ ^[A-Za-z0-9._-]+=[^=]+$ ]] ||
        die "NETWORKS has '$network': write LABEL=INTERFACE, as in ethernet=eth0 infiniband=mlx5_0"
    check_network "$network"
done
find_python
if [ "$#" -eq 0 ]; then
    make_sample
    # Small images and batches: on a slow CPU, too, a step computes for less time than it needs to send at 1 Gb/s.
    set -- "${sample[@]}" --batch_size 4 --image_size 64 --num_epochs 100 --max_steps 40
fi
timeout=$(option --timeout "$@")
timeout=${timeout:-300}
timeout=${timeout%.*}
rendezvous_timeout=$CONNECT_TIMEOUT
first_port=$MASTER_PORT
folder=${LOG_DIR:-logs}/${RUN_NAME:-$(date +%Y%m%d-%H%M%S)}

if [ -z "$NETWORKS" ]; then
    label=run
    open_log "$folder/node$NODE_RANK.log" "$@"
    train_over "$networks" "$@"
    finish
fi

code=0
comparison=("$root/tools/compare_logs.py" --report "$folder/compare.md")
for network in $networks; do
    label=${network%%=*}
    open_log "$folder/$label/node$NODE_RANK.log" "$@"
    train_over "$network" "$@"
    case $outcome in
    complete) ;;
    lost) # the other networks are still worth a run
        say "error: network $label: $reason"
        code=1
        ;;
    *) finish ;;
    esac
    leave_if_stopped
    first_port=$((first_port + ports_per_network))
    comparison+=("$label=$folder/$label")
done
[ "$NODE_RANK" -eq 0 ] || exit "$code"
log= # the comparison has a file of its own
if has "$PYTHON" matplotlib; then
    comparison+=(--plot "$folder/compare.png")
else
    say "skipping the picture: matplotlib is not installed"
fi
run "$PYTHON" "${comparison[@]}" || code=$?
exit "$code"
