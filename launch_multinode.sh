#!/usr/bin/env bash
# Starts torchrun on this node, by static rendezvous with the other nodes. Call it once on each node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 GPUS_PER_NODE=2 ./launch_multinode.sh --coco_image_path DIR ...
# or once in all, on a SLURM cluster, where these four come from the job:
#   srun --nodes=2 --ntasks-per-node=1 ./launch_multinode.sh --coco_image_path DIR ...
# Arguments go to demo_coco_resnet18.py. What else can be set in the environment, with its default:
#   WORLD_SIZE        another name of NNODES: the number of nodes, not of processes
#   MASTER_PORT       29500; restart n uses MASTER_PORT + n
#   GPUS_PER_NODE     processes to start on this node; default: its GPUs, or 1 without any
#   RESTARTS          0; after a failure start again, up to so many times, from the last checkpoint
#   CONNECT_TIMEOUT   300; seconds to wait for the other nodes
#   NETWORK, IFNAME   ethernet or infiniband, and the interface or adapter to keep the traffic on (mlx5_0,ib0: both)
#   LOG_DIR, RUN_NAME logs and a name made from the time or the job; this node's log is LOG_DIR/RUN_NAME/nodeK.log
# Exit code: 0 done, 75 stopped by SIGTERM, SIGINT or SIGUSR1 with a checkpoint saved, else failed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SCRIPT=demo_coco_resnet18.py
ME=launch_multinode.sh
log=/dev/null

say() { printf '%s: %s\n' "$ME" "$*" | tee -a "$log" >&2; }
die() {
    say "error: $*"
    exit 1
}

# ---- Settings ------------------------------------------------------------------------------------------------------

count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# number NAME LOWEST HIGHEST: ends with one line unless the variable NAME is such a whole number.
number() {
    local value=${!1}
    [[ $value =~ ^[0-9]{1,9}$ ]] || die "$1 is '$value': give a whole number"
    printf -v "$1" '%d' "$((10#$value))"
    if [ "${!1}" -lt "$2" ] || [ "${!1}" -gt "$3" ]; then
        die "$1 is $value: give a number from $2 to $3${4:+ ($4)}"
    fi
}

if [ -n "${NNODES:-}" ] && [ -n "${WORLD_SIZE:-}" ] && [ "$NNODES" != "$WORLD_SIZE" ]; then
    die "NNODES is $NNODES but WORLD_SIZE is $WORLD_SIZE: here both mean the number of nodes; set one of them"
fi
NNODES=${NNODES:-${WORLD_SIZE:-}}

master_from_slurm=
if [ -z "$NNODES" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    # NOTE: a batch script has SLURM_PROCID too, but only srun's tasks have SLURM_STEP_ID.
    if [ -z "${SLURM_PROCID:-}" ] || [ -z "${SLURM_STEP_ID:-}" ]; then
        die "in SLURM job $SLURM_JOB_ID but not started by srun: write 'srun --ntasks-per-node=1 $ME ...', or set NNODES"
    fi
    NNODES=${SLURM_STEP_NUM_NODES:-$SLURM_NNODES}
    tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-$NNODES}}
    if [ "$tasks" != "$NNODES" ]; then
        [ "$SLURM_PROCID" = 0 ] || exit 1
        die "srun started $tasks tasks on $NNODES nodes: one task per node starts all its processes; give --ntasks-per-node=1"
    fi
    NODE_RANK=${NODE_RANK:-$SLURM_NODEID}
    # Ten ports for each job, below the range from which Linux takes ports for outgoing connections.
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 1200 * 10))}
    GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    RUN_NAME=${RUN_NAME:-${NETWORK:-job$SLURM_JOB_ID}}
    if [ -z "${MASTER_ADDR:-}" ]; then
        MASTER_ADDR=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | head -n 1)
        master_from_slurm=yes
    fi
fi

[ -n "$NNODES" ] || die "set NNODES (number of nodes), NODE_RANK (0 to NNODES-1) and MASTER_ADDR (node 0's address); $ME's first lines explain them"
number NNODES 1 1000000
if [ "$NNODES" -eq 1 ]; then
    NODE_RANK=${NODE_RANK:-0}
    MASTER_ADDR=localhost
fi
NODE_RANK=${NODE_RANK:-}
[ -n "$NODE_RANK" ] || die "NODE_RANK is not set: give 0 on the node of MASTER_ADDR, 1 to $((NNODES - 1)) on the others"
number NODE_RANK 0 "$((NNODES - 1))" "NNODES is $NNODES"
[ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set: give the address of node 0 that all nodes can reach"
RESTARTS=${RESTARTS:-0}
number RESTARTS 0 1000
MASTER_PORT=${MASTER_PORT:-29500}
number MASTER_PORT 1 "$((65535 - RESTARTS))"
CONNECT_TIMEOUT=${CONNECT_TIMEOUT:-300}
number CONNECT_TIMEOUT 1 1000000
GPUS_PER_NODE=${GPUS_PER_NODE:-$(count_gpus)}
[ "$GPUS_PER_NODE" != 0 ] || GPUS_PER_NODE=1
number GPUS_PER_NODE 1 4096

LOG_DIR=${LOG_DIR:-logs}
if [ -z "${RUN_NAME:-}" ]; then
    if [ -n "${NETWORK:-}" ]; then
        RUN_NAME=$NETWORK
    elif [ "$NNODES" -eq 1 ]; then
        RUN_NAME=$(date +%Y%m%d-%H%M%S)
    else
        RUN_NAME=$(date +%Y%m%d)-port$MASTER_PORT  # the same on every node, whose clocks differ by seconds
    fi
fi

# ---- Network -------------------------------------------------------------------------------------------------------

# prefer NAME VALUE: exports it unless the user has set NAME.
prefer() {
    if [ -n "${!1+set}" ]; then
        [ "${!1}" = "$2" ] || say "NETWORK=$NETWORK would set $1=$2, but it is set to '${!1}' and stays so"
    else
        export "$1=$2"
    fi
}

# check_link NAME: warns unless the interface or adapter is there and up.
check_link() {
    local state
    if [ -e "/sys/class/infiniband/${1%%:*}" ]; then
        grep -qs ACTIVE "/sys/class/infiniband/${1%%:*}"/ports/*/state ||
            say "warning: no port of adapter $1 is active: the run will fail or use another link"
    elif [ -e "/sys/class/net/$1" ]; then
        state=$(cat "/sys/class/net/$1/operstate")
        case $state in
        up | unknown) ;;
        *) say "warning: interface $1 is $state: the run will fail or use another link" ;;
        esac
    elif [ -d /sys/class/net ]; then
        say "warning: this node has no interface or adapter $1; it has:" /sys/class/net/* /sys/class/infiniband/*
    fi
}

set_network() {
    local name sockets="" adapters=""
    case ${NETWORK:-} in
    '') return ;;
    ethernet | infiniband) ;;
    *) die "NETWORK is '$NETWORK': give ethernet or infiniband" ;;
    esac
    [ -n "${IFNAME:-}" ] || die "NETWORK=$NETWORK needs IFNAME: the interface (eth0, ib0) or InfiniBand adapter (mlx5_0) to use"
    for name in ${IFNAME//,/ }; do
        check_link "$name"
        if [ -e "/sys/class/infiniband/${name%%:*}" ] || [[ ! -e /sys/class/net/$name && $name =~ _[0-9]+(:[0-9]+)?$ ]]; then
            adapters=${adapters:+$adapters,}$name
        else
            sockets=${sockets:+$sockets,}$name
        fi
    done
    if [ "$NETWORK" = ethernet ]; then
        [ -z "$adapters" ] || die "NETWORK=ethernet: $adapters is an InfiniBand adapter; give an interface of 'ip -br link'"
        prefer NCCL_IB_DISABLE 1
        prefer NCCL_NET Socket
    else
        prefer NCCL_IB_DISABLE 0
        prefer NCCL_NET IB  # without it NCCL falls back to sockets, silently
        [ -z "$adapters" ] || prefer NCCL_IB_HCA "=$adapters"
    fi
    if [ -n "$sockets" ]; then
        prefer NCCL_SOCKET_IFNAME "=$sockets"  # without the = it would match each name that begins so
        prefer GLOO_SOCKET_IFNAME "$sockets"
    fi
}

# ---- Checks before the start ---------------------------------------------------------------------------------------

# resolve HOST | local HOST | free PORT | wait HOST PORT ATTEMPT RESTARTS SECONDS
read -r -d '' NET_CODE <<'PYTHON_CODE' || true
import os
import socket
import sys
import time

task, *values = sys.argv[1:]


def resolve(host):
    """Prints "loopback" or "ok"."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    loopback = all(address == "::1" or address.startswith("127.") for address in addresses)
    print("loopback" if loopback else "ok")


def local(host):
    """Fails unless this machine has the address: only then can it be bound."""
    errors = []
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind) as probe:
                return probe.bind(address)
        except OSError as error:
            errors.append(error)
    raise errors[0]


def free(port):
    """Fails if another process listens on the port."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()


def wait(host, first, attempt, restarts, seconds):
    """Prints n once node 0 listens on port first + n.

    Node 0 takes a higher port at each restart. A lower one than `attempt` is accepted only after it refused a
    connection: before that it may be the end of an attempt that has failed.
    """
    first, attempt, restarts = int(first), int(attempt), int(restarts)
    order = [*range(attempt, restarts + 1), *range(min(attempt, restarts + 1))]
    refused, why, start = set(), "", time.monotonic()
    told = start - 8  # the first message comes after two seconds: node 0 is often just starting
    while True:
        for offset in order:
            try:
                with socket.create_connection((host, first + offset), timeout=2):
                    pass
            except ConnectionRefusedError as error:
                refused.add(offset)
                why = error.strerror
            except OSError as error:
                why = error.strerror or str(error)
            else:
                if offset >= attempt or offset in refused:
                    print(offset)
                    return
                why = "the attempt that failed still holds its port"
            waited = time.monotonic() - start
            if waited > float(seconds):
                print(why)
                sys.exit(1)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"launch_multinode.sh: still waiting for node 0, {waited:.0f} s: {why}", file=sys.stderr)
        time.sleep(0.5)


try:
    {"resolve": resolve, "local": local, "free": free, "wait": wait}[task](*values)
except OSError as error:
    sys.exit(os.strerror(error.errno) if error.errno and error.errno > 0 else str(error))
PYTHON_CODE
net() { "$PYTHON" -c "$NET_CODE" "$@"; }

check_master() {
    local kind why
    if [ "$master_from_slurm" ] && ! net resolve "$MASTER_ADDR" >/dev/null 2>&1; then
        # A node's name need not resolve; SLURM itself may know it by another address.
        MASTER_ADDR=$(scontrol show node --oneliner "$MASTER_ADDR" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    fi
    kind=$(net resolve "$MASTER_ADDR" 2>&1) ||
        die "MASTER_ADDR '$MASTER_ADDR' does not resolve ($kind): give node 0's address on the network that the nodes share"
    if [ "$kind" = loopback ]; then
        if [ ! "$master_from_slurm" ] || [ "$NODE_RANK" -ne 0 ]; then
            die "MASTER_ADDR '$MASTER_ADDR' is a loopback address on this node, which no other node can reach:" \
                "give node 0's address on the network that the nodes share (ip -br addr)"
        fi
    elif [ "$NODE_RANK" -eq 0 ] && ! why=$(net local "$MASTER_ADDR" 2>&1); then
        die "NODE_RANK is 0, but MASTER_ADDR '$MASTER_ADDR' is not an address of this node ($why):" \
            "NODE_RANK 0 belongs to the node of MASTER_ADDR, and each other node has its own"
    fi
}

# ---- Processes and signals -----------------------------------------------------------------------------------------

child=       # what the launcher waits for now
torchrun=    # the same if it is torchrun
interrupted= # a signal came during the wait
stopped=     # the signal that ends the run
mark=$$.$RANDOM$RANDOM

# NOTE: torchrun's ranks are sessions of their own, so a killed torchrun leaves them behind; their environment tells.
marked() {
    [ -d /proc/self ] || return 0
    grep -lsz "^DEMO_RUN_ID=$mark\$" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

# sweep SECONDS: gives the processes of this attempt so long to end by themselves, then kills them.
# NOTE: no SIGTERM here: one rank that stops on a signal makes all ranks stop, on every node, for good.
sweep() {
    local deadline=$((SECONDS + $1)) pids
    while pids=$(marked) && [ -n "$pids" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            say "killing what is left of this attempt: $(echo "$pids" | wc -l) processes"
            # shellcheck disable=SC2086  # one word for each process
            kill -KILL $pids 2>/dev/null || true
            deadline=$((SECONDS + 5))
        fi
        sleep 0.5
    done
}

on_signal() {
    local name=$1
    interrupted=yes
    if [ -n "$stopped" ]; then
        if [ "$name" = INT ]; then
            say "SIGINT again: killing the run"
            # shellcheck disable=SC2046,SC2086
            kill -KILL $child $(marked) 2>/dev/null || true
        fi
        return
    fi
    stopped=$name
    if [ -n "$torchrun" ]; then
        say "SIG$name: passed on to torchrun; the ranks save a checkpoint and stop"
        [ "$name" != HUP ] || name=TERM  # the script does not handle a hang-up
        kill "-$name" "$torchrun" 2>/dev/null || true
    elif [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
    fi
}
for name in TERM INT USR1 HUP; do
    # shellcheck disable=SC2064
    trap "on_signal $name" "$name"
done

# await PROCESS: waits for a child, signals or not, and returns its exit code.
await() {
    local code
    while :; do
        interrupted=
        code=0
        wait "$1" 2>/dev/null || code=$?  # bash would report a killed child with its whole command line
        [ -n "$interrupted" ] || return "$code"
    done
}

# ---- One attempt ---------------------------------------------------------------------------------------------------

# find_port: sets port for this attempt, and attempt itself on a node that follows node 0.
find_port() {
    local why limit=$CONNECT_TIMEOUT offset
    port=$((MASTER_PORT + attempt))
    [ "$NNODES" -gt 1 ] || return 0
    if [ "$NODE_RANK" -eq 0 ]; then
        while ! why=$(net free "$port" 2>&1); do
            [ "$attempt" -gt 0 ] && [ "$attempt" -lt "$RESTARTS" ] ||
                die "port $port cannot be used on this node ($why): end what holds it (ss -ltnp), or set MASTER_PORT on every node"
            attempt=$((attempt + 1))
            port=$((MASTER_PORT + attempt))
        done
        say "node 0 waits up to $(patience) s at $MASTER_ADDR:$port for $((NNODES - 1)) more"
        return 0
    fi
    limit=$(patience)
    say "waiting up to $limit s for node 0 at $MASTER_ADDR:$port"
    "$PYTHON" -c "$NET_CODE" wait "$MASTER_ADDR" "$MASTER_PORT" "$attempt" "$RESTARTS" "$limit" \
        >"$scratch/answer" 2> >(tee -a "$log" >&2) &
    child=$!
    if ! await "$child"; then
        child=
        [ -z "$stopped" ] || return 0
        die "node 0 did not answer at $MASTER_ADDR:$port within $limit s ($(cat "$scratch/answer")):" \
            "start the launcher there with NODE_RANK=0, and open the port to this node"
    fi
    child=
    offset=$(cat "$scratch/answer")
    port=$((MASTER_PORT + offset))
    [ "$offset" -le "$attempt" ] || attempt=$offset
}

# patience: seconds to wait for the other nodes. After a failure they may take the script's --timeout to notice it.
patience() {
    local seconds=$CONNECT_TIMEOUT
    [ "$attempt" -eq 0 ] || seconds=$((seconds + script_timeout))
    echo "$seconds"
}

# run_torchrun ARGUMENTS: runs it to its end, into the log and the terminal; returns its exit code.
run_torchrun() {
    local rendezvous code=0 tee_process guard=()
    if [ "$NNODES" -eq 1 ]; then
        rendezvous=(--standalone --nnodes=1)
    else
        rendezvous=(--nnodes="$NNODES" --node_rank="$NODE_RANK" --rdzv_id="$port" --rdzv_backend=static
            --rdzv_endpoint="$MASTER_ADDR:$port" --rdzv_conf="timeout=$(patience)")
    fi
    rendezvous+=(--nproc_per_node="$GPUS_PER_NODE")
    say "$(date '+%Y-%m-%d %H:%M:%S') OMP_NUM_THREADS=$OMP_NUM_THREADS$(printf ' %q' torchrun "${rendezvous[@]}" "$SCRIPT" "$@")"

    # torchrun must not outlive a launcher that is killed; without torchrun the ranks end by themselves.
    if setpriv --pdeathsig KILL true 2>/dev/null; then guard=(setpriv --pdeathsig KILL); fi
    # tee reads on while the ranks stop on a signal, and goes on with the log if the terminal is gone.
    (
        trap '' INT TERM HUP USR1 PIPE
        exec tee -a "$log"
    ) <"$scratch/output" &
    tee_process=$!
    # NOTE: job control gives torchrun a process group of its own, so that Ctrl-C reaches it once, through the launcher.
    # torchrun sets the variables that are unset here for the ranks, WORLD_SIZE with another meaning.
    set -m
    ${guard[@]+"${guard[@]}"} env -u WORLD_SIZE -u NNODES -u NODE_RANK -u RANK -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT \
        DEMO_RUN_ID="$mark" "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" \
        --signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGUSR1 "$ROOT/$SCRIPT" "$@" \
        </dev/null >"$scratch/output" 2>&1 &
    torchrun=$! child=$!
    set +m
    # A signal that came before there was a child to take it.
    [ -z "$stopped" ] || kill -TERM "$torchrun" 2>/dev/null || true
    await "$torchrun" || code=$?
    torchrun="" child=""
    if [ -n "$stopped" ]; then sweep 30; else sweep 10; fi
    await "$tee_process" || true
    return "$code"
}

# attempt_log: what this attempt has written so far.
attempt_log() { tail -c "+$((log_size + 1))" "$log"; }

# first_cause EXIT_CODE: prints the line of this attempt that explains its failure.
first_cause() {
    attempt_log | awk -v code="$1" -v limit="$(patience)" '
    { line = $0; sub(/^\[(rank|default)[0-9]+\]: ?/, "", line) }
    /clients joined/ && /Timed out/ && !nodes {
        nodes = line; sub(/.*clients\. /, "", nodes)
        nodes = "the other nodes did not all come within " limit " s (" nodes "): start the launcher on each node with its NODE_RANK"
    }
    # A rank that lost another one says so; why the other was lost is the cause, where it is told.
    / ERROR: in .*([Cc]onnection|[Rr]eset|[Tt]imed out|closed)/ { if (lost == "") lost = line; next }
    error == "" && (/\] ERROR: / || /\.py: error: /) { error = line }
    /\] Stopped/ && gone == "" { gone = line }  # because the torchrun of some node is gone
    /ChildFailedError:/ { in_trace = 0 }  # that was torchrun itself
    trace == "" && error == "" && in_trace && line ~ /^[A-Za-z_][A-Za-z0-9_.]*(:|$)/ { trace = line }
    line ~ /^Traceback \(most recent call last\)/ { in_trace = 1 }
    /^Root Cause \(first observed failure\)/ { in_root = 1 }
    in_root && /^ *rank +:/ { rank = $3 }
    in_root && /^ *exitcode +: -/ { signal = substr($3, 2); in_root = 0 }
    line ~ /[^ ]/ { last = line }
    END {
        # SIGABRT and SIGTERM follow from an error that is named elsewhere; the others come from outside, or from a crash.
        if (code > 128) print "torchrun was ended by signal " code - 128
        else if (nodes != "") print nodes
        else if (signal != "" && signal != 6 && signal != 15) print "rank " rank " was ended by signal " signal
        else if (error != "") print error
        else if (trace != "") print trace
        else if (lost != "") print lost
        else if (gone != "") print gone
        else print "torchrun ended with code " code "; its last line: " last
    }'
}

# ---- Start ---------------------------------------------------------------------------------------------------------

[ -f "$ROOT/$SCRIPT" ] || die "$ROOT/$SCRIPT is missing"
# Without tools/ the demo runs with the Python that is there.
if [ -f "$ROOT/tools/python_env.sh" ]; then
    PYTHON=$(bash "$ROOT/tools/python_env.sh") || exit 1
else
    PYTHON=${PYTHON:-python3}
fi

mkdir -p "$LOG_DIR/$RUN_NAME" || die "the log folder $LOG_DIR/$RUN_NAME cannot be made: set LOG_DIR to one that can"
log=$LOG_DIR/$RUN_NAME/node$NODE_RANK.log
touch "$log" || { log=/dev/null && die "the log $LOG_DIR/$RUN_NAME/node$NODE_RANK.log cannot be written: set LOG_DIR or RUN_NAME"; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkfifo "$scratch/output"

set_network
[ "$NNODES" -eq 1 ] || check_master

# torchrun would set OMP_NUM_THREADS to 1 for more than one process, however many cores there are.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    OMP_NUM_THREADS=$((cores / GPUS_PER_NODE))
    [ "$OMP_NUM_THREADS" -gt 0 ] || OMP_NUM_THREADS=1
fi
export OMP_NUM_THREADS

arguments=("$@")
script_timeout=300  # the script's default
checkpoint=
resume=
previous=
for argument in "$@"; do
    case $argument in
    --checkpoint=*) checkpoint=${argument#*=} ;;
    --timeout=*) script_timeout=${argument#*=} ;;
    --resume) resume=yes ;;
    esac
    case $previous in
    --checkpoint) checkpoint=$argument ;;
    --timeout) script_timeout=$argument ;;
    esac
    previous=$argument
done
script_timeout=${script_timeout%%.*}
[[ $script_timeout =~ ^[0-9]{1,7}$ ]] || script_timeout=300

if [ "$RESTARTS" -gt 0 ]; then
    if [ -z "$checkpoint" ]; then
        checkpoint=$LOG_DIR/$RUN_NAME/checkpoint.pt
        arguments+=(--checkpoint "$checkpoint")
    fi
    if [ -z "$resume" ] && [ -e "$checkpoint" ] && [ "$NODE_RANK" -eq 0 ]; then
        # A restart must not go on from another run's checkpoint, should it come before this run's first one.
        mv "$checkpoint" "$checkpoint.$(date +%Y%m%d-%H%M%S)"
        say "$checkpoint is from an earlier run and not asked for with --resume: kept under its name with the time added"
    fi
fi

# stopped_on_signal: whether the ranks of this attempt said that they stopped on a signal, with a checkpoint saved.
stopped_on_signal() { attempt_log | grep '\] Stopped on SIG' >/dev/null; }

# say_repeated: what the failure before this attempt cost. Rank 0's line has the step that the checkpoint held.
last_step=
say_repeated() {
    local start
    [ -n "$last_step" ] || return 0
    start=$(attempt_log | sed -n 's/^\[[A-Z]* 0\] Run .*"start_step": *\([0-9]*\).*/\1/p' | tail -n 1)
    [ -z "$start" ] || say "restart $restarts went on from step $start; the log had come to step $last_step:" \
        "$((last_step > start ? last_step - start : 0)) steps repeated"
}

# permanent CAUSE: whether a restart would meet it again: an error in one line, but not one of network, ranks or workers.
permanent() {
    [[ $1 == *"$SCRIPT: error: "* ]] || { [[ $1 == *"] ERROR: "* ]] && ! [[ $1 =~ ERROR:\ (in|rendezvous)\  ]]; }
}

attempt=0
restarts=0
while :; do
    log_size=$(wc -c <"$log")
    find_port
    code=143
    if [ -z "$stopped" ]; then
        code=0
        run_torchrun "${arguments[@]+"${arguments[@]}"}" || code=$?
    fi
    say_repeated
    [ "$code" -ne 0 ] || exit 0
    if stopped_on_signal; then
        say "stopped on a signal, exit code 75; with --checkpoint FILE --resume the same command goes on"
        exit 75
    fi
    if [ -n "$stopped" ]; then
        say "stopped by SIG$stopped, with no checkpoint saved"
        exit "$code"
    fi

    cause=$(first_cause "$code")
    if [ "$restarts" -ge "$RESTARTS" ] || permanent "$cause"; then
        [ "$restarts" -eq 0 ] || say "gave up after $restarts restarts"
        say "failed, see $log; first cause:"
        printf '%s\n' "$cause" | tee -a "$log" >&2
        exit "$code"
    fi
    last_step=$(attempt_log | sed -n 's/.*\] Epoch [0-9]* | Step \([0-9]*\) .*/\1/p' | sort -n | tail -n 1)
    restarts=$((restarts + 1))
    attempt=$((attempt + 1))
    say "restart $restarts of $RESTARTS after: $cause"
    [ -n "$resume" ] || arguments+=(--resume)
    resume=yes
done
