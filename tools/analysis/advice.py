"""What to check or change next, for TCP, InfiniBand, RoCE and EFA: rows of (condition, sentence),
most likely first.

What is advised fits the run, and the run does not have it already.
"""

from analysis.logs import get, objects
from analysis.nccl import REASONS
from analysis.network import ADAPTERS
from analysis.projection import payload_rate
from analysis.runs import usual_times
from analysis.words import digits, rate

FAST_SOCKETS_GBPS = 25  # from here on one TCP connection, bound by one core, may not fill the link
FALLEN_GBPS = 0.1  # an Ethernet port falls back to this where two pairs of its cable are bad
DELIVERS = 0.8  # above this share of its stated speed, headers and start-up account for the rest
# In the log of a complete run, what a restart or another try has overcome.
OVERCOME = ("rank_twice", "no_interface", "timeout", "aborted")
OVERCOME += ("peer_unreachable", "connection_failed", "completion_failed", "flushed")
OVERCOME += ("direct_path",)
IN_PART = 0.2  # above this share of a step, exposed communication bounds it in part
# ResNet-18 at 224 px in fp32 trains 750 images/s or more on an RTX 2080 Ti. A GPU that gets a
# quarter of that most likely waits for images.
SLOW_GPU_IMG_PER_S = 190
SCALES = 0.8  # more processes are no advice for a run of a lower efficiency


def next_checks(run, bound, slow_link, in_trouble):
    """Sentences. bound: as in Verdict; slow_link: the rate, in Gb/s, of a link that is slower than
    it states, else None; in_trouble: it has lost data or counted errors.
    """
    rows = [*slow_rank_rows(run), *((True, text) for text in nccl_advice(run))]
    rows += adapter_rows(run)
    if in_trouble:
        rows += trouble_rows(run)
    if slow_link:  # then nothing else matters
        rows += tunnel_rows(run) if tunnel_of(run) else slow_link_rows(run, slow_link)
    else:
        rows += good_link_rows(run, bound) + other_rows(run, bound)
    return list(dict.fromkeys(text for fits, text in rows if fits))


def is_fallen(gbps):
    """Whether this is the rate of a port that negotiated 100 Mb/s."""
    return DELIVERS * FALLEN_GBPS <= gbps <= FALLEN_GBPS


def kind_of(run):
    """infiniband, roce, efa, ipoib or sockets."""
    network = run.network
    if network and network.transport in ADAPTERS:
        return network.transport
    return "ipoib" if network and network.kind == "ipoib" else "sockets"


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
    if run.straggler is None:
        return []
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
    return [
        (kind == "infiniband", f"{lossy} (`ibqueryerrors`, `mlxlink -d {device} -c -m`)"),
        (kind == "roce", roce_losses(link)),
        (kind == "efa", f"{lossy} (`rdma statistic show link {link}`)"),
        (kind in ("sockets", "ipoib"), f"{lossy} (`ethtool -S {name}`)"),
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
    count = len(network.names) if network else 0
    gbps = digits(run.link_gbps / max(1, count))
    tcp = rate(payload_rate(run.link_gbps / max(1, count)) * 8e-9)
    connections = network.connections if network else 0
    direct = bool(connections) and network.with_gpudirect == connections
    direct_known = direct or bool(network and network.problem("gpudirect_off"))
    bond = "a bond sends a connection over one member: more connections, hashed by layer3+4 here "
    bond += f"and on the switch (`cat /proc/net/bonding/{name}`)"
    more = "more connections, as one may not fill this link: "
    gloo = run.setting("backend") == "gloo"
    nccls = "NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4"
    more += "more processes per node" if gloo else nccls
    alone = f"the link alone: `ib_write_bw -d {device} --report_gbits`, then with PEER on the "
    alone += f"other node: near {gbps} Gb/s from host memory"
    module = "efa_nv_peermem" if kind == "efa" else "nvidia-peermem"
    direct = f"GPUDirect: {module} loaded, or DMA-BUF; adapters near their GPU "
    direct += "(`nvidia-smi topo -m`)"
    bonded = bool(network and network.members)
    several = bonded or run.link_gbps >= FAST_SOCKETS_GBPS
    speed = (
        f"the negotiated speed: the switch's ports, `ethtool {name} | grep Speed` on both nodes"
    )
    own_ports = {each.stated for each in run.networks}
    if bonded and len(own_ports) == 1:
        speed = f"between the nodes, a path slower than {rate(run.link_gbps)}"
    elif len(own_ports) == count == 1 and network.stated and network.stated >= run.link_gbps:
        speed = "between the nodes, a switch port that negotiated a lower speed: the nodes' own "
        speed += f"ports state {rate(network.stated)}"
    interface = "one interface alone: NETWORK= and IFNAME= of launch_multinode.sh keep to it"
    causes = [interface] if count != 1 else []
    causes.append(
        f"an overlay, tunnel, bridge or shaper: `ip route get PEER`, `tc qdisc show dev {name}`"
    )
    # Even a port at 100 Mb/s delivers this much. Below it, look at the port last.
    causes.insert(0 if reached_gbps >= DELIVERS * FALLEN_GBPS else len(causes), speed)
    without = "the link without training: `iperf3 -c PEER` should show "
    if several:
        without = "the link without training: `iperf3 -P 8 -c PEER` should show about "
    if count > 1:
        without = "each link without training: `iperf3 -c` to PEER's address on each of these "
        without += "interfaces should show "
    by_kind = {
        "sockets": [*causes, f"{without}{tcp}"],
        "ipoib": [
            f"if it has to be IP, IPoIB's mode: `cat /sys/class/net/{name}/mode`; connected, if "
            "the driver has it, takes an MTU of 65520",
            "the link without training: `iperf3 -P 8 -c PEER`",
        ],
        "infiniband": [
            f"the port: `mlxlink -d {device}` shows the active beside the supported width and "
            "speed; one bad lane lowers it",
            f"{alone} leaves the way from GPU to adapter to be looked at",
        ],
        "roce": [
            roce_losses(link),
            "a lossless path: PFC for one class on adapters and switch, that of NCCL_IB_TC, with "
            "ECN",
            f"{alone} clears adapter and cable, not the switch under load",
        ],
        "efa": [
            "the instance type's own limit, which the adapter does not state; one placement group",
            "the adapters: `fi_info -p efa` on each node should list all of them",
            "the link alone: fabtests' `fi_rma_bw -p efa -E`, then with PEER on the other node",
        ],
    }
    return [
        (bonded, bond),
        (kind in ("sockets", "ipoib") and run.link_gbps >= FAST_SOCKETS_GBPS, more),
        *((True, text) for text in by_kind[kind]),
        (kind in ADAPTERS and not direct_known, direct),
        (
            kind in ("infiniband", "roce"),
            "the adapter's PCIe link: `lspci -vv`, LnkSta as wide and fast as LnkCap",
        ),
    ]


def good_link_rows(run, bound):
    """For communication that bounds the run, in part or whole, over a link that delivers."""
    kept, less = only_sockets(run), send_less(run)
    between, cpu = run.nodes != 1, run.on_cpu
    link, overlap = bound == "link", bound == "overlap"
    ports = len(run.network.names) if run.network else 0
    fallen = kind_of(run) == "sockets" and 0 < (run.link_gbps or 0) <= FALLEN_GBPS * ports
    port = "the port: 100 Mb/s is what it falls back to with a bad cable or a fixed setting "
    port += f"(`ethtool {name_of(run)}`, on the switch too)"
    faster = f"a faster link: without {kept} (environment, /etc/nccl.conf, ~/.nccl.conf) NCCL "
    faster += "takes an adapter that `ibstat` shows as active"
    way = "the way between the GPUs: `nvidia-smi topo -m` (NV is NVLink; PIX, PXB, PHB, NODE, SYS "
    way += "are ever farther over PCIe), `nvidia-smi topo -p2p r` (OK, but still unused: "
    way += "NCCL_P2P_DISABLE, NCCL_P2P_LEVEL)"
    cores = "cores shared by compute and network: fewer OMP_NUM_THREADS than cores"
    unknown = "a probe before the run (PROBE=1): it shows which network carries it, and how fast"
    if run.probe_s:  # there was one, but it saw no interface that moved its bytes
        unknown = "the interface: `ip route get PEER` on each node shows the one that is used; "
        unknown += "NETWORK= and IFNAME= set it"
    return [
        (link and between and not (run.network and run.probe_s), unknown),
        *(tunnel_rows(run) if link or exposed_too(run, bound) else ()),
        (exposed_too(run, bound) and less, f"the exposed communication: {less}"),
        (link and between and fallen, port),
        (link and between and kept, faster),
        (link and not between and not cpu, way),
        (overlap and cpu, cores),
        (link and not between and cpu, "fewer processes: they share one machine's cores"),
        ((link or overlap) and less, f"send less: {less}"),
        (bound == "compression", "a lower --powersgd_rank, which computes and sends less"),
        (link, "send less often: a larger --accumulate_steps or --batch_size"),
        (
            link and between and run.network and kind_of(run) != "ipoib" and not kept,
            "a faster link: --project shows what to expect of it",
        ),
    ]


def other_rows(run, bound):
    """For a run that its link does not bound."""
    data, compute, whole = bound == "input", bound == "compute", bound == "not the link"
    cpu, settings = run.on_cpu, run.record("Run")
    loaders = f"more loader processes: --workers (now {settings.get('workers')}), up to the cores "
    loaders += "of a node / its processes"
    small = "smaller images on disk: tools/prepare_coco.py; decoding is usually most of the work"
    storage = "storage: copy the images to a local disk, or run a second time with a warm cache"
    lower = "lower precision: --precision bf16 or fp16 where the hardware has it"
    if cpu:
        lower = "lower precision: --precision bf16 where the CPU has it (`lscpu` shows "
        lower += "avx512_bf16 or amx_bf16)"
    each = (run.img_per_s or 0) / (run.processes or 1)
    more = compute and (run.efficiency is None or run.efficiency >= SCALES)
    slow_gpu = "GPU" in run.log.kinds and 0 < each < SLOW_GPU_IMG_PER_S
    pipeline = f"the input pipeline: {each:.0f} img/s per GPU is far below what ResNet-18 reaches "
    pipeline += "on any recent one (an RTX 2080 Ti: 750 to 920 in fp32)"
    return [
        (data, loaders),
        (data, small),
        (data, storage),
        (compute and run.setting("precision") not in ("bf16", "fp16"), lower),
        (compute and not settings.get("compile"), "fused operations: --compile"),
        (more and cpu and not exposed_too(run, bound), "more machines"),
        (compute and not cpu, "a larger --batch_size, if the device is not full"),
        # With much exposed, more processes would wait for each other still longer.
        (more and not cpu and not exposed_too(run, bound), "more GPUs, a process each"),
        # A log without a split.
        (whole and slow_gpu, pipeline),
        (whole, "a run of this demo over the same link: its Summary splits the step"),
        (whole, "the loader: --workers, disk, processor load (`top`, `iostat -x 5`)"),
        (whole and not cpu, "the device: `nvidia-smi dmon` shows whether it waits"),
    ]


def exposed_too(run, bound):
    """Whether exposed communication is a large part beside what bounds the run."""
    # Where a rank is waited for, the exposed time is that.
    large = (run.exposed_s or 0.0) > IN_PART * (run.step_s or 0.0)
    return bound in ("input", "compute") and run.straggler is None and large


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
