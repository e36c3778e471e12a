#!/usr/bin/env bash
# Starts torchrun on this node, by static rendezvous with the other nodes. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
# or once in all, on a SLURM cluster, where these four come from the job:
#   srun --nodes=2 --ntasks-per-node=1 ./launch_multinode.sh --coco_image_path DIR ...
# Arguments go to demo_coco_resnet18.py. What else can be set in the environment, with its default:
#   WORLD_SIZE        another name of NNODES: the number of nodes, not of processes
#   MASTER_PORT       29500; start k of probe, training and restarts uses MASTER_PORT + k
#   GPUS_PER_NODE     processes to start on this node; default: its GPUs, or 1 without any
#   RESTARTS          0; after a failure start again, up to so many times, from the last checkpoint
#   PROBE             1: measure the link before training with several processes; 0: do not
#   CONNECT_TIMEOUT   300; seconds to wait for the other nodes
#   NETWORK, IFNAME   ethernet or infiniband, and the interface or adapter to keep the traffic on (mlx5_0,ib0: both)
#   LOG_DIR, RUN_NAME logs and a name made from the time or the job; this node's log is LOG_DIR/RUN_NAME/nodeK.log
# Exit code: 0 done, 75 stopped by SIGTERM, SIGINT or SIGUSR1 (saved, with --checkpoint), else failed.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ME=launch_multinode.sh
log=/dev/null
say() { printf '%s: %s\n' "$ME" "$*" | tee -a "$log" >&2; }
die() { say "error: $*"; exit 1; }
# number NAME LOWEST HIGHEST DEFAULT [WHY]: the variable NAME, or DEFAULT, must be such a whole number.
number() {
    local value=${!1:-$4}
    [[ $value =~ ^[0-9]{1,9}$ ]] || die "$1 is '$value': give a whole number"
    printf -v "$1" '%d' "$((10#$value))"
    ((${!1} >= $2 && ${!1} <= $3)) || die "$1 is $value: give a number from $2 to $3${5:+ ($5)}"
}

# prefer NAME VALUE: exports it unless the user has set NAME.
prefer() {
    [ -n "${!1+set}" ] || export "$1=$2"
    [ "${!1}" = "$2" ] || say "NETWORK=$NETWORK would set $1=$2, but it is set to '${!1}' and stays so"
}

set_network() {
    local name state sockets="" adapters=""
    case ${NETWORK:-} in '') return ;; ethernet | infiniband) ;; *) die "NETWORK is '$NETWORK': give ethernet or infiniband" ;; esac
    [ -n "${IFNAME:-}" ] || die "NETWORK=$NETWORK needs IFNAME: the interface (eth0, ib0) or InfiniBand adapter (mlx5_0) to use"
    for name in ${IFNAME//,/ }; do
        state=$(cat "/sys/class/net/$name/operstate" "/sys/class/infiniband/${name%%:*}"/ports/*/state 2>/dev/null || true)
        [[ $state =~ ^(up|unknown)$|ACTIVE ]] ||
            say "warning: this node has no interface or adapter $name that is up (${state:-none}); it has:" /sys/class/{net,infiniband}/*
        if [[ -e /sys/class/infiniband/${name%%:*} || (! -e /sys/class/net/$name && $name =~ _[0-9]+(:[0-9]+)?$) ]]; then
            adapters+=,$name
        else
            sockets+=,$name
        fi
    done
    case $NETWORK$adapters in
    infiniband*) prefer NCCL_IB_DISABLE 0 && prefer NCCL_NET IB ;; # without it NCCL falls back to sockets, silently
    ethernet) prefer NCCL_IB_DISABLE 1 && prefer NCCL_NET Socket ;;
    *) die "NETWORK=ethernet: ${adapters#,} is an InfiniBand adapter; give an interface of 'ip -br link'" ;;
    esac
    [ -z "$adapters" ] || prefer NCCL_IB_HCA "=${adapters#,}"
    [ -z "$sockets" ] || prefer NCCL_SOCKET_IFNAME "=${sockets#,}" # without the = it would match each name that begins so
    [ -z "$sockets" ] || prefer GLOO_SOCKET_IFNAME "${sockets#,}"
}

NNODES=${NNODES:-${WORLD_SIZE:-}}
[ "${WORLD_SIZE:-$NNODES}" = "$NNODES" ] ||
    die "NNODES is $NNODES but WORLD_SIZE is $WORLD_SIZE: here both mean the number of nodes; set one of them"
number RESTARTS 0 1000 0
if [ -f "$ROOT/tools/probe_link.py" ]; then number PROBE 0 1 1; else number PROBE 0 1 0; fi
if [ -z "$NNODES" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    # NOTE: a batch script has SLURM_PROCID too, but only srun's tasks have SLURM_STEP_ID.
    [ -n "${SLURM_PROCID:-}" ] && [ -n "${SLURM_STEP_ID:-}" ] ||
        die "in SLURM job $SLURM_JOB_ID but not started by srun: write 'srun --ntasks-per-node=1 $ME ...', or set NNODES"
    NNODES=${SLURM_STEP_NUM_NODES:-$SLURM_NNODES}
    tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-$NNODES}}
    [ "$tasks" = "$NNODES" ] || [ "$SLURM_PROCID" = 0 ] || exit 1
    [ "$tasks" = "$NNODES" ] ||
        die "srun started $tasks tasks on $NNODES nodes: one task per node starts all its processes; give --ntasks-per-node=1"
    NODE_RANK=${NODE_RANK:-$SLURM_NODEID}
    GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    RUN_NAME=${RUN_NAME:-${NETWORK:-job$SLURM_JOB_ID}}
    # Ports for each start of a job, below the range from which Linux takes ports for outgoing connections.
    ports=$((RESTARTS + PROBE < 10 ? 10 : RESTARTS + PROBE + 1))
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % (12000 / ports) * ports))}
    if [ -z "${MASTER_ADDR:-}" ]; then
        MASTER_ADDR=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | head -n 1)
        # A node's name need not resolve; SLURM itself may know it by another address.
        getent ahosts "$MASTER_ADDR" >/dev/null ||
            MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    fi
fi
[ -n "$NNODES" ] || die "set NNODES (number of nodes), NODE_RANK (0 to NNODES-1) and MASTER_ADDR (node 0's address); $ME's first lines explain them"
number NNODES 1 1000000 1
[ "$NNODES" -eq 1 ] || [ -n "${NODE_RANK:-}" ] ||
    die "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to $((NNODES - 1)) on the others"
number NODE_RANK 0 "$((NNODES - 1))" 0 "NNODES is $NNODES"
[ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give the address of node 0 that all nodes can reach"
number MASTER_PORT 1 "$((65535 - RESTARTS - PROBE))" 29500
number CONNECT_TIMEOUT 1 1000000 300
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\).*/\1,/p' || true)}
number GPUS_PER_NODE 0 4096 "$(tr ',' '\n' <<<"$gpus" | grep -c . || true)"
GPUS_PER_NODE=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))
threads=$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) / GPUS_PER_NODE)) # torchrun alone would set 1, however many cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

nodes=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --rdzv_backend=static --rdzv_endpoint="${MASTER_ADDR:-}:$MASTER_PORT")
name=$(date +%Y%m%d)-port$MASTER_PORT # the same on every node, whose clocks differ by seconds
if [ "$NNODES" -eq 1 ]; then nodes=(--standalone --nnodes=1) name=$(date +%Y%m%d-%H%M%S); fi
command=(torchrun "${nodes[@]}" --nproc_per_node="$GPUS_PER_NODE" "$ROOT/demo_coco_resnet18.py" "$@")
if [ ! -f "$ROOT/tools/supervise.py" ]; then
    [ "$RESTARTS$PROBE" = 00 ] || die "tools/ is missing, and with it RESTARTS and PROBE=1: give neither"
    say "tools/ is missing, and with it the log, restarts, the probe of the link and exit code 75"
    set_network
    say "OMP_NUM_THREADS=$OMP_NUM_THREADS$(printf ' %q' "${command[@]}")"
    exec "${PYTHON:-python3}" -m torch.distributed.run "${command[@]:1}"
fi
PYTHON=$(bash "$ROOT/tools/python_env.sh")
folder=${LOG_DIR:-logs}/${RUN_NAME:-${NETWORK:-$name}}
mkdir -p "$folder" || die "the log folder $folder cannot be made: set LOG_DIR to one that can"
log=$folder/node$NODE_RANK.log
set_network
options=(--name "$ME" --log "$log" --restarts "$RESTARTS" --connect_timeout "$CONNECT_TIMEOUT")
[ "$PROBE" = 0 ] || options+=(--probe "$ROOT/tools/probe_link.py")
exec "$PYTHON" "$ROOT/tools/supervise.py" "${options[@]}" -- "$PYTHON" -m torch.distributed.run "${command[@]:1}"
