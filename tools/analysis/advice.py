"""What to check or change next, for TCP, InfiniBand, RoCE and EFA: for each part of a step rows of
(condition, sentence), most likely first.

What is advised fits the run, and the run does not have it already.
"""

from dataclasses import dataclass

from analysis.logs import get, objects
from analysis.nccl import REASONS
from analysis.network import ADAPTERS
from analysis.projection import payload_rate
from analysis.runs import usual_times
from analysis.words import digits, rate

FAST_SOCKETS_GBPS = 25  # from here on one TCP connection, bound by one core, may not fill the link
FALLEN_GBPS = 0.1  # an Ethernet port falls back to this where two pairs of its cable are bad
PORTS_GBPS = (0.01, 0.1, 1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400)  # what a port negotiates
DELIVERS = 0.8  # above this share of its stated speed, headers and start-up account for the rest
# In the log of a complete run, what a restart or another try has overcome.
OVERCOME = ("no_interface", "timeout", "direct_path", "local_protection", "peer_unreachable")
OVERCOME += ("connection_failed", "completion_failed", "flushed")
BEYOND = "the time beyond an all-reduce alone: --profile FOLDER shows what ran when"
GPUDIRECT = "GPUDirect: {} loaded, or DMA-BUF; adapters near their GPU (`nvidia-smi topo -m`)"
IN_PART = 0.2  # above this share of a step, exposed communication bounds it in part
WORTH = 0.05  # below this share of a step, a part of it is not worth a change
SCALES = 0.8  # more processes are no advice for a run of a lower efficiency


@dataclass
class Advice:
    """What to check or change for one part of a step."""

    part: str  # in words
    costs_s: float | None  # of a step: what is not compute can be saved, at most
    checks: list  # most likely first
    alone_s: float | None = None  # of communication: what an all-reduce alone takes


def next_checks(run, parts, slow_link, in_trouble):
    """A list of Advice, the part that costs most first.

    parts: {part of a step: seconds}, see parts_of_step; slow_link: the rate, in Gb/s, of a link
    that is slower than it states, else None; in_trouble: it has lost data or counted errors.
    """
    found = []
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        name, rows, faults, alone_s = part, [], [], None
        if part == "slow rank":
            name, rows = f"rank {run.straggler}", slow_rank_rows(run)
        elif part == "input":
            name, rows = "waiting for images", input_rows(run)
        elif part == "compute":
            rows = compute_rows(run) if seconds == max(parts.values()) else []
        else:
            name = "compression and communication" if part == "compression" else "communication"
            alone_s = run.probe_s
            rows = good_link_rows(run, part, seconds == max(parts.values()))
            if slow_link and part == "link":  # then nothing else matters
                rows = tunnel_rows(run) if tunnel_of(run) else slow_link_rows(run, slow_link)
            beyond = part == "link" and seconds - (run.probe_s or seconds) > WORTH * run.step_s
            rows.append((beyond, BEYOND))
            link = name_of(run).replace(":", "/")
            dropped = f"what is dropped: `rdma statistic show link {link}`"
            rows.append((in_trouble and kind_of(run) == "efa", dropped))
            faults = [(True, text) for text in nccl_advice(run)] + adapter_rows(run)
            faults += trouble_rows(run) if in_trouble else []
        rows = faults + (rows if seconds >= WORTH * run.step_s else [])
        if checks := list(dict.fromkeys(text for fits, text in rows if fits)):
            found.append(Advice(name, seconds, checks, alone_s))
    return found


def kind_of(run):
    """infiniband, roce, efa, ipoib or sockets."""
    network = run.network
    if network and network.transport in ADAPTERS:
        return network.transport
    return "ipoib" if network and network.kind == "ipoib" else "sockets"


def shares_cores(run):
    """Whether a process has threads to spare for the network."""
    return run.on_cpu and run.setting("threads", int) != 1


def name_of(run):
    """The interface or adapter that carried it, for a command."""
    return run.network.names[0] if run.network and run.network.names else "IFNAME"


def tunnel_of(run):
    """The tunnel or bridge over a link that it does not fill; empty if there is none."""
    network = run.network
    if not network or not network.gbps or network.gbps >= DELIVERS * (run.link_gbps or 0):
        return ""
    return ", ".join(network.over)


def tunnel_rows(run):
    tunnel, name = tunnel_of(run), name_of(run)
    route = "the route: `ip route get` with the address of PEER that `ss -tn` shows during a run; "
    route += f"`dev {tunnel}` means that the bytes go through {tunnel}"
    if run.network and not run.network.finding:  # or NCCL is on it already
        route += f". IFNAME={name} leaves it, if the nodes reach each other by {name}"
    alone = f"what {tunnel} costs: `iperf3 -c` to PEER's address on {tunnel}, then to one that it "
    alone += "does not carry; `mpstat -P ALL 1` shows a core that is full"
    return [(tunnel, route), (tunnel, alone)]


def slow_rank_rows(run):
    hosts = run.setting("hosts", list)
    who = f"rank {run.straggler}"
    if run.straggler < len(hosts):
        who += f" on {hosts[run.straggler]}"
    data, compute, _ = run.ranks[run.straggler]
    usual_data, usual_compute = usual_times(run.ranks)
    if data - usual_data > compute - usual_compute:
        look = "it waits for images; its disk and load (`iostat -x 5`, `top`)"
    elif run.on_cpu:
        look = "what else runs on its cores, and their clock (`top`, `lscpu -e`)"
    else:
        look = "heat, power, clock and other load of its GPU (`nvidia-smi -q -d "
        look += "PERFORMANCE,TEMPERATURE`)"
    return [(True, f"{who}: {look}")]


def nccl_advice(run):
    """The advice for each problem that NCCL's text shows on any node, or in the run's own log."""
    findings = [network.finding for network in run.networks] + [run.log.nccl]
    problems = [problem for finding in findings for problem in objects(finding, "problems")]
    if run.complete:
        problems = [p for p in problems if p.get("id") not in OVERCOME]
    if {str(p.get("id")) for p in problems} & set(REASONS):  # says more than that it fell back
        problems = [p for p in problems if p.get("id") != "fell_back_to_sockets"]
    return list(dict.fromkeys(text for p in problems if (text := get(p, "advice", str))))


def adapter_rows(run):
    """For IP over InfiniBand whose reason is not known."""
    if kind_of(run) != "ipoib" or run.setting("backend") != "nccl":
        return []
    adapter = run.network.adapter.partition(":")[0] or "ADAPTER"
    text = "NCCL_DEBUG=INFO shows why NCCL took sockets (/dev/infiniband missing in a "
    text += f"container?); then the adapter itself: NETWORK=infiniband IFNAME={adapter}"
    return [(not run.network.problem("fell_back_to_sockets"), text)]


def trouble_rows(run):
    kind, name = kind_of(run), name_of(run)
    device, link = name.partition(":")[0], name.replace(":", "/")
    lossy = "what loses data: cable, transceiver, switch port"
    virtual = run.network and run.network.virtual
    return [
        (kind == "infiniband", f"{lossy} (`ibqueryerrors`, `mlxlink -d {device} -c -m`)"),
        (kind == "roce", roce_losses(link)),
        (kind in ("sockets", "ipoib") and not virtual, f"{lossy} (`ethtool -S {name}`)"),
        (virtual, f"what drops packets: `tc -s qdisc show dev {name}`"),
    ]


def roce_losses(link):
    return (
        f"what is lost: `rdma statistic show link {link}` (out_of_sequence, packet_seq_err, "
        "local_ack_timeout_err), `ethtool -S` of its interface (discards, pauses), the switch's "
        "own"
    )


def slow_link_rows(run, reached_gbps):
    """For a link well below its stated speed, by what carried the bytes."""
    network, kind, name = run.network, kind_of(run), name_of(run)
    device, link = name.partition(":")[0], name.replace(":", "/")
    count = len(network.names)
    each_gbps = run.link_gbps / count
    module = "efa_nv_peermem" if kind == "efa" else "nvidia-peermem"
    more = "more connections, as one may not fill this link: NCCL_SOCKET_NTHREADS=4 and "
    more += "NCCL_NSOCKS_PERTHREAD=4"
    if run.setting("backend") == "gloo":  # its ring has one between two nodes in each direction
        more = "one connection, which is all that Gloo takes, may not fill this link: "
        more += "`iperf3 -c PEER` shows what one carries"
    alone = f"the link alone: `ib_write_bw -d {device} --report_gbits`, then with PEER on the "
    alone += f"other node: near {digits(each_gbps)} Gb/s from host memory"
    on_infiniband = [
        f"the port: `mlxlink -d {device}` shows the active beside the supported width and speed; "
        "one bad lane lowers it",
        f"{alone} leaves the way from GPU to adapter to be looked at",
    ]
    speed = f"the negotiated speed: switch ports, `ethtool {name} | grep Speed` on both nodes"
    if network.virtual:
        speed = "the provider's limit of this kind of machine, or a port of a lower speed on the "
        speed += "way: the interface states neither"
    own_ports = {each.stated for each in run.networks}
    if len(own_ports) == 1 and network.stated and network.stated >= run.link_gbps:
        between = "between the nodes, a path or a switch port of a lower speed: the nodes' own "
        between += f"ports state {rate(network.stated / count)}"
        speed = between if count == 1 else speed
        fabric = f"{between} (`iblinkinfo` lists the links between switches)"
        on_infiniband = [on_infiniband[1], fabric]
    causes = [
        "one interface alone: NETWORK= and IFNAME= of launch_multinode.sh keep to it",
        f"an overlay, tunnel, bridge or shaper: `ip route get PEER`, `tc qdisc show dev {name}`",
    ][count == 1 :]
    near = any(DELIVERS * port <= reached_gbps / count <= port for port in PORTS_GBPS)
    causes.insert(0 if near or network.virtual else len(causes), speed)
    tcp = rate(payload_rate(each_gbps) * 8e-9) + (" on each interface" if count > 1 else "")
    causes.append(f"the link without training: `iperf3 -P 8 -c PEER` should show about {tcp}")
    by_kind = {
        "sockets": causes,
        "ipoib": [
            f"if it has to be IP, IPoIB's mode: `cat /sys/class/net/{name}/mode`; connected, if "
            "the driver has it, takes an MTU of 65520",
            "the link without training: `iperf3 -P 8 -c PEER`",
        ],
        "infiniband": on_infiniband,
        "roce": [
            roce_losses(link),
            "a lossless path: PFC for one class on adapters and switch, that of NCCL_IB_TC, with "
            "ECN",
            f"{alone} clears adapter and cable, not the switch under load",
        ],
        "efa": [
            "the adapters: `fi_info -p efa` on each node should list all of them",
            "the link alone: fabtests' `fi_rma_bw -p efa -E`, then with PEER on the other node",
            "the instance type's own limit, which the adapter does not state; one placement group",
        ],
    }
    direct = network.connections and network.with_gpudirect == network.connections
    direct = direct or network.problem("gpudirect_off")  # NCCL's advice has it
    return [
        (
            network.members,
            "a bond sends a connection over one member: more connections, hashed by layer3+4 here "
            f"and on the switch (`cat /proc/net/bonding/{name}`)",
        ),
        (
            kind not in ADAPTERS and run.link_gbps >= FAST_SOCKETS_GBPS and reached_gbps > 1,
            more,
        ),
        *((True, text) for text in by_kind[kind]),
        (
            kind in ADAPTERS and not direct,
            GPUDIRECT.format(module),
        ),
        (
            kind in ("infiniband", "roce"),
            "the adapter's PCIe link: `lspci -vv`, LnkSta as wide and fast as LnkCap",
        ),
    ]


def good_link_rows(run, part, largest):
    """For a link that delivers; part: link, overlap or compression; largest: none costs more."""
    kept, less = only_sockets(run), send_less(run)
    between, cpu = run.nodes != 1, run.on_cpu
    link = part == "link"
    ports = len(run.network.names) if run.network else 0
    filled = run.link_gbps and (run.wire_gbps or 0) >= DELIVERS * run.link_gbps
    open_rate = not filled and (run.wire_gbps or run.link_gbps)
    may_be_filled = run.wire_gbps and (filled or not run.link_gbps)
    fallen = kind_of(run) == "sockets" and 0 < (run.link_gbps or 0) <= FALLEN_GBPS * ports
    stated = {each.stated for each in run.networks if each.transport == "sockets"}
    port = "the port: a lower speed is what it falls back to with a bad cable or a fixed setting "
    port += f"(`ethtool {name_of(run)}`, on the switch too)"
    faster = f"a faster link: without {kept} (environment, /etc/nccl.conf, ~/.nccl.conf) NCCL "
    faster += "takes an adapter that `ibstat` shows as active"
    way = "the way between the GPUs: `nvidia-smi topo -m` (NV is NVLink; PIX, PXB, PHB, NODE, SYS "
    way += "are ever farther over PCIe), `nvidia-smi topo -p2p r` (OK, but still unused: "
    way += "NCCL_P2P_DISABLE, NCCL_P2P_LEVEL)"
    fewer = "fewer processes: they share one machine's cores"
    cores = "cores shared by compute and network: fewer OMP_NUM_THREADS than cores"
    unknown = "a probe before the run (PROBE=1): it shows which network carries it, and how fast"
    if run.record("Probe"):  # there was one, but it saw none that moved the bytes
        unknown = "the interface: `ip route get PEER` on each node shows the one that is used; "
        unknown += "NETWORK= and IFNAME= set it"
    unseen = link and between and run.network and run.probe_s and not run.wire_gbps
    two_kinds = link and run.network and run.network.transport == "unknown" and run.network.names
    indirect = run.network and run.network.connections and not run.network.with_gpudirect
    return [
        (link and between and not (run.network and run.probe_s), unknown),
        (two_kinds, "adapters of one kind, by NCCL_IB_HCA: these have two link layers"),
        (unseen, "what this network can do, which no counter shows: nccl-tests with 1 GiB"),
        (unseen and indirect, GPUDIRECT.format("nvidia-peermem")),
        *(tunnel_rows(run) if link else ()),
        (link and between and (fallen or len(stated) > 1), port),
        (link and between and kept, faster),
        (link and not between and not cpu, way),
        (part == "overlap" and shares_cores(run), cores),
        (link and largest and cpu and not between, fewer),
        (part == "overlap", BEYOND),
        (
            between and open_rate and kind_of(run) == "sockets" and part != "compression",
            "what this link can do: `iperf3 -P 8 -c PEER`",
        ),
        (less, f"send less: {less}"),
        (True, "send less often: a larger --accumulate_steps or --batch_size"),
        (
            link and between and may_be_filled and kind_of(run) != "ipoib" and not kept,
            "a faster link: --project shows what to expect of it",
        ),
    ]


def input_rows(run):
    workers = run.setting("workers", int)
    now = "" if workers is None else f" (now {workers})"
    loaders = f"more loader processes: --workers{now}, up to the cores of a node / its processes"
    small = "smaller images on disk: tools/prepare_coco.py; decoding is usually most of the work"
    storage = "storage: copy the images to a local disk, or run a second time with a warm cache"
    return [(True, loaders), (True, small), (True, storage)]


def compute_rows(run):
    cpu = run.on_cpu
    lower = "lower precision: --precision bf16 or fp16 where the hardware has it"
    if cpu:
        lower = "lower precision: --precision bf16 where the CPU has it (`lscpu` shows "
        lower += "avx512_bf16 or amx_bf16)"
    # With much exposed, more processes would wait for each other still longer.
    more = run.exposed_s <= IN_PART * run.step_s
    more = more and (run.efficiency is None or run.efficiency >= SCALES)
    return [
        (run.setting("precision") not in ("bf16", "fp16"), lower),
        (not run.record("Run").get("compile"), "fused operations: --compile"),
        (more and cpu, "more machines"),
        (not cpu, "a larger --batch_size, if the device is not full"),
        (more and not cpu, "more GPUs, a process each"),
    ]


def send_less(run):
    """What makes the gradients smaller than they are now; empty where nothing does."""
    now = run.setting("grad_compression")
    if now in ("bf16", "fp16"):
        return f"--grad_compression powersgd (a small part of the bytes) in place of {now}"
    less = "--grad_compression bf16 (half the bytes) or powersgd (a small part)"
    return "" if now == "powersgd" else less


def only_sockets(run):
    """The setting that keeps NCCL from adapters, as text, if it used sockets; else empty."""
    if run.network and run.network.transport == "sockets" and run.setting("backend") == "nccl":
        for name, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")):
            if run.env(name) == value:
                return f"{name}={value}"
    return ""
