# The networks to train over, and the variables that keep NCCL's and Gloo's traffic on one. launch_multinode.sh sources it.
# shellcheck shell=bash
# A network is LABEL=NAMES: ethernet=eth0, infiniband=mlx5_0,mlx5_1 or, with an interface for the start-up, mlx5_0,ib0.
sysfs=${SYSFS_ROOT:-/sys} # tests give another one; analysis/kernel.py reads it, too

is_adapter() { # mlx5_0, or mlx5_0:1 for one of its ports
    [ -e "$sysfs/class/infiniband/${1%%:*}" ]
}

set_networks() { # ARGUMENTS...: sets `networks`, the LABEL=NAMES of each network to train over
    [[ ${NETWORK:-} =~ ^(ethernet|infiniband|)$ ]] || die "NETWORK is '$NETWORK': give ethernet or infiniband"
    [[ ${IFNAME:-} != *" "* ]] || die "IFNAME is '$IFNAME': separate names by commas"
    networks="${NETWORK:-}=${IFNAME:-}"
    [ -n "${NETWORKS:-}" ] || return 0
    [ -z "${NETWORK:-}${IFNAME:-}" ] || die "NETWORKS and NETWORK or IFNAME are set: unset the latter"
    check_series NETWORKS "$NETWORKS" "$@"
    networks=$NETWORKS
}

check_networks() { # ends the launcher if any interface or adapter is missing or down
    local network name
    for network in $networks; do
        [ -z "${NETWORKS:-}" ] || [[ $network =~ ^[A-Za-z0-9._-]+=[^=]+$ ]] ||
            die "NETWORKS has '$network': write LABEL=INTERFACE, as in ethernet=eth0 infiniband=mlx5_0"
        for name in $(tr ',' ' ' <<<"${network#*=}"); do
            check_interface "$name"
        done
    done
}

check_interface() { # NAME
    local state
    if is_adapter "$1"; then
        state=$(cat "$sysfs/class/infiniband/${1%%:*}/ports"/*/state)
        [[ $state == *ACTIVE* ]] || die "no port of $1 is active: look at its cable, ibstat, the subnet manager"
    else
        [ -e "$sysfs/class/net/$1" ] ||
            die "this node has no $1: 'ip -br link' lists interfaces, 'ls /sys/class/infiniband' adapters"
        [ "$(cat "$sysfs/class/net/$1/carrier" 2>/dev/null)" = 1 ] ||
            die "interface $1 is down, or has no cable: 'ip -br link' shows it"
    fi
}

use_network() { # LABEL=NAMES: adds to `variables` what keeps NCCL and Gloo on this network
    local name sockets="" adapters="" efa=""
    for name in $(tr ',' ' ' <<<"${1#*=}"); do
        if ! is_adapter "$name"; then
            sockets+=",$name"
        elif [[ $(readlink "$sysfs/class/infiniband/${name%%:*}/device/driver") == */efa ]]; then
            efa=$name
        else
            adapters+=",$name"
        fi
    done
    if [ -n "$efa" ]; then
        say "$efa is an EFA device: NCCL's plugin for EFA selects the adapters"
    elif [ -n "$adapters" ] || [ "${NETWORK:-}" = infiniband ]; then
        [ "${NETWORK:-}" != ethernet ] || die "NETWORK=ethernet, but ${adapters#,} is an adapter: name its interface"
        prefer NCCL_IB_DISABLE 0
        prefer NCCL_NET IB # otherwise NCCL may silently fall back to sockets
        [ -z "$adapters" ] || prefer NCCL_IB_HCA "=${adapters#,}"
    elif [ -n "$sockets${NETWORK:-}" ]; then
        prefer NCCL_IB_DISABLE 1
        prefer NCCL_NET Socket
    fi
    if [ -n "$sockets" ]; then
        prefer NCCL_SOCKET_IFNAME "=${sockets#,}" # without the = eth1 would also match eth10
        prefer GLOO_SOCKET_IFNAME "${sockets#,}"
    elif [ "$NNODES" -gt 1 ]; then
        name_route
    fi
}

# name_route: names the interface of the route to node 0. By itself Gloo would take the address of this node's name, which
# Debian's /etc/hosts says is 127.0.1.1, and NCCL perhaps a bridge of containers. With an adapter NCCL only starts over it.
name_route() {
    local address name
    address=$(getent ahostsv4 "$MASTER_ADDR" 2>/dev/null | sed -n '1s/ .*//p' || true)
    name=$(interfaces to "$address") # on the node of MASTER_ADDR
    [ -n "$name" ] || name=$(ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' || true)
    # Where MASTER_ADDR is this node's own name: another interface, if there is only one.
    if [ -z "$name" ] || [ "$name" = lo ]; then name=$(interfaces up scope global); fi
    [ "$(wc -w <<<"$name")" -eq 1 ] || return 0
    prefer GLOO_SOCKET_IFNAME "$name"
    prefer NCCL_SOCKET_IFNAME "=$name"
}

interfaces() { # OPTIONS of ip address show: their names, without lo
    ip -o -4 address show "$@" 2>/dev/null | sed 's/^[0-9]*: *\([^ ]*\) .*/\1/' | grep -vx lo | sort -u || true
}
