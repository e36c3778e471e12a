#!/usr/bin/env bash
# Makes two nodes of one machine, joined by emulated cables of a given rate, and runs launch_multinode.sh on both.
#   tools/two_nodes.sh [--rate 1gbit] -- ARGUMENTS of demo_coco_resnet18.py
#   tools/two_nodes.sh --links slow=1gbit,fast=unshaped [--repeats 4] -- [ARGUMENTS]   runs over each cable, compared
# --rate: what the cable carries each way, as tc writes it (100mbit, 1gbit); without it, as much as the machine can.
# --links: cables, each with a name, which is that of its interface on both nodes, and its rate, or `unshaped`.
# --repeats: with --links, how many runs over each, in rounds.
# Needs root, on Linux. The launcher's variables apply, with GPUS=1. The logs are LOG_DIR/RUN_NAME/node0.log
# and node1.log. Behind sudo the nodes run as the user who called it; sudo passes variables on after env:
#   sudo env RESTARTS=1 tools/two_nodes.sh --rate 1gbit ...
# Exit code: 0 if both nodes ended with 0, else the first other code; 2 also if they cannot be made.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

if [[ " $* " =~ \ (-h|--help)\  ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    echo "The script's own options: python demo_coco_resnet18.py --help"
    exit
fi
rate=
links=
repeats=1
while [ "$#" -gt 0 ]; do
    case $1 in
    --rate) rate=${2:-} ;;
    --links) links=${2:-} ;;
    --repeats) repeats=${2:-} ;;
    --)
        shift
        break
        ;;
    *) die "unknown option $1: give --rate, or --links and --repeats, then -- ARGUMENTS" ;;
    esac
    shift 2 || die "$1 needs a value"
done
[ -z "$rate" ] || [ -z "$links" ] || die "--rate and --links: each of the --links has its own rate"
cables=${links:-veth0=${rate:-unshaped}}
for cable in ${cables//,/ }; do
    [[ $cable =~ ^[A-Za-z][A-Za-z0-9_-]{0,14}=[A-Za-z0-9.]+$ ]] ||
        die "'$cable': write NAME=RATE, as in slow=1gbit,fast=unshaped, with a NAME of up to 15 characters"
done
[[ ${GPUS_PER_NODE:=${GPUS:-1}} =~ ^[1-9][0-9]*$ ]] || die "GPUS is '$GPUS_PER_NODE': give a whole number from 1 on"
[ "$(uname)" = Linux ] && [ "$(id -u)" -eq 0 ] ||
    die "network namespaces need Linux and root: start it with sudo, or use two machines"

# What is made belongs to the user behind sudo: .venv, the sample set, logs.
user=${SUDO_UID:-0}
as_caller=(setpriv --reuid "$user" --regid "${SUDO_GID:-0}" --clear-groups)
as_caller+=(env HOME="$(getent passwd "$user" | cut -d: -f6)")
PYTHON=$("${as_caller[@]}" "$root/tools/environment.sh" here)
export PYTHON GPUS_PER_NODE RUN_NAME=${RUN_NAME:-two_nodes-$(date +%Y%m%d-%H%M%S)}

# ---- The nodes

spaces=("two_nodes$$-0" "two_nodes$$-1")
hosts=$(mktemp)

# shellcheck disable=SC2329  # called by the trap
remove_nodes() {
    local space
    for space in "${spaces[@]}"; do
        ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
        ip netns delete "$space" 2>/dev/null || true
    done
    rm -f "$hosts"
}
trap remove_nodes EXIT

stated_rate() { # CABLE: prints CABLE=GBPS, because a virtual interface states 10 Gb/s whatever its cable carries
    # In bytes per second. An unshaped cable has none, and an older tc does not write it so.
    tc -j -n "${spaces[0]}" qdisc show dev "$1" | sed -n 's/.*"rate":\([0-9]*\).*/\1/p' |
        awk -v cable="$1" '{ printf "%s=%.12g", cable, $1 * 8 / 1e9 }'
}

for space in "${spaces[@]}"; do
    ip netns add "$space" || die "no network namespace can be made here, see above: use a virtual machine, or two real ones"
    ip -n "$space" link set lo up
done
n=0
series=("$PYTHON" "$root/tools/series.py" --repeats "$repeats")
for cable in ${cables//,/ }; do
    name=${cable%%=*}
    rate=${cable#*=}
    # Jumbo frames: of a large packet the shaper counts a header for each frame, the interface only one. With frames of
    # 1,500 bytes the interface's count would be 5 % below the rate.
    ip link add name "$name" mtu 9000 netns "${spaces[0]}" type veth peer name "$name" mtu 9000 netns "${spaces[1]}" ||
        die "no cable can be called $name, or be made here"
    for k in 0 1; do
        ip -n "${spaces[k]}" address add "10.213.$n.$((k + 1))/24" dev "$name"
        ip -n "${spaces[k]}" link set dev "$name" up
        [ "$rate" != unshaped ] || continue
        # The burst has to hold one segment that TCP hands down in one piece (64 KB); more would pass above the rate.
        tc -n "${spaces[k]}" qdisc add dev "$name" root tbf rate "$rate" burst 128kb latency 100ms ||
            die "tc does not take the rate $rate: write it as 100mbit or 1gbit"
    done
    say "Emulated cable $name, $rate: 10.213.$n.1 is node 0, 10.213.$n.2 node 1, two network namespaces of one machine"
    stated=$(stated_rate "$name")
    series+=(--network "$name=$name" ${stated:+--link_gbps "$stated"})
    n=$((n + 1))
done
[ "$("$PYTHON" "$root/tools/run.py" --count)" = 0 ] || say "Both nodes use the same GPUs, in turns: times mean little"
# Without the ::ffff: form, under which PyTorch sees them, each connection waits for a name server.
printf '%s\n' '127.0.0.1 localhost' '10.213.0.1 node0' '10.213.0.2 node1' \
    '::ffff:10.213.0.1 node0' '::ffff:10.213.0.2 node1' >"$hosts"

# ---- The launcher on both

# Two nodes share the cores. With as many threads as cores on each, a step takes many times as long.
threads=$(($(nproc) / (2 * GPUS_PER_NODE)))
export NNODES=2 MASTER_ADDR=10.213.0.1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
unset WORLD_SIZE
command=("${series[@]}" -- "$@")
if [ -z "$links" ]; then
    command=(bash "$root/launch_multinode.sh" "$@")
    [ -z "$stated" ] || say "compare_logs.py needs --link_gbps ${stated#*=} for this run: its interfaces state 10 Gb/s"
fi
started=()
set -m # a process group each: Ctrl-C reaches them through forward alone
for k in 0 1; do
    export SHOWN_NODE=
    [ ! -t 1 ] || SHOWN_NODE="node $k | "
    # shellcheck disable=SC2016  # for the inner shell to expand
    NODE_RANK=$k ip netns exec "${spaces[k]}" unshare --uts bash -c '
            echo "node$NODE_RANK" >/proc/sys/kernel/hostname
            mount --bind "$1" /etc/hosts
            shift
            exec "$@"' bash "$hosts" "${as_caller[@]}" "${command[@]}" &
    started+=("$!")
done
set +m

for signal in HUP INT TERM USR1; do
    # shellcheck disable=SC2064  # the name is that of now
    trap "kill -$signal ${started[*]} 2>/dev/null || true" "$signal"
done
first=0 # code other than 0
for one in "${started[@]}"; do
    code=0
    wait "$one" || code=$?
    while kill -0 "$one" 2>/dev/null; do # a signal has ended the wait
        code=0
        wait "$one" || code=$?
    done
    [ "$first" -ne 0 ] || first=$code
done
exit "$first"
