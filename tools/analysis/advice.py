"""What to check or change next, most likely first: it fits the run, and what that has already."""

import statistics

from analysis.cost_model import TCP_SHARE, told_algorithm
from analysis.nccl_rules import REASONS
from analysis.used_network import ADAPTERS, ROCE_LOSSES, slow_link_checks
from common.records import get, objects
from common.thresholds import EXPOSED_IN_PART, FALLEN_PORT_GBPS, HEALTHY, SLOW_GPU_IMG_PER_S


def next_checks(run, bound, implied_gbps, in_trouble):
    """Texts. `bound` as in Verdict; in_trouble: the link has lost data or shown errors."""
    first = straggler_advice(run) + nccl_advice(run) + adapter_advice(run)
    if in_trouble and run.network and run.network.names:
        first.append(losses(run.network))
    stated = run.link_gbps or 0
    if bound == "link" and implied_gbps and implied_gbps < HEALTHY * stated:
        backend = get(run.record("Run"), "backend", str)
        tcp = stated * TCP_SHARE
        return unique(first + slow_link_checks(run.network, stated, tcp, backend))
    by_bound = {
        "link": for_link,
        "overlap": for_overlap,
        "input": for_input,
        "compute": for_compute,
        "not the link": for_what_is_not_split,
    }
    checks = by_bound[bound](run) if bound in by_bound else []
    if bound in ("compute", "input") and exposed_in_part(run):
        less = [f"the exposed communication: {text}" for text in send_less(run)]
        if run.mostly_waits(run.exposed_s):
            return first + checks + less
        return first + algorithm_advice(run) + less + checks
    return first + checks


def exposed_in_part(run):
    """Whether much of a step is exposed; where a rank is waited for, the exposed time is that."""
    return run.straggler is None and (run.exposed_s or 0) > EXPOSED_IN_PART * run.step_s


def unique(texts):
    return list(dict.fromkeys(texts))


def on_cpu(run):
    return run.log.kinds == {"CPU"}


def straggler_advice(run):
    """Where to look on the node of a slow rank: its loader, if that is what is slow, or itself."""
    if run.straggler is None:
        return []
    hosts = get(run.record("Run"), "hosts", list)
    where = f"rank {run.straggler}"
    if run.straggler < len(hosts):
        where += f" on {hosts[run.straggler]}"
    data, compute, _ = run.ranks[run.straggler]
    usual_data, usual_compute = (
        statistics.median_low(times[part] for times in run.ranks.values()) for part in (0, 1)
    )
    if data - usual_data > compute - usual_compute:
        return [f"{where}: it waits for images; its disk and load (`iostat -x 5`, `top`)"]
    if on_cpu(run):
        return [f"{where}: what else runs on its cores, and their clock (`top`, `lscpu -e`)"]
    look = "nvidia-smi -q -d TEMPERATURE,CLOCK,POWER,PERFORMANCE"
    return [f"{where}: heat, clock and other load of its GPU (`{look}`, `nvidia-smi`)"]


# --- What the network says of itself -------------------------------------------------------------


def nccl_advice(run):
    """What is advised for each problem that NCCL's text shows on any node."""
    problems = [p for network in run.networks for p in objects(network.finding, "problems")]
    known = {str(problem.get("id")) for problem in problems}
    if known & set(REASONS):  # why it fell back says more than that it did
        problems = [p for p in problems if p.get("id") != "fell_back_to_sockets"]
    return unique(text for p in problems if (text := get(p, "advice", str)))


def adapter_advice(run):
    """IP over InfiniBand leaves most of what the adapter can do; Gloo has nothing else."""
    network = run.network
    if not network or not network.adapter or run.record("Run").get("backend") != "nccl":
        return []
    if any(p.get("id") == "fell_back_to_sockets" for p in objects(network.finding, "problems")):
        return []  # it was asked for
    port = network.adapter.partition(":")[0]
    why = "NCCL_DEBUG=INFO shows why NCCL took sockets (/dev/infiniband missing in a container?)"
    return [f"{why}; then the adapter itself: NETWORK=infiniband IFNAME={port}"]


def only_sockets(run):
    """The setting that keeps NCCL from adapters, as text, where it used sockets; else empty."""
    facts = run.record("Run")
    if not run.network or run.network.transport != "sockets" or facts.get("backend") != "nccl":
        return ""
    env = get(facts, "env", dict)
    settings = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    return next((f"{k}={v}" for k, v in settings.items() if env.get(k) == v), "")


def algorithm_advice(run):
    told = told_algorithm(run)
    return [f"unset NCCL_ALGO (now {told}): NCCL then chooses by bytes and nodes"] if told else []


def losses(network):
    """Where to look for what loses data, with the command that shows its error counters."""
    name = network.names[0]
    if network.transport == "roce":
        return ROCE_LOSSES.format(link=name.replace(":", "/"))
    counters = f"`ethtool -S {name}`, optics by `ethtool -m {name}`"
    if network.transport == "infiniband":
        counters = f"`ibqueryerrors`, `mlxlink -d {name.partition(':')[0]} -c -m`"
    elif network.transport in ADAPTERS:
        counters = f"`rdma statistic show link {name.replace(':', '/')}`"
    return f"what loses data: cable, transceiver, switch port ({counters})"


# --- By what bounds the run ----------------------------------------------------------------------

WAY_INSIDE = (
    "the way between the GPUs: `nvidia-smi topo -m` (NV is NVLink; PIX, PXB, PHB, NODE, SYS are "
    "ever farther over PCIe), `nvidia-smi topo -p2p r` (not OK: GPU, driver or chipset; OK: "
    "NCCL_P2P_DISABLE, NCCL_P2P_LEVEL, or too far for NCCL)"
)


def for_link(run):
    checks = [f"send less: {text}" for text in send_less(run)] + [send_less_often(run)]
    first = algorithm_advice(run)
    if run.nodes != 1:
        first += fallen_port(run)
        if only_sockets(run):
            return [*first, faster_link(run), *checks]
        return [*first, *checks, faster_link(run)]
    if on_cpu(run):
        fewer = "fewer processes: on one machine without GPUs they share its cores"
        return [*first, *checks, fewer]
    return [*first, WAY_INSIDE, *checks]


def fallen_port(run):
    """A port that itself states 100 Mb/s: it may have been meant for more."""
    network = run.network
    over_sockets = network and network.names and network.transport == "sockets"
    if (
        not over_sockets
        or not run.link_gbps
        or run.link_gbps > FALLEN_PORT_GBPS * len(network.names)
    ):
        return []
    text = "the port: 100 Mb/s is what it falls back to with a bad cable or a fixed setting"
    return [f"{text} (`ethtool {network.names[0]}`, on the switch, too)"]


def faster_link(run):
    if setting := only_sockets(run):
        return (
            f"a faster link: without {setting} (environment, /etc/nccl.conf, ~/.nccl.conf) NCCL "
            "takes an adapter that `ibstat` shows as active"
        )
    return "a faster link: --project shows what to expect of it"


def send_less(run):
    """What makes the gradients smaller than they are now."""
    now = get(run.record("Run"), "grad_compression", str)
    if now == "powersgd":
        return []
    if now in ("bf16", "fp16"):
        return [f"--grad_compression powersgd (a small part of the bytes) in place of {now}"]
    return ["--grad_compression bf16 (half the bytes) or powersgd (a small part)"]


def send_less_often(run):
    now = get(run.record("Run"), "accumulate_steps", int) or 1
    shown = f" {2 * now} in place of {now}" if now > 1 else ""
    return f"send less often: --accumulate_steps{shown}, or a larger --batch_size"


def for_overlap(run):
    checks = []
    if run.straggler is None:
        checks.append("a slow rank: compare compute times by rank in the Summary line")
    if on_cpu(run):
        checks.append("cores shared by compute and network: fewer OMP_NUM_THREADS than cores")
    return checks + [f"send less: {text}" for text in send_less(run)]


def for_input(run):
    workers = get(run.record("Run"), "workers", int)
    now = "" if workers is None else f" (now {workers})"
    return [
        f"more loader processes: --workers{now}, up to the cores of a node / its processes",
        "smaller images on disk: tools/prepare_coco.py; decoding is usually most of the work",
        "storage: copy the images to a local disk, or run a second time with a warm cache",
    ]


def for_compute(run):
    facts, checks = run.record("Run"), lower_precision(run)
    if not facts.get("compile"):
        checks.append("fused operations: --compile")
    if on_cpu(run):  # further processes of the same machine would share its cores
        return [*checks, "more machines: --project shows what to expect"]
    checks.append("a larger --batch_size, if the device is not full")
    # With much exposed, more processes would wait for each other still longer.
    if not exposed_in_part(run):
        checks.append("more GPUs, a process each: --project shows what to expect")
    return checks


def lower_precision(run):
    """None where the run computes in it already."""
    if get(run.record("Run"), "precision", str) in ("bf16", "fp16"):
        return []
    where = "bf16 or fp16 where the hardware has it"
    if on_cpu(run):
        where = "bf16 where the CPU has it (`lscpu` shows avx512_bf16 or amx_bf16)"
    return [f"lower precision: --precision {where}"]


def for_what_is_not_split(run):
    checks = [
        "a run of this demo over the same link: its Summary splits the step",
        "the loader: --workers, disk, processor load (`top`, `iostat -x 5`)",
    ]
    if on_cpu(run):
        return checks
    checks.append("the device: `nvidia-smi dmon` shows whether it waits")
    each = (run.img_per_s or 0) / (run.processes or 1)
    if "GPU" in run.log.kinds and 0 < each < SLOW_GPU_IMG_PER_S:
        checks.insert(
            0,
            f"the input pipeline: {each:.0f} img/s per GPU is far below what ResNet-18 "
            "reaches on any recent one (an RTX 2080 Ti: 750 to 920 in fp32)",
        )
    return checks
