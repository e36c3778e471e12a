# Sourced by launch_multinode.sh: the variables that keep NCCL's and Gloo's traffic on a network.
# shellcheck shell=bash
# A network is LABEL=NAMES: ethernet=eth0, infiniband=mlx5_0,mlx5_1 or, with an interface for the start-up, mlx5_0,ib0.

is_adapter() { # mlx5_0, or mlx5_0:1 for one of its ports
    [ -e "/sys/class/infiniband/${1%%:*}" ]
}

check_network() { # LABEL=NAMES: ends the launcher if an interface or adapter is missing or down
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
        say "$efa is an EFA device: NCCL's plugin for EFA selects the adapters"
    elif [ -n "$adapters" ] || [ "${NETWORK:-}" = infiniband ]; then
        [ "${NETWORK:-}" != ethernet ] || die "NETWORK=ethernet, but ${adapters#,} is an adapter: name its interface"
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

leave_out_virtual() { # NCCL may mistake a container bridge for the network between the nodes
    local address found virtual="(docker|br-|veth|virbr)"
    compgen -G "/sys/class/net/*" | grep -qE "/$virtual" || return 0
    ! compgen -G "/sys/class/net/ib*" >/dev/null || return 0 # which NCCL takes first
    address=$(getent ahosts "$MASTER_ADDR" | sed -n '1s/ .*//p' || true)
    found=$(ip -o route get "$address" 2>/dev/null; ip -o address show to "$address" 2>/dev/null) || true
    grep -qE " $virtual" <<<"$found" || prefer NCCL_SOCKET_IFNAME "^lo,docker,br-,veth,virbr"
}
