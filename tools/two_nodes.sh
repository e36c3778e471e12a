#!/usr/bin/env bash
# For anyone who has one machine: two nodes on it, namespaces joined by virtual cables, launch_multinode.sh in each.
#   tools/two_nodes.sh [--rate 1gbit] [--gpus_per_node N] [--name RUN_NAME] -- ARGUMENTS of demo_coco_resnet18.py
#   tools/two_nodes.sh --links slow=1gbit,fast=unshaped [...]     a run over each of several cables, then the comparison
# --rate: what the cable carries each way, as tc writes it (100mbit, 1gbit); without it, as much as the machine can.
# --links: cables, each with its name, which is that of its interface on both nodes, and its rate, or `unshaped`.
# Without ARGUMENTS it trains for some steps on the sample set.
# Needs root, on Linux. The logs are LOG_DIR/RUN_NAME/node0.log and node1.log. The launcher's variables apply; sudo passes
# them on after env, and what it makes then belongs to who called it:
#   sudo env RESTARTS=1 tools/two_nodes.sh ...
# Exit code: 0 if both nodes ended with 0, else the first other code.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "two_nodes.sh: $*" >&2 || true; } # a terminal may be gone, a disk full
die() {
    say "error: $*"
    exit 1
}

rate=
links=
GPUS_PER_NODE=1
RUN_NAME=${RUN_NAME:-two_nodes-$(date +%Y%m%d-%H%M%S)}
while [ "$#" -gt 0 ]; do
    option=${1//-/_}
    case $option in
    __rate | __links | __gpus_per_node | __name)
        [ "$#" -gt 1 ] || die "$1 needs a value"
        case $option in
        __rate) rate=$2 ;;
        __links) links=$2 ;;
        __gpus_per_node) GPUS_PER_NODE=$2 ;;
        __name) RUN_NAME=$2 ;;
        esac
        shift 2
        ;;
    __help | _h)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    __)
        shift
        break
        ;;
    *) die "unknown option $1: give --rate or --links, --gpus_per_node, --name, then -- ARGUMENTS" ;;
    esac
done
[ -z "$rate" ] || [ -z "$links" ] || die "--rate and --links: each of the --links has its own rate"
[[ $GPUS_PER_NODE =~ ^[1-9][0-9]{0,3}$ ]] || die "--gpus_per_node is '$GPUS_PER_NODE': give a number, 1 or more"
# The cables: what the interface is called on both nodes, and the rate of each.
names=(veth0) rates=("$rate") networks=
if [ -n "$links" ]; then
    names=() rates=()
    for link in ${links//,/ }; do
        [[ $link =~ ^([a-zA-Z][a-zA-Z0-9_-]{0,14})=([a-zA-Z0-9.]+)$ && $link != lo=* ]] ||
            die "--links has '$link': write NAME=RATE, as in slow=1gbit,fast=unshaped, a NAME of up to 15 characters"
        [[ " ${names[*]} " != *" ${BASH_REMATCH[1]} "* ]] || die "--links has two named ${BASH_REMATCH[1]}"
        names+=("${BASH_REMATCH[1]}") rates+=("${BASH_REMATCH[2]/#unshaped/}")
        networks+="${BASH_REMATCH[1]}=${BASH_REMATCH[1]} "
    done
    [ "${#names[@]}" -gt 1 ] || die "--links is '$links': name two or more, or give --rate for one"
fi
[ "$(uname)" = Linux ] || die "network namespaces are Linux's own: use Linux, or two machines"
[ "$(id -u)" -eq 0 ] || die "network namespaces need root: start it with sudo, or use two machines"
for program in ip tc unshare; do
    command -v "$program" >/dev/null || die "$program is missing: install iproute2 and util-linux"
done

spaces=("two_nodes$$-0" "two_nodes$$-1")
launchers=()
stopped=
scratch=$(mktemp -d)

# Under sudo: who called it, and what this run makes. first_missing PATH: of the folders on the way to it and itself
# the first that is not there; nothing if all are.
caller=
[[ ! ${SUDO_UID:-} =~ ^[1-9][0-9]*$ || ! ${SUDO_GID:-} =~ ^[0-9]+$ ]] || caller=$SUDO_UID:$SUDO_GID
first_missing() {
    local path=$1 found=
    while [ ! -e "$path" ] && [ ! -L "$path" ]; do
        found=$path
        path=$(dirname -- "$path")
    done
    printf '%s' "$found"
}
run_folder=${LOG_DIR:-logs}/$RUN_NAME
made=()
for path in "$run_folder" "$ROOT/data/sample_coco" "$ROOT/.venv" "$ROOT"/tools/{,launcher/,analysis/,common/}__pycache__; do
    made+=("$(first_missing "$path")")
done
# shellcheck disable=SC2329  # called by clean_up
give_to_caller() {
    local path
    for path in "${made[@]}"; do
        [ -z "$path" ] || find "$path" -user 0 -exec chown -h "$caller" {} + 2>/dev/null || true
    done
    # In a folder that was there and is the caller's: what is root's and has changed since the start.
    if [ -z "${made[0]}" ] && [ -n "$(find "$run_folder" -prune -type d -user "${caller%:*}")" ]; then
        find "$run_folder" -user 0 -cnewer "$scratch/start" -exec chown -h "$caller" {} + || true
    fi
}
touch "$scratch/start"

remove_spaces() {
    local space
    for space in "$@"; do
        [ -e "/run/netns/$space" ] || continue
        ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
        ip netns delete "$space" || true
    done
}
# shellcheck disable=SC2329  # called by the traps below
clean_up() {
    trap '' INT TERM HUP USR1
    [ "${#launchers[@]}" -eq 0 ] || kill -KILL "${launchers[@]}" 2>/dev/null || true
    remove_spaces "${spaces[@]}"
    [ -z "$caller" ] || give_to_caller
    rm -rf "$scratch"
}
# shellcheck disable=SC2329
forward() {
    stopped=$1
    [ "${#launchers[@]}" -eq 0 ] || kill "-$1" "${launchers[@]}" 2>/dev/null || true
}
# attend COMMAND...: runs what may take long while this prepares. bash takes a signal only when a command that it waits
# for has ended, but at once in `wait`; what it starts with & ignores Ctrl-C, so that SIGTERM ends it.
attend() {
    "$@" &
    wait "$!"
}
# shellcheck disable=SC2329
stop_preparing() {
    trap '' INT TERM HUP USR1
    # shellcheck disable=SC2046  # each is a word
    kill -TERM $(jobs -p) 2>/dev/null || true
    wait
    say "stopped by SIG$1 while it prepared the nodes"
    exit "$2"
}
trap clean_up EXIT
for name in HUP=129 INT=130 USR1=138 TERM=143; do
    # shellcheck disable=SC2064
    trap "stop_preparing ${name/=/ }" "${name%=*}"
done

# What a run that was killed with SIGKILL left behind: namespaces whose script is gone.
for path in /run/netns/two_nodes[0-9]*-[01]; do
    owner=${path#/run/netns/two_nodes}
    [ ! -e "$path" ] || [ -e "/proc/${owner%-*}" ] || remove_spaces "${path#/run/netns/}"
done

cores=$(bash "$ROOT/tools/launcher/cores.sh")
# The nodes have no way to the internet: whatever must be installed is installed before.
attend bash "$ROOT/tools/launcher/python_env.sh" >"$scratch/python" || exit 1
PYTHON=$(<"$scratch/python")
export PYTHON
# Not by both nodes at a time.
[ "$#" -gt 0 ] || attend "$PYTHON" "$ROOT/tools/make_sample_coco.py" --processes "$cores" "$ROOT/data/sample_coco"

ip netns add "${spaces[0]}" || die "no network namespaces are allowed here: run it on a virtual machine or two real ones"
ip netns add "${spaces[1]}"
for k in 0 1; do ip -n "${spaces[k]}" link set lo up; done
for n in "${!rates[@]}"; do
    # Jumbo frames: of what Linux hands down in one piece the shaper counts a header for each frame, the interface only
    # one. With frames of 1,500 bytes the interface's count would be 5 % below the rate.
    name=${names[n]}
    ip link add name "$name" mtu 9000 netns "${spaces[0]}" type veth peer name "$name" mtu 9000 netns "${spaces[1]}"
    for k in 0 1; do
        ip -n "${spaces[k]}" address add "10.213.$n.$((k + 1))/24" dev "$name"
        ip -n "${spaces[k]}" link set dev "$name" up
        [ -n "${rates[n]}" ] || continue
        # The burst must hold one segment that TCP hands down in one piece (64 KB); more would pass above the rate.
        tc -n "${spaces[k]}" qdisc add dev "$name" root tbf rate "${rates[n]}" burst 128kb latency 100ms ||
            die "tc does not take ${links:+--links }${rate:+--rate }${rates[n]}: write it as 100mbit or 1gbit"
    done
    say "cable $n: $name, 10.213.$n.1 on node 0 and 10.213.$n.2 on node 1, ${rates[n]:-no} rate limit"
done
# Without the ::ffff: form, under which torch sees them, each connection waits for a name server and warns.
printf '%s\n' '127.0.0.1 localhost' '10.213.0.1 node0' '10.213.0.2 node1' \
    '::ffff:10.213.0.1 node0' '::ffff:10.213.0.2 node1' >"$scratch/hosts"
say "namespaces ${spaces[0]} (node 0) and ${spaces[1]} (node 1): emulated, two nodes of one machine"

threads=$((cores / (2 * GPUS_PER_NODE)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export NNODES=2 MASTER_ADDR=10.213.0.1 GPUS_PER_NODE RUN_NAME
unset WORLD_SIZE GLOO_SOCKET_IFNAME # the launcher chooses it
if [ -n "$links" ]; then
    export NETWORKS=${networks% } DEMO_NOTE="Emulated: two network namespaces of one machine, joined by $links"$'\n\n'
fi

# Each node has its own host name, by which the log tells them apart, and finds the other's without a name server.
for name in HUP INT USR1 TERM; do
    # shellcheck disable=SC2064
    trap "forward $name" "$name"
done
set -m  # a process group each: Ctrl-C reaches them once, through forward
for k in 0 1; do
    # shellcheck disable=SC2016  # for the inner shell to expand
    NODE_RANK=$k setpriv --pdeathsig TERM ip netns exec "${spaces[k]}" unshare --uts bash -c '
            [ "$PPID" -eq "$3" ] || exit 1 # it was gone before setpriv had tied this to it
            echo "node$1" >/proc/sys/kernel/hostname
            mount --bind "$2" /etc/hosts
            shift 3
            exec "$@"' bash "$k" "$scratch/hosts" "$$" bash "$ROOT/launch_multinode.sh" "$@" &
    launchers+=("$!")
done
set +m
[ -z "$stopped" ] || forward "$stopped" # it has come before there were both

code=0
for launcher in "${launchers[@]}"; do
    while :; do
        node_code=0
        wait "$launcher" || node_code=$?
        # A signal ends the wait early, too.
        if [ -z "$stopped" ] || ! kill -0 "$launcher" 2>/dev/null; then break; fi
    done
    [ "$code" -ne 0 ] || code=$node_code
done
launchers=()
exit "$code"
