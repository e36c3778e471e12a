#!/usr/bin/env bash
# Makes two nodes of one machine, joined by emulated cables of a given rate, and runs launch_multinode.sh on both.
#   tools/two_nodes.sh [--rate 1gbit] [--gpus_per_node N] [--name RUN_NAME] -- ARGUMENTS of demo_coco_resnet18.py
#   tools/two_nodes.sh --links slow=1gbit,fast=unshaped --repeats 4 [...]    runs over each of several cables, compared
# --rate: what the cable carries each way, as tc writes it (100mbit, 1gbit); without it, as much as the machine can.
# --links: cables, each with a name, which is that of its interface on both nodes, and its rate, or `unshaped`.
# Without paths among the ARGUMENTS it trains for some steps on the sample set.
# Needs root, on Linux. The logs are LOG_DIR/RUN_NAME/node0.log and node1.log. The launcher's variables apply. Behind
# sudo the nodes run as the user who called it; sudo passes variables on after env:
#   sudo env RESTARTS=1 tools/two_nodes.sh --rate 1gbit ...
# --repeats: with --links, how many runs over each, in rounds.
# Exit code: 0 if both nodes ended with 0, else the first other code.
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# ---- Options

if [[ " $* " =~ \ (-h|--help)\  ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
    echo "The script's own options: python demo_coco_resnet18.py --help"
    exit
fi
rate=
links=
repeats=1
export RUN_NAME=${RUN_NAME:-two_nodes-$(date +%Y%m%d-%H%M%S)} GPUS_PER_NODE=1
while [ "$#" -gt 0 ]; do
    case $1 in
    --rate) rate=${2:-} ;;
    --links) links=${2:-} ;;
    --repeats) repeats=${2:-} ;;
    --gpus_per_node | --gpus-per-node) GPUS_PER_NODE=${2:-} ;;
    --name) RUN_NAME=${2:-} ;;
    --)
        shift
        break
        ;;
    *) die "unknown option $1: give --rate or --links, --repeats, --gpus_per_node, --name, then -- ARGUMENTS" ;;
    esac
    shift 2 || die "$1 needs a value"
done
[[ $GPUS_PER_NODE =~ ^[1-9][0-9]{0,3}$ ]] || die "--gpus_per_node is '$GPUS_PER_NODE': give a number from 1 on"
[ -z "$rate" ] || [ -z "$links" ] || die "--rate and --links: each of the --links has its own rate"
cables=${links:-veth0=${rate:-unshaped}}
series=("$root/tools/series.py" --repeats "$repeats")
for cable in ${cables//,/ }; do
    [[ $cable =~ ^([A-Za-z][A-Za-z0-9_-]{0,14})=([A-Za-z0-9.]+)$ ]] ||
        die "'$cable': write NAME=RATE, as in slow=1gbit,fast=unshaped, with a NAME of up to 15 characters"
    series+=(--network "${BASH_REMATCH[1]}=${BASH_REMATCH[1]}")
done
[ "$(uname)" = Linux ] && [ "$(id -u)" -eq 0 ] ||
    die "network namespaces need Linux and root: start it with sudo, or use two machines"
# ---- Environment and data, once: the nodes have no way to the internet

stopped=
started=()
# shellcheck disable=SC2329  # called by the traps
forward() { # SIGNAL
    stopped=$1
    [ "${#started[@]}" -eq 0 ] || kill "-$1" "${started[@]}" 2>/dev/null || true
}
for signal in HUP INT TERM USR1; do
    # shellcheck disable=SC2064  # the name is that of now
    trap "forward $signal" "$signal"
done

wait_for() { # PROCESS: sets `code`
    while true; do
        code=0
        wait "$1" || code=$?
        if [ -z "$stopped" ] || ! kill -0 "$1" 2>/dev/null; then return; fi # a signal ends the wait, too
    done
}

as_caller=(setpriv --reuid "${SUDO_UID:-0}" --regid "${SUDO_GID:-0}" --clear-groups)
find_python
export PYTHON
if [[ ! " ${*//-/_}" =~ \ __(coco_image|annotation|val_image|val_annotation)_path && " $* " != *" --dummy "* ]]; then
    set -m
    "$PYTHON" "$root/tools/make_sample_coco.py" "$root/data/sample_coco" &
    set +m
    started=("$!")
    wait_for "$!"
    [ "$code" -eq 0 ] || exit "$code"
    started=()
fi
if [ -n "${SUDO_UID:-}" ]; then # what was made belongs to the user behind sudo
    [ ! -O "$root/data" ] || chown "$SUDO_UID:$SUDO_GID" "$root/data"
    for made in "$venv" "$venv.lock" "$root/data/sample_coco"; do
        [ ! -O "$made" ] || chown -R "$SUDO_UID:$SUDO_GID" "$made"
    done
fi

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
stated=
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
    say "cable $name: 10.213.$n.1 on node 0 and 10.213.$n.2 on node 1, $rate"
    stated+=" $(stated_rate "$name")"
    n=$((n + 1))
done
say "Emulated: two network namespaces of one machine, joined by $cables"
! "$PYTHON" "$root/tools/run.py" --count >/dev/null 2>&1 ||
    say "Both nodes use the same GPUs, in turns: times mean little"
# Without the ::ffff: form, under which PyTorch sees them, each connection waits for a name server.
printf '%s\n' '127.0.0.1 localhost' '10.213.0.1 node0' '10.213.0.2 node1' \
    '::ffff:10.213.0.1 node0' '::ffff:10.213.0.2 node1' >"$hosts"

# ---- The launcher on both

# Two nodes share the cores. With as many threads as cores on each, a step takes many times as long.
threads=$(($(nproc) / (2 * GPUS_PER_NODE)))
export NNODES=2 MASTER_ADDR=10.213.0.1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
unset WORLD_SIZE
command=(bash "$root/launch_multinode.sh" "$@")
if [ -n "$links" ]; then
    for rate in $stated; do series+=(--link_gbps "$rate"); done
    command=("$PYTHON" "${series[@]}" -- "$@")
elif [[ $stated == *=* ]]; then
    say "its interfaces state 10 Gb/s: compare_logs.py needs --link_gbps ${stated#*=} for this run's logs"
fi
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
[ -z "$stopped" ] || forward "$stopped" # it came before there was a launcher

first=0 # code other than 0
for one in "${started[@]}"; do
    wait_for "$one"
    [ "$first" -ne 0 ] || first=$code
done
exit "$first"
