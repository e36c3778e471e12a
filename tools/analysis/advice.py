"""What to do next: rows of one table, chosen by what limits a run and by the kind of its network.

A row holds a command, an option, or a link into docs/networks.md. None names a cause that nothing
has measured, and none is against a setting that the launcher makes.
"""

from analysis.network import ADAPTERS
from analysis.words import rate

MOST = 3  # things to do
FALLEN_GBPS = 0.1  # an Ethernet port falls back to this where two pairs of its cable are bad
PAGE = "docs/networks.md#"

# (words of a run's situation that must be there, or with ! must not; what to do): the first ones
# that fit are told. The words come from steps_to_take in verdict.py, and from below.
ROWS = [
    ("failed roce", "whether the ends reach each other: `show_gids`, {page}roce"),
    (
        "failed",
        "all that NCCL wrote: tools/nccl_log.py FOLDER, {page}which-network-nccl-used",
    ),
    ("slow-rank images", "rank {rank}, which waits for images: `iostat -x 5`, `top` on {host}"),
    ("slow-rank cpu", "what else runs on rank {rank}'s cores: `top` on {host}"),
    (
        "slow-rank gpu",
        "rank {rank}'s GPU: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK` on {host}",
    ),
    ("input", "images in one file of raw pixels: tools/prepare_coco.py --packed"),
    ("input", "more loader processes: --workers (now {workers})"),
    ("input", "a network or a GPU alone, without images: --dummy"),
    ("crowded", "fewer processes and threads, or a machine without other load: `top`"),
    ("wait", "which rank comes late, and after what: --profile FOLDER"),
    (
        "between asked !ipoib",
        "why no adapter was used: `ls /sys/class/infiniband /dev/infiniband` on each node",
    ),
    ("between unequal sockets", "the port that states less: `ethtool {name}` on {slowest}"),
    ("between pcie", "the adapter's slot: `lspci -vv` (LnkSta beside LnkCap)"),
    ("between lanes", "the cable, whose lanes are not all up: `mlxlink -d {device} -c -m`"),
    ("between errors infiniband", "the cable whose errors are counted: `ibqueryerrors`"),
    ("between errors sockets", "the port whose errors are counted: `ethtool -S {name}`"),
    ("between unseen", "a probe before the run: PROBE=1 of launch_multinode.sh"),
    ("between unmoved", "the interface that is used: `ip route get PEER` on each node"),
    ("between small", "nccl-tests with 1 GiB, which is enough for a fast link: {page}nccl-tests"),
    ("between fallen", "the port, which states only {stated}: `ethtool {name}`"),
    ("between low sockets", "the link alone: `iperf3 -c PEER`, then with -P 8: {page}tcp"),
    ("between ipoib !gloo", "the adapter without IP: --network LABEL={adapter}"),
    (
        "between low infiniband",
        "the link alone: `ib_write_bw -d {device} --report_gbits`, {page}infiniband",
    ),
    ("between low roce", "packets lost or reordered: `rdma statistic show link {link}`"),
    ("between low roce", "the link alone: `ib_write_bw -d {device} --report_gbits`, {page}roce"),
    ("between low efa", "the link alone: fabtests' `fi_rma_bw -p efa -E PEER`, {page}efa"),
    ("between low plugin", "the same bytes by nccl-tests: {page}nccl-tests"),
    ("between unrated sockets", "what this link can do: `iperf3 -P 8 -c PEER`"),
    ("inside gpu", "the way between the GPUs: `nvidia-smi topo -m`, {page}inside-a-node"),
    ("inside cpu", "fewer processes: they share the cores of one machine"),
    ("overlap cpu", "fewer threads (OMP_NUM_THREADS): network and computing may share cores"),
    ("beyond", "what ran when, beside the all-reduce: --profile FOLDER"),
    ("communication sends-none", "half the bytes: --grad_compression bf16"),
    ("communication !sends-powersgd", "a small part of the bytes: --grad_compression powersgd"),
    ("communication", "fewer all-reduces: a larger --batch_size, or --accumulate_steps"),
    ("compute fp32", "a lower precision: --precision bf16, where the hardware has it"),
    ("compute gpu", "a larger --batch_size, if the GPU's memory is not full"),
    ("compute !compiled !crowded", "fused operations: --compile"),
]


def next_steps(run, words):
    """The texts that fit, at most MOST."""
    network = run.network
    name = network.names[0] if network and network.names else "IFNAME"
    hosts = run.setting("hosts", list)
    rank = run.straggler
    values = {
        "page": PAGE,
        "name": name,
        "device": name.partition(":")[0],
        "link": name.replace(":", "/"),
        "adapter": (network and network.adapter.partition(":")[0]) or "ADAPTER",
        "stated": rate(run.link_gbps or 0),
        "slowest": min(stated_rates(run))[1] if stated_rates(run) else "",
        "rank": rank,
        "host": hosts[rank] if rank is not None and rank < len(hosts) else "its node",
        "workers": run.setting("workers", int) or 0,
    }
    texts = []
    for row, text in ROWS:
        if all(
            (word[1:] not in words) if word[0] == "!" else word in words for word in row.split()
        ):
            texts.append(text.format(**values))
    return texts[:MOST]


def stated_rates(run):
    """(Gb/s, node) of each network that states a rate."""
    return [(one.stated, one.host) for one in run.networks if one.stated]


def marked_words(run):
    """What is marked in the table of nodes."""
    rows = [row for facts in run.facts.values() for row in facts["rows"]]
    marks = " ".join(mark for row in rows for mark in row["marks"])
    parts = {"pcie": "PCIe", "lanes": "X, not", "errors": "errors counted"}
    return {word for word, part in parts.items() if part in marks}


def network_words(run):
    """What the network of a run over several nodes is, for the table."""
    network = run.network
    if not network or not run.probe_s:
        return {"unmoved" if run.record("Probe") else "unseen"}
    kind = network.transport if network.transport in (*ADAPTERS, "plugin") else "sockets"
    words = {kind, network.kind}
    if len({gbps for gbps, _ in stated_rates(run)}) > 1:
        words.add("unequal")
    words |= set() if run.link_gbps else {"unrated"}
    stated = (run.link_gbps or 0) / max(1, len(network.names))
    return words | ({"fallen"} if kind == "sockets" and 0 < stated <= FALLEN_GBPS else set())
