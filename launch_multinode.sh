#!/usr/bin/env bash
# Starts torchrun on this node, by static rendezvous with the other nodes. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
# or once in all, on a SLURM cluster, where these four come from the job:
#   srun --nodes=2 --ntasks-per-node=1 ./launch_multinode.sh --coco_image_path DIR ...
# Arguments go to demo_coco_resnet18.py; without any it trains on a sample set, made on each node: two epochs on one
# node, some steps on several.
# What else can be set in the environment, with its default:
#   NETWORKS          "ethernet=eth0 infiniband=mlx5_0": one run over each, then the comparison
#   WORLD_SIZE        another name of NNODES: the number of nodes, not of processes
#   MASTER_PORT       29500; start k of the series (probe, training, restarts, next network) uses MASTER_PORT + k
#   GPUS_PER_NODE     processes to start on this node; default: its GPUs, or 1 without any; all: there must be a GPU
#   RESTARTS          0; after a failure start again, up to so many times, from the last checkpoint
#   PROBE             1: measure the link before training with several processes; 0: do not
#   CONNECT_TIMEOUT   300; seconds to wait for the other nodes
#   IFNAME, NETWORK   interface or adapter to keep the traffic on (mlx5_0,ib0: both); ethernet or infiniband
#   LOG_DIR, RUN_NAME logs and a name that node 0 makes from the time or the job; this node's log is
#                     LOG_DIR/RUN_NAME/nodeK.log
# Exit code: 0 done, 75 stopped by SIGTERM, SIGINT or SIGUSR1 (saved, with --checkpoint), before the start 128 + the
# signal's number, else failed.
set -euo pipefail
ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) # an exported CDPATH makes cd print
ME=launch_multinode.sh
log=/dev/null
say() { printf '%s: %s\n' "$ME" "$*" | tee -a "$log" >&2 2>/dev/null || true; } # a disk may be full, a terminal gone
die() { say "error: $*"; exit 1; }
number() { # NAME LOWEST HIGHEST DEFAULT [WHY]: the variable NAME, or DEFAULT, must be such a whole number
    local value=${!1:-$4}
    [[ $value =~ ^[0-9]{1,9}$ ]] || die "$1 is '$value': give a whole number"
    printf -v "$1" '%d' "$((10#$value))"
    ((${!1} >= $2 && ${!1} <= $3)) || die "$1 is ${!1}: give a number from $2 to $3${5:+ ($5)}"
}
export DEMO_SET_BY_LAUNCHER="" # names, for the Run record
set_ours() { # NAME VALUE
    export "$1=$2"
    DEMO_SET_BY_LAUNCHER+="${DEMO_SET_BY_LAUNCHER:+ }$1"
}
prefer() { # NAME VALUE: exports it unless the user has set NAME
    [ -n "${!1+set}" ] || set_ours "$1" "$2"
    [ "${!1}" = "$2" ] || say "NETWORK=$NETWORK would set $1=$2, but it is set to '${!1}' and stays so"
}
# attend COMMAND...: runs what may wait long. A signal to bash alone counts only when the command that it waits for has
# ended, but at once in `wait`. What it starts with & ignores Ctrl-C, which is therefore passed on as SIGTERM.
attend() {
    local code=0 name number
    for name in HUP=129 INT=130 USR1=138 TERM=143; do
        number=${name#*=} name=${name%=*}
        # shellcheck disable=SC2064
        trap "stop_attending $name $number" "$name"
    done
    if [ -z "$answers" ]; then
        "$@" &
    else
        "$@" >"$answers/pipe" &
        IFS= read -r -d '' answer <"$answers/pipe" || true # to its end
    fi
    wait "$!" || code=$?
    trap - HUP INT USR1 TERM
    return "$code"
}
# shellcheck disable=SC2329  # called by the traps
stop_attending() {
    trap '' HUP INT USR1 TERM
    # shellcheck disable=SC2046  # each is a word
    kill -TERM $(jobs -p) 2>/dev/null || true
    wait
    [ -z "$answers" ] || rm -r "$answers"
    say "stopped by SIG$1 before the start"
    exit "$2"
}
# answer_of COMMAND...: the same; sets `answer` to what it prints. Through a pipe, which needs no room on a disk.
answers= # its folder
answer_of() {
    local code=0
    if ! answers=$(mktemp -d 2>/dev/null) || ! mkfifo "$answers/pipe"; then
        die "no folder for temporary files can be made: export TMPDIR=DIR"
    fi
    attend "$@" || code=$?
    rm -r "$answers"
    answers='' answer=${answer%$'\n'}
    return "$code"
}
# is_adapter NAME: not an interface but InfiniBand's, also where this node has none and only the name tells.
is_adapter() {
    [ ! -e "/sys/class/infiniband/${1%%:*}" ] || return 0
    [ ! -e "/sys/class/net/$1" ] && [[ $1 =~ _[0-9]+(:[0-9]+)?$ ]]
}

# is_efa NAME: an adapter of EC2, whose network is a plugin's.
is_efa() { [[ $(readlink "/sys/class/infiniband/${1%%:*}/device/driver") == */efa || $1 == efa_* ]]; }

set_network() {
    local name sockets="" adapters="" efa=""
    [[ ${NETWORK:-} =~ ^(ethernet|infiniband)?$ ]] || die "NETWORK is '$NETWORK': give ethernet or infiniband"
    [ -n "${NETWORK:-}${IFNAME:-}" ] || return 0
    [ -n "${IFNAME:-}" ] || die "NETWORK=$NETWORK needs IFNAME: the interface (eth0, ib0) or adapter (mlx5_0) to use"
    for name in ${IFNAME//,/ }; do
        if is_adapter "$name"; then adapters+=,$name; else sockets+=,$name; fi
        ! is_efa "$name" || efa=$name
    done
    if [ -n "$adapters" ]; then name=infiniband; else name=ethernet; fi
    export NETWORK=${NETWORK:-$name}
    if [ "$NETWORK" = infiniband ] && [ -n "$efa" ]; then
        say "$efa is of EFA: NCCL's plugin for it chooses among the adapters, NCCL_NET and NCCL_IB_HCA are left alone"
        adapters=
    elif [ "$NETWORK" = infiniband ]; then
        prefer NCCL_IB_DISABLE 0
        prefer NCCL_NET IB # without it NCCL falls back to sockets, silently
    elif [ -z "$adapters" ]; then
        prefer NCCL_IB_DISABLE 1
        prefer NCCL_NET Socket
    else
        die "NETWORK=ethernet: ${adapters#,} is an InfiniBand adapter; give an interface of 'ip -br link'"
    fi
    [ -z "$adapters" ] || prefer NCCL_IB_HCA "=${adapters#,}"
    [ -z "$sockets" ] || prefer NCCL_SOCKET_IFNAME "=${sockets#,}" # without the = it would match what begins so, too
    [ -z "$sockets" ] || prefer GLOO_SOCKET_IFNAME "${sockets#,}"
}

# Of CUDA_VISIBLE_DEVICES CUDA takes the entries, numbers or names, up to one that is no device, such as -1.
count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c '[^ ]' || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

NNODES=${NNODES:-${WORLD_SIZE:-}}
[ "${WORLD_SIZE:-$NNODES}" = "$NNODES" ] ||
    die "NNODES is $NNODES but WORLD_SIZE is $WORLD_SIZE: here both mean the number of nodes; set one of them"
number RESTARTS 0 1000 0
if [ -f "$ROOT/tools/probe_link.py" ]; then number PROBE 0 1 1; else number PROBE 0 1 0; fi
starts=$(($(wc -w <<<"${NETWORKS:-one}") * (1 + PROBE + RESTARTS))) # at most, and each at a port of its own
if [ -z "$NNODES" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    [ -f "$ROOT/tools/launcher/slurm.sh" ] || die "tools/ is missing, and with it the settings of a SLURM job: set NNODES"
    # shellcheck source=tools/launcher/slurm.sh
    source "$ROOT/tools/launcher/slurm.sh" "$starts"
fi
[ -n "$NNODES" ] ||
    die "set NNODES (nodes), NODE_RANK (0 to NNODES-1) and MASTER_ADDR (node 0's address); $ME's first lines explain"
number NNODES 1 1000000 1
[ "$NNODES" -eq 1 ] || [ -n "${NODE_RANK:-}" ] ||
    die "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to $((NNODES - 1)) on the others"
number NODE_RANK 0 "$((NNODES - 1))" 0 "NNODES is $NNODES"
[ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] ||
    die "MASTER_ADDR is not set: give the address of node 0 that all nodes can reach"
number MASTER_PORT 1 "$((65536 - starts))" 29500
number CONNECT_TIMEOUT 1 1000000 300
gpus=$(count_gpus)
if [ "${GPUS_PER_NODE:-}" = all ]; then
    what="all GPUs are asked for, but nvidia-smi finds none"
    [ -z "${CUDA_VISIBLE_DEVICES+set}" ] ||
        what="all GPUs are asked for, but CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES'"
    [ "$gpus" -gt 0 ] || die "$what: give the number of processes"
    GPUS_PER_NODE=$gpus
fi
number GPUS_PER_NODE 0 4096 "$gpus"
GPUS_PER_NODE=$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))
cores=$(bash "$ROOT/tools/launcher/cores.sh" 2>/dev/null || nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
threads=$((cores / GPUS_PER_NODE)) # torchrun alone would set 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
sample=$ROOT/data/sample_coco
if [ "$#" -eq 0 ]; then
    own="give --coco_image_path and --annotation_path"
    [ -f "$ROOT/tools/make_sample_coco.py" ] ||
        die "the sample set needs tools/make_sample_coco.py, which is missing: $own"
    parent=$ROOT
    [ ! -d "$ROOT/data" ] || parent=$ROOT/data
    [ -e "$sample" ] || [ -w "$parent" ] ||
        die "the sample set would be made in $ROOT/data, which cannot be written: $own"
fi

nodes=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --rdzv_backend=static)
nodes+=(--rdzv_endpoint="${MASTER_ADDR:-}:$MASTER_PORT")
base=${NETWORK:-$(date +%Y%m%d-%H%M%S)-port$MASTER_PORT} # of the name that node 0 makes
port=$MASTER_PORT
if [ "$NNODES" -eq 1 ]; then
    nodes=(--standalone --nnodes=1)
    base=${NETWORK:-$(date +%Y%m%d-%H%M%S)}
    port=0
fi
command=(torch.distributed.run "${nodes[@]}" --nproc_per_node="$GPUS_PER_NODE" "$ROOT/demo_coco_resnet18.py")
if [ ! -f "$ROOT/tools/supervise.py" ]; then
    [ "$RESTARTS$PROBE${NETWORKS:-}" = 00 ] ||
        die "tools/ is missing, and with it RESTARTS and PROBE=1, and NETWORKS: give none of them"
    say "tools/ is missing, and with it the log, restarts, the probe of the link, preflight and exit code 75"
    set_network
    say "OMP_NUM_THREADS=$OMP_NUM_THREADS torchrun$(printf ' %q' "${command[@]:1}" "$@")"
    exec "${PYTHON:-python3}" -m "${command[@]}" "$@"
fi
answer_of bash "$ROOT/tools/launcher/python_env.sh"
PYTHON=$answer
options=(--name "$ME" --log_dir "${LOG_DIR:-logs}")
# A job that SLURM has put back into the queue, and --resume, go on in the logs that are there.
if [[ " $* " == *" --resume "* || ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then options+=(--goes_on); fi
if [ "$NODE_RANK" -eq 0 ] && [ -z "${DEMO_RUN:-}" ]; then # this again, with the series' lock and name
    export PYTHON
    series=("${options[@]}" --port "$port" --run_name "${RUN_NAME:-}" --base "$base")
    exec "$PYTHON" "$ROOT/tools/launcher/series.py" "${series[@]}" -- bash "$ROOT/launch_multinode.sh" "$@"
fi
run=${DEMO_RUN:-${RUN_NAME:-}} # on the other nodes empty, as long as node 0 has not told it
if [ -n "${NETWORKS:-}" ]; then
    export PYTHON NNODES NODE_RANK MASTER_ADDR MASTER_PORT CONNECT_TIMEOUT GPUS_PER_NODE RESTARTS PROBE
    exec "$PYTHON" "$ROOT/tools/launcher/networks.py" "${LOG_DIR:-logs}" "$@"
fi
[ "$NODE_RANK" -gt 0 ] || log=${LOG_DIR:-logs}/$run/node0.log
set_network
options+=(--run_name "$run" --connect_timeout "$CONNECT_TIMEOUT" --starts "$starts")
answer_of "$PYTHON" "$ROOT/tools/preflight.py" --parent "$$" "${options[@]}" "${nodes[@]}"
{
    IFS= read -r interface
    IFS= read -r run
    IFS= read -r leave_out
    IFS= read -r DEMO_SERIES
} <<<"$answer"
export DEMO_SERIES
[ -z "$interface" ] || set_ours GLOO_SOCKET_IFNAME "$interface"
[ -z "$leave_out" ] || set_ours NCCL_SOCKET_IFNAME "$leave_out"
folder=${LOG_DIR:-logs}/$run
log=$folder/node$NODE_RANK.log
if [ "$NNODES" -gt 1 ] && [ -z "${!NCCL_DEBUG@}" ]; then # what NCCL says of its network, for nccl_log.py
    export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_DEBUG_FILE=$folder/nccl.node$NODE_RANK.%h.%p.log
fi
options=(--name "$ME" --log "$log" --connect_timeout "$CONNECT_TIMEOUT")
if [ "$#" -eq 0 ]; then
    attend "$PYTHON" "$ROOT/tools/make_sample_coco.py" --processes "$cores" "$sample"
    set -- --coco_image_path "$sample/train2017" --annotation_path "$sample/annotations/instances_train2017.json" \
        --weights none
    if [ "$NNODES" -eq 1 ]; then # a minute on two cores
        set -- "$@" --val_image_path "$sample/val2017" \
            --val_annotation_path "$sample/annotations/instances_val2017.json" --batch_size 16 --image_size 128 \
            --num_epochs 2
    else # so few and small images that on a slow CPU, too, a step computes for a shorter time than it sends at 1 Gb/s
        set -- "$@" --batch_size 4 --image_size 64 --num_epochs 100 --max_steps 40
    fi
fi
[ "$PROBE" = 0 ] || options+=(--probe "$ROOT/tools/probe_link.py")
exec "$PYTHON" "$ROOT/tools/supervise.py" "${options[@]}" --restarts "$RESTARTS" -- "$PYTHON" -m "${command[@]}" "$@"
