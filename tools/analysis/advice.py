"""What to check or change next, most likely first: it fits the run, and what that has already."""

import statistics

from analysis.cost_model import TCP_SHARE
from analysis.runs import busy_of_ranks
from analysis.units import ms
from analysis.used_network import ADAPTERS, slow_link_checks
from common.records import get, objects
from common.thresholds import FALLEN_PORT_GBPS, HEALTHY, SLOW_GPU_IMG_PER_S


def next_checks(run, bound, implied_gbps, in_trouble):
    """Texts. `bound` as in Verdict; in_trouble: the link has lost data or shown errors."""
    first = straggler_advice(run) + nccl_advice(run) + adapter_advice(run)
    if in_trouble and run.network and run.network.names:
        first.append(f"what loses data: cable, transceiver, switch port (`{counters_of(run)}`)")
    stated = run.link_gbps or 0
    if bound == "link" and implied_gbps and implied_gbps < HEALTHY * stated:
        backend = get(run.record("Run"), "backend", str)
        tcp = stated * TCP_SHARE
        return first + slow_link_checks(run.network, implied_gbps, stated, tcp, backend)
    by_bound = {
        "link": for_link,
        "overlap": for_overlap,
        "input": for_input,
        "compute": for_compute,
        "not the link": for_what_is_not_split,
    }
    checks = by_bound[bound](run) if bound in by_bound else []
    # Where a rank is waited for, the exposed time is that.
    waits = run.straggler is not None
    if bound in ("compute", "input") and not waits and (run.exposed_s or 0) > 0.2 * run.step_s:
        checks += [f"the exposed communication: {text}" for text in send_less(run)]
    return first + checks


def on_cpu(run):
    return run.log.kinds == {"CPU"}


def straggler_advice(run):
    if run.straggler is None:
        return []
    busy = busy_of_ranks(run.ranks)
    slow, usual = ms(busy[run.straggler]), ms(statistics.median_low(busy.values()))
    return [f"rank {run.straggler}: its own work takes {slow} a step, the others' {usual}"]


# --- What the network says of itself -------------------------------------------------------------


def nccl_advice(run):
    """What tools/nccl_log.py advises for each problem that NCCL's text shows on any node."""
    problems = [p for network in run.networks for p in objects(network.finding, "problems")]
    return list(dict.fromkeys(text for p in problems if (text := get(p, "advice", str))))


def adapter_advice(run):
    """IP over InfiniBand leaves most of what the adapter can do; Gloo has nothing else."""
    network = run.network
    if not network or not network.adapter or run.record("Run").get("backend") != "nccl":
        return []
    port = network.adapter.partition(":")[0]
    return [f"the adapter itself: NETWORK=infiniband IFNAME={port}"]


def counters_of(run):
    """The command that shows the error counters of what carried the traffic."""
    name = run.network.names[0]
    if run.network.transport in ADAPTERS:
        return f"rdma statistic show link {name.replace(':', '/')}"
    return f"ethtool -S {name}"


# --- By what bounds the run ----------------------------------------------------------------------


def for_link(run):
    checks = [f"send less: {text}" for text in send_less(run)] + [send_less_often(run)]
    if run.nodes != 1:
        return [*fallen_port(run), *checks, faster_link(run)]
    if on_cpu(run):
        return [*checks, "fewer processes: on one machine without GPUs they share its cores"]
    way = "the way between the GPUs: NVLink rather than PCIe (`nvidia-smi topo -m`)"
    return [*checks, way]


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
    env = get(run.record("Run"), "env", dict)
    if env.get("NCCL_IB_DISABLE") == "1":
        return (
            "a faster link: NCCL_IB_DISABLE=1 keeps NCCL from InfiniBand and RoCE, if there is any"
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
    if run.straggler is not None:
        return []
    checks = ["a slow rank: compare compute times by rank in the Summary line"]
    if on_cpu(run):
        checks.append("cores shared by compute and network: fewer OMP_NUM_THREADS than cores")
    return checks + [f"send less: {text}" for text in send_less(run)]


def for_input(run):
    workers = get(run.record("Run"), "workers", int)
    now = "" if workers is None else f" (now {workers})"
    return [
        f"more loader processes: --workers{now}, up to the cores of a node / its processes",
        "smaller images on disk: tools/prepare_coco.py; decoding is most of the loader's work",
        "storage: copy the images to a local disk, or run a second time with a warm cache",
    ]


def for_compute(run):
    facts, checks = run.record("Run"), lower_precision(run)
    if not facts.get("compile"):
        checks.append("fused operations: --compile")
    if on_cpu(run):  # further processes of the same machine would share its cores
        return [*checks, "more machines: --project shows what to expect"]
    return [
        *checks,
        "a larger --batch_size, if the device is not full",
        "more processes: --project shows what to expect",
    ]


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
