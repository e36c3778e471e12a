"""What to do next: rows of one table, chosen by what limits a run and by the kind of its network.

A row holds a command, an option, or a link into docs/networks.md. None names a cause that nothing
has measured, and none is against a setting that the launcher makes.
"""

from analysis.network import ADAPTERS

MOST = 3  # things to do
PAGE = "docs/networks.md#"

# (words of a run's situation that must be there, or with ! must not; what to do): the first ones
# that fit are told. The words come from verdict.py, and from network_words below.
ROWS = [
    (
        "failed roce",
        "whether the ends reach each other: `ping -I INTERFACE ADDRESS` on both, by the adapters' "
        "interfaces, {page}roce",
    ),
    (
        "failed",
        "what else NCCL wrote: tools/nccl_log.py FOLDER, {page}which-network-nccl-used",
    ),
    ("wrong-rate", "what the port states: `{states}`; --link_gbps replaces it"),
    # What is unusual, in the order of find_unusual in verdict.py
    ("asked ipoib !gloo", "the adapter without IP: --network LABEL={adapter}"),
    (
        "asked !ipoib",
        "why no adapter was used: `ls /sys/class/infiniband /dev/infiniband` on each node",
    ),
    (
        "unmoved",
        "what chose the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, then `ip route get "
        "ADDRESS` on {other} (ADDRESS: of {first}, on the network that was meant)",
    ),
    ("pcie", "the adapter's slot: `sudo lspci -vv -s {slot}` on {node} (LnkSta beside LnkCap)"),
    ("lanes", "why not all lanes are up: `mlxlink -d {device} -c -m` on {node}"),
    (
        "errors-infiniband",
        "the link whose errors are counted: `ibqueryerrors`, `rdma statistic show link {link}`",
    ),
    (
        "errors-roce",
        "packets lost or reordered: `rdma statistic show link {link}` on both nodes, then the "
        "switch's discards, {page}roce",
    ),
    ("errors-ethernet", "the port whose errors are counted: `ethtool -S {port}` on {node}"),
    (
        "far-gpu",
        "the way from GPU to adapter, too long for NCCL: `nvidia-smi topo -m`. Compare a run with "
        "NCCL_NET_GDR_LEVEL=SYS, which allows any and may be slower",
    ),
    (
        "no-gpudirect !efa",
        "the link from GPU memory: `ib_write_bw -d {device} --use_cuda=0` on {first}, "
        "`ib_write_bw -d {device} --use_cuda=0 --report_gbits {first}` on {other}",
    ),
    ("slow-port", "the port that states less: `{states}` on {slowest}"),
    (
        "low sockets",
        "the link alone: `iperf3 -s` on {first}, `iperf3 -c ADDRESS -P 8` on {other} ({address}), "
        "{page}tcp",
    ),
    (
        "low !sockets !efa !plugin",
        "link and slot without NCCL: `ib_write_bw -d {device}` on {first}, `ib_write_bw "
        "-d {device} --report_gbits {first}` on {other}, {page}{kind}",
    ),
    (
        "low efa",
        "the link alone: fabtests' `fi_rma_bw -p efa -E` on {first}, `fi_rma_bw -p efa -E "
        "{first}` on {other}, {page}efa",
    ),
    (
        "again",
        "packets lost or reordered: `ethtool -S {name} | grep -iE 'drop|discard|err'` on both "
        "nodes, the switch's discards, {page}tcp",
    ),
    # What limits it
    ("slow-rank images", "rank {rank}, which waits for images: `iostat -x 5`, `top` on {host}"),
    (
        "slow-rank",
        "rank {rank}'s node: `top` on {host}, and `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`",
    ),
    ("input", "images in one file of raw pixels: tools/prepare_coco.py --packed"),
    ("input", "more loader processes: --workers (now {workers})"),
    ("input", "a network or a GPU alone, without images: --dummy"),
    ("crowded", "fewer processes and threads, or a machine without other load: `top`"),
    ("wait", "which rank comes late, and after what: --profile FOLDER"),
    ("unseen", "a probe before the run: PROBE=1 of launch_multinode.sh"),
    ("small", "nccl-tests with 1 GiB, which is enough for a fast link: {page}nccl-tests"),
    (
        "unrated sockets",
        "what this link can do: `iperf3 -s` on {first}, `iperf3 -c ADDRESS -P 8` on {other} "
        "({address})",
    ),
    ("inside gpu", "the way between the GPUs: `nvidia-smi topo -m`, {page}inside-a-node"),
    ("beyond cpu", "fewer threads (OMP_NUM_THREADS): network and computing may share cores"),
    ("beyond", "what ran when, beside the all-reduce: --profile FOLDER"),
    ("communication sends-none", "{still}half the bytes, rounded: --grad_compression bf16"),
    ("communication", "{still}fewer all-reduces: a larger --batch_size, or --accumulate_steps"),
    ("compute fp32 !slow-rank", "a lower precision: --precision bf16, where the hardware has it"),
    ("compute gpu !slow-rank", "a larger --batch_size, if `nvidia-smi dmon` shows idle GPUs"),
    ("compute !compiled !crowded !slow-rank", "fused operations: --compile"),
]


def next_steps(run, words, port="", slot="", node=""):
    """The texts that fit, at most MOST; `port` in `slot` of `node`: the one with a mark."""
    network, rank = run.network, run.straggler
    name = network.names[0] if network and network.names else "IFNAME"
    hosts = run.setting("hosts", [])
    first, other, *others = [*dict.fromkeys(hosts), "FIRST", "OTHER"]
    if network and network.host in others:  # the slowest node
        other = network.host
    on_adapter = network and network.transport in ADAPTERS
    values = {
        "page": PAGE,
        "still": "if that cannot be mended, " if "unusual" in words else "",
        "first": first,
        "other": other,
        "address": f"{first}'s on {name}",
        "name": name,
        "states": f"ibstat {name.partition(':')[0]}" if on_adapter else f"ethtool {name}",
        "port": port or name,
        "slot": slot,
        "node": node,
        "device": (port or name).partition(":")[0],
        "link": (port or name).replace(":", "/"),
        "kind": network and network.transport,
        "adapter": (network and network.adapter.partition(":")[0]) or "ADAPTER",
        "slowest": network and network.host,
        "rank": rank,
        "host": hosts[rank] if rank is not None and rank < len(hosts) else "its node",
        "workers": run.setting("workers", 0),
    }
    texts = []
    for row, text in ROWS:
        needed = {word for word in row.split() if word[0] != "!"}
        if needed <= words and not words & {word[1:] for word in row.split() if word[0] == "!"}:
            texts.append(text.format(**values))
    return texts[:MOST]


def network_words(run):
    """What the network of a run over several nodes is, for the table."""
    network = run.network
    if not network or not run.probe_s:
        return {"unmoved" if run.record("Probe") else "unseen"}
    kind = network.transport if network.transport in (*ADAPTERS, "plugin") else "sockets"
    return {kind, network.kind} | (set() if run.link_gbps else {"unrated"})
