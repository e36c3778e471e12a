#!/usr/bin/env python3
"""For anyone who works on the demo: its speed against its own ceilings, and against other ways.

    python tools/benchmark.py step [--peer examples/imagenet/main.py]   training speed
    python tools/benchmark.py input        the loader on one core: COCO as it is, and prepared
    python tools/benchmark.py start        launch to first step at train2017's size, both sets
    python tools/benchmark.py step --against OLD.py   two versions of the script (input, too)
    sudo python tools/benchmark.py links   links of known rate: what arrives, gradient compression
    sudo python tools/benchmark.py predictions   compare_logs.py's predictions against measurements
    python tools/benchmark.py loss         what compression does to the loss, and preparing
    python tools/benchmark.py gpu [--part NAME]       all that only a GPU can show
    python tools/benchmark.py overlap      by the cost model: what DDP's own bucket sizes gain

Each prints one table: what (unit), demo, reference, ratio = demo / reference. Figures are medians
over `--repeats` rounds; a round runs every case once, side by side, and every second round in
reverse order, so that a machine that warms up or is shared favours none. What `gpu` measures is
run once, the most valuable part first; each figure is written at once, to --json too, and no part
takes over 4 minutes:
  train      NCCL with one process, Gloo with two on one GPU, in the precision that auto chooses
  step       a resident batch of 64 to 512: as shipped, bf16 channels_last, against strict fp32
  input      fed from prepared and original JPEG, against loader and resident batch
  split      the split of a step against PyTorch's profiler
  job        the talk's whole job: two epochs of 118,287 prepared pictures, launch to end
  compile    a resident batch with --compile against without
  candidates what may gain and is not in the script: built when a GPU has shown that it does

The demo is the real script in processes of its own, and its figures come from its log: a step's
time and its wait for data from the step lines after the warm-up, within one epoch. There is one
for each step, but on a GPU, which each of them makes wait: there they are 20 steps apart or more.
img/s are images over the sum of these times, of all processes. Nothing probes, but in `links`.
How many steps count on a GPU where a loader feeds them: `fed` says it. Pictures are
generated (make_sample_coco.py) unless --data names COCO's folder; names of larger sets are links
to some of them. Prepared is what prepare_coco.py makes. All are in the page cache. Where a case
needs more than the log, main() of the script runs with one change:
  resident   the loader gives its first batch for ever
  emptied    what the loader has ready after the first steps, which are slow, is thrown away
  loader     the loader alone; a third of the batches, before those that count, are the warm-up
  phases     notes the clock where a phase of the start ends, and the memory at the first step
  profile    PyTorch's profiler tells how long at least one kernel ran, after the warm-up
  the others are of `candidates`: CHANGES says what they are
and peak memory is the kernel's figure (ru_maxrss) of the largest process.

Needs Linux and what the demo needs. Exit codes: 0 done; 2 wrong arguments, or a run that failed,
in one line; 128 + signal when stopped. Whatever it started ends with it.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from analysis import cost_model
from common.records import PREFIX, STEP
from launcher.process_tree import adopt_orphans, descendants, kill

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, TOOLS = ROOT / "demo_coco_resnet18.py", ROOT / "tools"
TUN_LINK = ROOT / "tests" / "support" / "tun_link.py"  # a link with a delay
GPU = Path("/dev/nvidiactl").exists()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
FULL = 118_287  # images of train2017
MOST_READ = 20000  # pictures: of a larger set not all are held in memory
PICTURES = 96  # that are drawn; the names of a larger set link to them
PEER = re.compile(r"Epoch: \[0\]\[ *\d+/\d+\]\s+Time +(\S+) \(")
FOREIGN = re.compile(  # what a launcher or scheduler around this process says to its own ranks
    "(SLURM|SBATCH|OMPI|PMIX?|TORCHELASTIC|GROUP|ROLE|MASTER|NCCL|GLOO)_|(LOCAL_)?(RANK|WORLD"
    "_SIZE)$|(NNODES|NODE_RANK|GPUS|GPUS_PER_NODE|RUN_NAME|RESTARTS|NETWORK|IFNAME)$"
)
PHASES = {  # by the function of the script that ends each
    "set_up": "launcher and imports",
    "from_rank_0": "rendezvous",
    "complete_arguments": "image list",
    "build_model": "check of images",
    "start_or_resume": "weights and DDP",
    "train_epoch": "workers, warm-up pass",
    "finish_step": "first batch and step",
}
LINE_EVERY = 20  # steps from line to line on a GPU, as the script has it
FOR_EVER = 100_000  # epochs, of a batch that never ends
CHANGES = {  # of `candidates`: name of a change in the child, what it is
    "ahead": "a batch copied to the GPU a step ahead, on a stream of its own",
    "cudnn": "torch.backends.cudnn.benchmark",
    "unbatched": "DDP without batched_grad_copy",
}
TWO = {"backend": "gloo"}  # two processes that may have one GPU
# Options and environment: of this CPU, and of one without bf16, as tests/machines.sh has it.
OLD_CPU = {
    False: ({}, {}),
    True: (
        {"precision": "fp32"},
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    ),
}
METHODS = {
    "none": {"grad_compression": "none"},
    "fp16": {"grad_compression": "fp16"},
    "bf16": {"grad_compression": "bf16"},
    "powersgd": {"grad_compression": "powersgd"},
    "accumulate": {"accumulate_steps": 4},
}
KINDS = {"links": METHODS, "loss": METHODS | {"prepared": {}}}  # of runs, by subcommand


class Failure(Exception):
    """What the user can mend, or a run that failed; its text is the one line that is shown."""


# --- Processes that are measured ---------------------------------------------------------------


class Bench:
    """Runs commands in `folder` (temporary), one at a time; all that one started ends with it."""

    def __init__(self, args, folder):
        self.args, self.folder = args, Path(folder)
        self.deadline, self.failed = math.inf, []  # of a part of `gpu`; why parts have failed
        self.scripts = {"demo": args.script, "other": args.against}
        self.peak = None  # MB, of the largest process of the last command
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.env = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}
        self.env |= {"PATH": path, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        self.env |= {"PYTHONDONTWRITEBYTECODE": "1", "LOG_DIR": str(self.folder / "logs")}
        adopt_orphans()

    def run(self, command, until=None, **env):
        """Output of a command; it is ended after `until`: (regex, number of lines).

        Raises Failure on an exit code other than 0, and where it takes over --limit seconds.
        """
        limit = min(self.args.limit, self.deadline - time.monotonic())
        env = self.env | {"BENCHMARK_BEGAN": str(time.monotonic())} | env
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=env,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        scripts = [word for word in map(str, command) if word.endswith((".py", ".sh"))]
        name = Path([*scripts, command[0]][0]).name

        def too_late(*_):
            raise Failure(f"{name}: the time limit is over")

        signal.signal(signal.SIGALRM, too_late)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, limit))
        try:
            return self.read(process, name, until)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.stop(process)
            process.stdout.close()

    def read(self, process, name, until):
        """The output of a command that has been started; see run."""
        lines, seen = [], 0
        for line in process.stdout:
            lines.append(line)
            seen += bool(until and until[0].search(line))
            if until and seen == until[1]:
                return "".join(lines)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.peak = used.ru_maxrss * 1024 / 1e6
        if process.returncode or until:
            errors = [t for t in lines if re.search(r"(?i)error: \S", t)] or lines[-1:] or ["?"]
            text = f"{name} ended with {process.returncode}: {errors[0]}"
            raise Failure(" ".join(text.split())[:300])
        return "".join(lines)

    def stop(self, process):
        """Ends a command in good order, then what is left of it."""
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        kill({*descendants()} - {process.pid})
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)  # two_nodes.sh takes its namespaces down when its launchers are gone
        kill(descendants())
        process.wait()

    def script(self, how, options, processes=0, launch=(), **env):
        """Output of a script, of one with changes ("demo+loader"), or of another child below.

        With `processes` torchrun starts them, with the options `launch`; else it is alone,
        without a launcher.
        """
        command = [sys.executable]
        if processes:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}", *launch]
        file = self.scripts.get(how.partition("+")[0], SCRIPT)
        command += [file] if how in self.scripts else [Path(__file__).resolve(), "_child", how]
        return self.run([*command, *options], BENCHMARK_SCRIPT=str(file), **env)


def rounds(bench, cases):
    """{case: {figure: [value of each round]}} of {case: function that gives {figure: value}}."""
    found, count = {name: {} for name in cases}, bench.args.repeats
    for turn in range(count):
        for name in list(cases)[:: 1 - 2 * (turn % 2)]:
            begin, figures = time.monotonic(), cases[name]()
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
            shown = ", ".join(f"{k} {v:.4g}" for k, v in list(figures.items())[:4])
            took = time.monotonic() - begin
            say(f"round {turn + 1} of {count}: {name}: {shown} [{took:.0f} s]")
    return found


def say(text):
    print(text, file=sys.stderr, flush=True)


def row(what, unit, demo, reference=None):
    """One line of the table, from the values of all rounds, in `unit`."""
    a, b = (statistics.median(v) if v else None for v in (demo, reference))
    ratio = a / b if a is not None and b else None
    every = {"demo_all": demo, "reference_all": reference}
    return {"what": what, "unit": unit, "demo": a, "reference": b, "ratio": ratio} | every


def step_times(text, skip, count, rank="0"):
    """[(loss, ms waited for data, ms in all, steps)] of a rank's lines after step `skip`.

    The times of a line are the means of the steps since the line before.
    """
    found, before = [], 0
    for line in text.splitlines():
        by = PREFIX.search(line)
        if by and by[2] == rank and (step := STEP.match(line, by.end())):
            loss, data, ms = map(float, step.group(3, 5, 6))
            number = int(step[2])
            if number > skip:
                found.append((loss, data, ms, number - before))
            before = number
    if (steps := sum(steps for *_, steps in found)) < count:
        hint = "give more images, a smaller --batch_size or fewer --steps"
        raise Failure(f"{steps} steps after the warm-up, not {count}: {hint}")
    return found


def speed(text, args, batch_size=0, rank="0"):
    """Figures of a rank over the steps after the warm-up, of so many images each."""
    found = step_times(text, args.warm_steps, args.steps, rank)
    total = sum(steps * ms for _, _, ms, steps in found)
    waited = sum(steps * data for _, data, _, steps in found)
    images = (batch_size or args.batch_size) * sum(steps for *_, steps in found)
    return {
        "img_per_s": 1e3 * images / total,
        "step_ms": statistics.median(ms for _, _, ms, _ in found),
        "waiting": 100 * waited / total,
    }


def record(text, kind):
    """The last record of a kind (Run, Probe, Summary, or a child's FIGURES) in an output."""
    return records(text, kind)[-1]


def records(text, kind):
    return [json.loads(found) for found in re.findall(rf"\b{kind} (\{{.*\}})$", text, re.M)]


# --- Data --------------------------------------------------------------------------------------


def sample(bench, images, *options):
    """Folder of a generated data set; it stays, and is found again, in --data_folder."""
    base = bench.args.data_folder or bench.folder
    folder = base / "-".join(["sample", str(images), *(o.strip("-") for o in options)])
    say(f"data: {images} images in {folder}")
    tool = TOOLS / "make_sample_coco.py"
    command = [sys.executable, tool, folder, "--images", images, "--val_images", 0]
    bench.run([*command, *options])
    return folder


def pictures(bench, images):
    """COCO's folder with at least so many labelled images: --data, or a generated one."""
    if bench.args.data:
        return bench.args.data
    images += 4 + images // 32  # some have no label
    drawn = sample(bench, min(images, PICTURES)) / "train2017"
    listed = sample(bench, images, "--annotations_only") / "annotations"
    folder = bench.folder / f"coco-{images}"
    if not folder.exists():
        (folder / "train2017").mkdir(parents=True)
        os.symlink(listed, folder / "annotations")
        names = re.findall(r'"file_name": "([^"]+)"', next(listed.iterdir()).read_text())
        for name, file in zip(names, itertools.cycle(sorted(drawn.iterdir()))):
            os.symlink(file, folder / "train2017" / name)
    return folder


def prepared(bench, folder):
    """The same set made smaller by prepare_coco.py."""
    target = (bench.args.data_folder or bench.folder) / f"{folder.name}-prepared"
    say(f"data: {target}")
    bench.run([sys.executable, TOOLS / "prepare_coco.py", folder, target])
    return target


def first_annotations(data):
    """The smaller instances file of a prepared set."""
    return data / "annotations" / "first_instances_train2017.json"


def options(args, data, **more):
    """The script's options for a run that stops in its first epoch, after the measured steps."""
    given = {
        "coco_image_path": data / "train2017",
        "annotation_path": data / "annotations" / "instances_train2017.json",
        "weights": "none",
        "num_epochs": 1,
        "log_every": args.log_every,
        "image_size": args.image_size,
        "batch_size": args.batch_size,
        "workers": args.workers,
        "max_steps": args.warm_steps + args.steps,
    } | more
    given = {name: value for name, value in given.items() if value is not None}
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in given.items()]


def worker_count(args):
    """What --workers says, or the script does without."""
    return args.workers or (max(1, own_cores() - 1) if GPU else 1)


@functools.cache
def own_cores():
    """As many as the script takes itself to have: no more than a quota leaves."""
    quota = getattr(load_script(), "cores_by_quota", lambda: math.inf)
    return int(min(CORES, quota()))


def needed(args):
    """Images that keep all workers busy until the last measured step has ended.

    Two batches for each worker lie ready then, and three may have been thrown away.
    """
    return args.batch_size * (args.warm_steps + args.steps + 5 * worker_count(args) + 1)


# --- Subcommands -------------------------------------------------------------------------------


def measure_step(bench):
    """training from JPEG files against a resident batch, and against another script"""
    # On a GPU what the loader has ready would feign a rate; see `fed`.
    args, change, cases = (fed(bench.args), "+emptied", {}) if GPU else (bench.args, "", {})
    data = pictures(bench, needed(args))

    def case(how, precision, **more):
        def run():
            text = bench.script(how, options(args, data, precision=precision, **more))
            return speed(text, args) | {"peak": bench.peak}

        return run

    kinds, rows = {"as shipped": "auto", "fp32": "fp32"}, []
    for kind, precision in kinds.items():
        cases[kind] = case(f"demo{change}", precision)
        if args.against:
            cases[f"{kind}, the other"] = case(f"other{change}", precision)
        else:
            cases[f"{kind}, resident batch"] = case("demo+resident", precision, workers=0)
    if args.peer:
        cases["peer"] = peer_case(bench, data / "train2017")
    found = rounds(bench, cases)
    for kind in kinds:
        for other in (f"{kind}, the other", f"{kind}, resident batch", "peer"):
            if other in found:
                pair = found[kind]["img_per_s"], found[other]["img_per_s"]
                rows.append(row(f"{kind} / {other.rpartition(', ')[2]}", "img/s", *pair))
        rows.append(
            row(f"{kind}: share of a step that waits for data", "%", found[kind]["waiting"])
        )
        other = found.get(f"{kind}, the other", {})
        rows.append(row(f"{kind}: peak memory", "MB", found[kind]["peak"], other.get("peak")))
    return rows


def peer_case(bench, images):
    """pytorch/examples' imagenet script on the same pictures, timed by the meters it prints."""
    args, folder = bench.args, bench.folder / "peer"
    names = sorted(entry.name for entry in os.scandir(images))[: needed(args) + 4]
    for split, part in (("train", names), ("val", names[:1])):
        (folder / split / "any").mkdir(parents=True)
        for name in part:
            os.symlink(Path(images, name).resolve(), folder / split / "any" / name)
    own = f"-a resnet18 -b {args.batch_size} -j {worker_count(args)}"
    command = [sys.executable, args.peer, *own.split(), "--epochs", 1, "-p", 1, folder]

    def run():
        text = bench.run(command, until=(PEER, args.warm_steps + args.steps))
        found = list(map(float, PEER.findall(text)))[args.warm_steps :]
        return {"img_per_s": args.batch_size * len(found) / sum(found)}

    return run


def loader_case(bench, how, data, steps, **more):
    """A case: images/s of a loader, after half as many batches of warm-up."""
    given = options(bench.args, data, max_steps=steps * 3 // 2, **more)
    return lambda: record(bench.script(how, given), "FIGURES")


def measure_input(bench):
    """the loader on one core, with a worker and without: original and prepared pictures"""
    if not hasattr(os, "sched_setaffinity"):
        raise Failure("input times one core, to which this system cannot bind a process")
    args = bench.args
    steps = 3 * args.steps  # which cost little: nothing trains
    original = pictures(bench, args.batch_size * (steps * 3 // 2 + 3))
    sets, rows = {"original": original, "prepared": prepared(bench, original)}, []
    hows = {"the demo": ("demo+loader+core", 1)}  # what runs, with so many workers
    if args.against:
        hows["the other"] = "other+loader+core", 1
    else:
        hows["without a worker"] = "demo+loader+core", 0
        hows["the bare decoder"] = "decode+core", 0
    cases = {
        f"{which}, {kind}": loader_case(bench, how, data, steps, workers=workers)
        for which, (how, workers) in hows.items()
        for kind, data in sets.items()
    }
    found = {name: f["img_per_s"] for name, f in rounds(bench, cases).items()}
    for which, kind in itertools.product(list(hows)[1:], sets):
        pair = found[f"the demo, {kind}"], found[f"{which}, {kind}"]
        rows.append(row(f"loader on one core, {kind}: the demo / {which}", "img/s", *pair))
    for which in hows if not args.against else ():
        pair = (found[f"{which}, {kind}"] for kind in ("prepared", "original"))
        rows.append(row(f"{which} on one core: prepared / original", "img/s", *pair))
    return rows


def measure_start(bench):
    """launch to first step of two ranks at full size: original, prepared, and a tiny set"""
    args = bench.args
    original = pictures(bench, args.images)
    small = prepared(bench, original)
    tiny = sample(bench, max(48, 6 * args.batch_size))

    def case(data, **more):
        given = options(args, data, max_steps=2, **TWO, **more)

        def run():
            ranks = records(bench.script("demo+phases", given, 2), "FIGURES")
            first, second = sorted(ranks, key=lambda rank: rank["rank"])
            whole = sum(first["phases"].values())
            return first["phases"] | {"launch to first step": whole, "peak": second["peak"]}

        return run

    cases = {"original": case(original), "prepared": case(small), "tiny": case(tiny)}
    cases["first annotations"] = case(small, annotation_path=first_annotations(small))
    cases["COCO()"] = lambda: record(
        bench.script("pycocotools", options(args, original)), "FIGURES"
    )
    found, rows = rounds(bench, cases), []
    for phase in [*PHASES.values(), "launch to first step"]:
        pair = found["prepared"][phase], found["original"][phase]
        rows.append(row(f"{phase}: prepared / original", "s", *pair))
    pair = found["first annotations"]["image list"], found["original"]["image list"]
    rows.append(row("image list: prepared, first annotations / original", "s", *pair))
    for name in ("original", "prepared", "first annotations"):
        pair = found[name]["launch to first step"], found["tiny"]["launch to first step"]
        rows.append(row(f"launch to first step: {name} / tiny set", "s", *pair))
    pair = found["original"]["image list"], found["COCO()"]["image list"]
    rows.append(row("image list: original / pycocotools' COCO(file)", "s", *pair))
    pair = found["original"]["peak"], found["tiny"]["peak"]
    return [*rows, row("peak memory of rank 1: original / tiny set", "MB", *pair)]


# --- Links -------------------------------------------------------------------------------------


def gbps(rate):
    """Gb/s of a rate as tc writes it; None: unshaped."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    return float(found[1]) * {"k": 1e-6, "m": 1e-3, "g": 1}[found[2]] if found else None


def need_root(args):
    if os.geteuid():
        why = "needs root for its network namespaces: start it with sudo"
        raise Failure(f"{args.command} {why}")


def measure_links(bench):
    """links of known rates: what the probe says, projections, and compressed gradients"""
    args, turn = bench.args, itertools.count()
    need_root(args)
    data, logs = pictures(bench, 480), bench.folder / "logs"

    def case(rate, method):
        shape = ["--rate", rate] if gbps(rate) else []
        given = options(args, data, num_epochs=1000, **TWO, **METHODS[method])

        def run():
            name = f"{next(turn)}-{rate}-{method}"
            command = ["bash", TOOLS / "two_nodes.sh", *shape, "--name", name, "--"]
            probe = str(int(method == "none"))
            bench.run([*command, *given], OMP_NUM_THREADS="1", PROBE=probe)
            return link_figures((logs / name / "node0.log").read_text(errors="replace"), args)

        return run

    pairs = list(itertools.product(args.rates, args.methods))
    found = rounds(bench, {f"{rate}, {method}": case(rate, method) for rate, method in pairs})
    rows = [entry for rate in args.rates for entry in rate_rows(rate, found[f"{rate}, none"])]
    rows += delay_rows(bench)
    for rate, method in pairs:
        mine, none, name = found[f"{rate}, {method}"], found[f"{rate}, none"], f"{rate}, {method}"
        rows.append(row(f"{name}: step / none", "ms", mine["ms"], none["ms"]))
        rows.append(row(f"{name}: bytes of a step / none", "MB", mine["MB"], none["MB"]))
        if method != "none":  # whose interface carries the probe, too
            received = mine["received"], none["MB"]
            rows.append(row(f"{name}: received per step of the run / none", "MB", *received))
    return rows + projection_rows(bench, sorted(logs.glob("*-none")))


def link_figures(log, args):
    """Figures of one run over a link, from node 0's log; with accumulation of a quarter step."""

    def highest(node, key):
        return max(link[key] for link in node["interfaces"] if link["kind"] != "loopback")

    summary, parts = record(log, "Summary"), record(log, "Run")["accumulate_steps"]
    # From the other node come its parts of all-reduces, but none of the weights. One more than
    # there are steps: of the pass before the first one.
    received = highest(record(log, "Node"), "rx_bytes") / (summary["steps"] + 1)
    found = {
        "ms": speed(log, args)["step_ms"] / parts,
        "MB": summary["wire_bytes_per_step"] / parts / 1e6,
        "received": received / parts / 1e6,
    }
    for probe in records(log, "Probe"):
        found["wire"] = min(highest(node, "wire_Gbps") for node in probe["nodes"])
        if probe["bandwidth_GBps"]:  # others at work on the machine leave it without one
            found["slope"] = 8 * probe["bandwidth_GBps"]
        found["latency"] = probe["latency_ms"]
    return found


def rate_rows(rate, found):
    """What a link delivers against its shaped rate, all by the probe."""
    shaped = [gbps(rate)] if gbps(rate) else None
    return [
        row(f"{rate}: rate measured / shaped", "Gb/s", found["wire"], shaped),
        row(f"{rate}: bandwidth by the slope / shaped", "Gb/s", found.get("slope"), shaped),
        row(f"{rate}: latency of a small all-reduce", "ms", found["latency"]),
    ]


def delay_rows(bench):
    """Latency with delays one way against that without and four delays, which is what Gloo's
    small all-reduce costs between two processes.
    """
    rows, found = [], {ms: [] for ms in [0, *bench.args.delays] if TUN_LINK.exists()}
    for ms, _ in itertools.product(found, range(bench.args.repeats)):
        found[ms].append(delayed_latency(bench, ms))
        say(f"latency with {ms} ms of delay: {found[ms][-1]:.4g} ms")
    for ms in list(found)[1:]:
        expected = [4 * ms + latency for latency in found[0]]
        rows.append(
            row(f"latency, delay of {ms} ms / without + 4 delays", "ms", found[ms], expected)
        )
    return rows


def delayed_latency(bench, delay_ms):
    """Latency in ms by the probe between two namespaces whose link has a delay, ms one way."""
    spaces = [f"benchmark{os.getpid()}-{k}" for k in (0, 1)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--rdzv_backend=static", "--rdzv_endpoint=10.78.0.1:29500"]
    nodes = [
        ["ip", "netns", "exec", space, *torchrun, f"--node_rank={k}", TOOLS / "probe_link.py"]
        for k, space in enumerate(spaces)
    ]
    try:
        for words in itertools.chain(
            *(([f"netns add {x}", f"-n {x} link set lo up"]) for x in spaces)
        ):
            subprocess.run(["ip", *words.split()], check=True)
        link = [sys.executable, TUN_LINK, str(delay_ms / 1e3), "0", *spaces]  # seconds, losses
        with subprocess.Popen(link, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forwarder:
            forwarder.stdout.readline()  # it is ready
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.Popen(nodes[1], env=bench.env | {"OMP_NUM_THREADS": "1"}, **quiet)
            return record(bench.run(nodes[0], OMP_NUM_THREADS="1"), "Probe")["latency_ms"]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)


def projection_rows(bench, folders):
    """A step at one rate as compare_logs.py tells it from another rate's log, both ways."""
    pairs = {}
    by_turn = sorted(folders, key=lambda folder: int(folder.name.partition("-")[0]))
    count = len(bench.args.rates)
    for at in range(0, len(by_turn), count):
        runs = {folder.name.split("-")[1]: folder for folder in by_turn[at : at + count]}
        for check in cross_checks(bench, runs):
            found = pairs.setdefault((check["from"], check["to"]), ([], []))
            found[0].append(1e3 * check["predicted_s"])
            found[1].append(1e3 * check["measured_s"])
    return [
        row(f"step at {to}, projected from {of}'s log / measured", "ms", *found)
        for (of, to), found in pairs.items()
    ]


def cross_checks(bench, runs):
    """What compare_logs.py tells of each run from each other one's log; runs: {name: folder}."""
    file = bench.folder / "compared.json"
    command = [sys.executable, TOOLS / "compare_logs.py", "--json", file]
    bench.run([*command, *(f"{name}={folder}" for name, folder in runs.items())])
    return json.loads(file.read_text())["cross_checks"]


def measure_predictions(bench):
    """a step over one link as told from another link's log, against the step measured there

    Both ways, with one rank a node and with two. A round takes all links one after the other.
    """
    args, turn = bench.args, itertools.count()
    need_root(args)
    data = pictures(bench, 480)
    given = options(args, data, num_epochs=1000, **TWO, **OLD_CPU[args.old_cpu][0])

    def case(ranks):
        def run():
            runs, name = {}, f"{ranks}-{next(turn)}"
            for rate in args.rates:
                shape = ["--rate", rate] if gbps(rate) else []
                command = ["bash", TOOLS / "two_nodes.sh", *shape, "--gpus_per_node", ranks]
                command += ["--name", f"{name}-{rate}", "--", *given]
                bench.run(command, OMP_NUM_THREADS="1", PROBE="1", **OLD_CPU[args.old_cpu][1])
                runs[rate] = bench.folder / "logs" / f"{name}-{rate}"
            return prediction_figures(cross_checks(bench, runs))

        return run

    return prediction_rows(rounds(bench, {ranks: case(ranks) for ranks in args.ranks_a_node}))


def prediction_figures(checks):
    """{(from, to, which): ms} of one round."""
    found = {}
    for check in checks:
        for which in ("predicted", "measured"):
            found[check["from"], check["to"], which] = 1e3 * check[f"{which}_s"]
    return found


def prediction_rows(found):
    """Medians of the rounds, and between which errors a round's prediction lay."""
    rows = []
    for ranks, figures in found.items():
        for of, to in dict.fromkeys(key[:2] for key in figures):
            pair = [figures[of, to, which] for which in ("predicted", "measured")]
            name = f"{ranks} a node: step at {to}, from {of}'s log"
            rows.append(row(f"{name}: predicted / measured", "ms", *pair))
            errors = [100 * (a / b - 1) for a, b in zip(*pair, strict=True)]
            ends = {"demo": min(errors), "reference": max(errors), "ratio": None}
            rows.append({"what": f"{name}: least, largest error", "unit": "%"} | ends)
            rows[-1] |= {"demo_all": errors, "reference_all": None}
    return rows


def measure_loss(bench):
    """the loss with each compression, and on prepared pictures, against none's, over all seeds

    A run's loss is the mean over both ranks and the last quarter of its steps: single steps
    scatter by their batch, and all runs of a seed see the same images in the same order. With
    accumulation they see as many in a quarter of the steps.
    """
    args, found, rows = bench.args, {}, []
    original = args.data or sample(bench, 480)
    data = {"prepared": prepared(bench, original)} if "prepared" in args.methods else {}
    for method, seed in itertools.product(args.methods, range(args.seeds)):
        more = KINDS["loss"][method]
        steps = args.steps // more.get("accumulate_steps", 1)
        more = TWO | {"seed": seed, "num_epochs": 1000, "max_steps": steps} | more
        given = options(args, data.get(method, original), **more)
        text = bench.script("demo", given, 2, OMP_NUM_THREADS="1")
        skip = steps - math.ceil(steps / 4)
        losses = [loss for rank in "01" for loss, *_ in step_times(text, skip, 1, rank)]
        found.setdefault(method, []).append(statistics.mean(losses))
        say(f"{method}, seed {seed}: loss {found[method][-1]:.4f}")
    for method in args.methods[1:]:
        pair, name = (found[method], found["none"]), f"{method} / none"
        for seed, losses in enumerate(zip(*pair, strict=True)):
            rows.append(row(f"seed {seed}: loss, {name}", "nats", *([x] for x in losses)))
        rows.append(row(f"mean loss, {name}", "nats", *([statistics.mean(x)] for x in pair)))
        if args.seeds > 1:
            spread = ([max(x) - min(x)] for x in pair)
            rows.append(row(f"largest - smallest loss, {name}", "nats", *spread))
    return rows


# --- By the cost model -------------------------------------------------------------------------

PIXELS = {"conv1": 112**2, "layer1": 56**2, "layer2": 28**2, "layer3": 14**2, "layer4": 7**2}
RATES = 10, 25, 100  # Gb/s
MIB = 2**20


def measure_overlap(bench):
    """by the cost model: a step with DDP's own bucket sizes against buckets of 25 MiB

    Two nodes with a GPU each. Nothing runs: forward and backward pass take what is given, and the
    backward pass of a layer its share, by the multiplications in it.
    """
    args, kinds = bench.args, {"own": [MIB, 25 * MIB], "given": [25 * MIB]}
    buckets = {kind: resnet_buckets(caps) for kind, caps in kinds.items()}
    for kind, found in buckets.items():
        say(f"{kind}: buckets of {', '.join(f'{size / 1e6:.1f}' for size, _ in found)} MB")
    rows = []
    for gbps in RATES:
        pair = [[modelled_step(args, found, gbps)] for found in buckets.values()]
        rows.append(row(f"step at {gbps} Gb/s: DDP's own buckets / of 25 MiB", "ms", *pair))
    return rows


def resnet_buckets(caps):
    """[(bytes, share of the backward pass after which they are there)] of ResNet-18's buckets.

    DDP makes them in the order in which gradients come: from the last layer to the first.
    """
    import torch.distributed
    import torchvision

    named = [*torchvision.models.resnet18(num_classes=80).named_parameters()][::-1]
    places, _ = torch.distributed._compute_bucket_assignment_by_size([p for _, p in named], caps)
    work = [p.numel() * PIXELS.get(name.split(".")[0], 1) * (p.dim() == 4) for name, p in named]
    done = [*itertools.accumulate(work)]
    sizes = [4 * sum(named[place][1].numel() for place in bucket) for bucket in places]
    return [(size, done[max(b)] / done[-1]) for size, b in zip(sizes, places, strict=True)]


def modelled_step(args, buckets, gbps):
    """ms of a step in which each bucket is sent when it is there and the one before is sent."""
    sent = 0.0
    for size, share in buckets:
        begin = max(sent, share * args.backward_ms)
        sent = begin + 1e3 * cost_model.ring_seconds(size, 2, 2, cost_model.payload_rate(gbps))
    return args.forward_ms + max(sent, args.backward_ms)


# --- What only a GPU can show ------------------------------------------------------------------


def measure_gpu(bench):
    """all that only a GPU can show, in parts of 4 minutes at most; figures as soon as known"""
    args, rows = bench.args, []
    if not args.cpu and not gpu_there():
        raise Failure("gpu: torch finds no NVIDIA GPU here; start it where nvidia-smi lists one")
    for name in [args.part] if args.part else PARTS:
        bench.deadline = time.monotonic() + args.limit
        say(f"part {name}")
        try:
            for entry in PARTS[name](bench):
                print("  ".join(cells(entry)), flush=True)
                rows.append(entry)
                write_json(args, rows)
        except Failure as error:
            bench.failed.append(f"part {name}: {error}")
    return rows


def gpu_there():
    if not GPU:
        return False
    import torch

    return torch.cuda.is_available()


def counted(args, every, warm, steps, **more):
    """`args` with at least so many steps to count after at least `warm`, and `every` a line.

    A line has the means of the steps since the one before; the first is of step 1. So both
    numbers are rounded up to where a line is.
    """
    warm, steps = (every * math.ceil(number / every) for number in (warm, steps))
    counts = {"log_every": every, "warm_steps": 1 + warm, "steps": steps}
    return argparse.Namespace(**vars(args) | counts | more)


def fed(args, **more):
    """`args` for a run that a loader feeds: its figure depends on what the loader has ready.

    Workers that began together end their batches together, so batches come in waves of as many
    as there are workers, and each has two ready where training is slower. "emptied" throws these
    away after the first steps; four waves later none of it is left. Ten waves are counted, to a
    whole one: less would count a wave that began before, or leave out one that has.
    """
    args = argparse.Namespace(**vars(args) | more)
    workers, least = worker_count(args), 1 if args.cpu else LINE_EVERY
    every = workers * math.ceil(least / workers)
    steps = max(10 * workers, args.steps)
    return counted(args, every, max(4 * workers, args.warm_steps), steps)


def unfed(args, size):
    """`args` for a run with a resident batch of this size: as many images of each size."""
    steps = args.steps * max(1, max(args.batch_sizes) // size)
    every = 1 if args.cpu else LINE_EVERY
    return counted(args, every, args.warm_steps, steps, batch_size=size, workers=0)


def once(bench, how, data, args, processes=0, launch=(), **more):
    """([img/s of all processes], output) of one run, with the step counts of `args`."""
    given = options(args, data, **more)
    env = {"BENCHMARK_WARM": str(args.warm_steps)}
    text = bench.script(how, given, processes, launch, **env)
    ranks = map(str, range(record(text, "Run")["world_size"]))
    rate = sum(speed(text, args, rank=rank)["img_per_s"] for rank in ranks)
    what = "".join(f", {name} {value}" for name, value in more.items())
    say(f"{how}, batch of {args.batch_size}{what}: {rate:.4g} img/s")
    return [rate], text


def resident(bench, data, size, how="demo+resident", **more):
    """[img/s] of one run with a batch of this size that stays in memory."""
    return once(bench, how, data, unfed(bench.args, size), num_epochs=FOR_EVER, **more)[0]


def gpu_train(bench):
    args = fed(bench.args)
    data = pictures(bench, 2 * needed(args))
    for processes, more in ((1, {}), (2, TWO)):
        found, text = once(bench, "demo+emptied", data, args, processes, **more)
        run = "{world_size} process(es) on {devices}, {backend}, {precision} by auto"
        yield row(run.format(**record(text, "Run")), "img/s", found)


def gpu_resident(bench, what, one, other):
    """Resident batches of each size with the options of `one` against those of `other`."""
    data = pictures(bench, max(bench.args.batch_sizes))
    for size in bench.args.batch_sizes:
        pair = [resident(bench, data, size, **kind) for kind in (one, other)]
        yield row(f"resident batch of {size}: {what}", "img/s", *pair)


def gpu_step(bench):
    return gpu_resident(bench, "as shipped / strict fp32", {}, {"precision": "fp32"})


def gpu_compile(bench):
    return gpu_resident(bench, "--compile / without", {"compile": True}, {})


def gpu_input(bench):
    args = fed(bench.args)
    original = pictures(bench, needed(args))
    device = resident(bench, original, args.batch_size)
    yield row(f"resident batch of {args.batch_size}", "img/s", device)
    for name in ("prepared", "original"):
        data = prepared(bench, original) if name == "prepared" else original
        loader = [loader_case(bench, "demo+loader", data, args.steps)()["img_per_s"]]
        rate, text = once(bench, "demo+emptied", data, args)
        workers = record(text, "Run")["workers"]
        yield row(f"{name}: loader of {workers} workers / resident batch", "img/s", loader, device)
        yield row(f"{name}: fed / the lower of both", "img/s", rate, min(loader, device))


def gpu_split(bench):
    args, size = fed(bench.args), bench.args.batch_size
    data = pictures(bench, needed(args))
    cases = {
        "fed": ("demo+emptied+profile", args, {}),
        "resident": ("demo+resident+profile", unfed(bench.args, size), {"num_epochs": FOR_EVER}),
    }
    for name, (how, counts, more) in cases.items():
        _, text = once(bench, how, data, counts, **more)
        split, busy = record(text, "Summary"), record(text, "FIGURES")
        compute = [split["compute_ms"] + split["exposed_ms"]]
        yield row(f"{name}: compute and exposed / kernels running", "ms", compute, [busy["ms"]])
        step = split["step_ms"]
        yield row(f"{name}: waiting for data", "%", [100 * split["data_ms"] / step])
        # the profile is of one step more, which may have been a slower one
        yield row(f"{name}: no kernel running", "%", [max(0, 100 * (1 - busy["ms"] / step))])


def gpu_job(bench):
    data = prepared(bench, pictures(bench, bench.args.images))
    more = {"num_epochs": 2, "max_steps": None, "log_every": None}
    more["annotation_path"] = first_annotations(data)
    begin = time.monotonic()
    text = bench.script("demo", options(bench.args, data, **more), 1)
    took = [time.monotonic() - begin]
    if "Cleanup complete" not in text:
        raise Failure("the job has ended without its last line")
    run, summary = record(text, "Run"), record(text, "Summary")
    yield row(f"2 epochs of {run['images']} prepared pictures, launch to end", "s", took)
    yield row("the same: training alone", "s", [summary["train_s"]])
    yield row("the same: whole job", "img/s", [summary["img_per_s"]])


def gpu_candidates(bench):
    """What may gain and is not in the script, each against as shipped."""
    size = bench.args.batch_size
    data = pictures(bench, needed(fed(bench.args)))
    shipped = {how: resident(bench, data, size, how) for how in ("demo+resident", "demo+host")}
    for change, what in CHANGES.items():
        base = "demo+host" if change == "ahead" else "demo+resident"
        changed = resident(bench, data, size, f"{base}+{change}")
        yield row(f"{what} / as shipped", "img/s", changed, shipped[base])
    yield from gpu_lines(bench, data, shipped["demo+resident"])
    yield from gpu_cores(bench, prepared(bench, data))


def gpu_lines(bench, data, shipped):
    """Step lines nearer together and farther apart: each makes the GPU wait."""
    args = counted(bench.args, 1, bench.args.warm_steps, bench.args.steps, workers=0)
    given = {"num_epochs": FOR_EVER}
    for every in (1, 5, 50):
        rate, _ = once(bench, "demo+resident", data, in_lines(args, every), **given)
        yield row(f"--log_every {every} / {LINE_EVERY}", "img/s", rate, shipped)


def in_lines(args, every):
    return counted(args, every, args.warm_steps, max(args.steps, every))


def gpu_cores(bench, data):
    """Cores left free of workers, and workers bound to the cores beside the GPU: fed runs."""
    args = fed(bench.args)
    shipped, text = once(bench, "demo+emptied", data, args, 1)
    workers = record(text, "Run")["workers"]
    for fewer in range(1, min(3, workers)):
        few = fed(bench.args, workers=workers - fewer)
        rate, _ = once(bench, "demo+emptied", data, few, 1)
        what = f"fed by {workers - fewer} workers / by {workers}, as shipped"
        yield row(what, "img/s", rate, shipped)
    if not args.cpu:  # it asks for the cores beside a GPU
        rate, _ = once(bench, "demo+emptied", data, args, 1, ["--numa-binding=node"])
        yield row("fed, torchrun --numa-binding=node / without", "img/s", rate, shipped)


PARTS = {  # each yields rows; the top of this file says of what
    "train": gpu_train,
    "step": gpu_step,
    "input": gpu_input,
    "split": gpu_split,
    "job": gpu_job,
    "compile": gpu_compile,
    "candidates": gpu_candidates,
}


# --- What runs in a process of its own ---------------------------------------------------------


class Resident:
    """Stands for a loader, and gives its first batch for ever, the images on `device`."""

    def __init__(self, loader, device):
        self.sampler, self.dataset = loader.sampler, loader.dataset
        loader.sampler.set_epoch(1)
        images, *rest = next(iter(loader))
        self.batch = (images.to(device), *rest)

    def __iter__(self):
        return itertools.repeat(self.batch)


class Emptied:
    """Stands for a loader, and throws away what it has ready after the first, slow steps.

    Meanwhile all buffers have filled: of two batches for each worker. Where the device is quicker
    than the workers, training would be too fast until these are used up, after 2 workers / (1 -
    rate of the workers / rate of the device) steps: the nearer the rates, the longer.
    """

    FIRST = 3  # steps

    def __init__(self, loader):
        self.sampler, self.dataset, self.loader = loader.sampler, loader.dataset, loader

    def __iter__(self):
        return self.emptied(iter(self.loader))  # now, and not at the first batch: it forks

    def emptied(self, batches):
        yield from itertools.islice(batches, self.FIRST)
        # two ready for each worker, and the one at which it is meanwhile
        for _ in itertools.islice(batches, 3 * self.loader.num_workers):
            pass
        yield from batches


class Ahead:
    """Stands for a loader, and copies each batch to the GPU while the one before is computed."""

    def __init__(self, loader):
        self.sampler, self.dataset, self.loader = loader.sampler, loader.dataset, loader

    def __iter__(self):
        return self.copied(iter(self.loader))

    def copied(self, batches):
        import torch

        stream, ready = torch.cuda.Stream(), []
        for images, *rest in batches:
            with torch.cuda.stream(stream):
                ready.append((images.to("cuda", non_blocking=True), stream.record_event(), *rest))
            if len(ready) == 2:
                images, copied, *rest = ready.pop(0)
                torch.cuda.current_stream().wait_event(copied)
                images.record_stream(torch.cuda.current_stream())
                yield images, *rest


def load_script():
    """The module of the script that $BENCHMARK_SCRIPT names, by default the one beside tools/."""
    file = Path(os.environ.get("BENCHMARK_SCRIPT", SCRIPT))
    spec = importlib.util.spec_from_file_location("demo", file)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    sys.argv[0] = str(file)
    spec.loader.exec_module(demo)
    return demo


def show(**figures):
    os.write(1, f"FIGURES {json.dumps(figures)}\n".encode())


def child_demo(changes, argv):
    """main() of the real script, with the changes that are named."""
    sys.argv[1:] = argv
    demo = load_script()
    if "resident" in changes:
        change_loader(demo, lambda loader, process: Resident(loader, process.device))
    if "host" in changes:  # its images are copied to the device in each step, as a loader's are
        change_loader(demo, lambda loader, process: Resident(loader, "cpu"))
    if "emptied" in changes:
        change_loader(demo, lambda loader, process: Emptied(loader))
    if "ahead" in changes:
        change_loader(demo, lambda loader, process: Ahead(loader) if process.gpu else loader)
    if "cudnn" in changes:
        demo.torch.backends.cudnn.benchmark = True
    if "unbatched" in changes:
        demo.ddp_options = lambda args: {"bucket_cap_mb": args.bucket_cap_mb}
    if "loader" in changes:
        read_all(given_options(argv).coco_image_path)
        demo.train_epoch = lambda run, epoch: time_loader(demo, run.loader, run.args.max_steps)
    if "phases" in changes:
        note_phases(demo)
    if "profile" in changes:
        profile(demo)
    demo.one_line_errors(demo.main)


def change_loader(demo, change):
    """Has the script train from change(loader, process) in place of its loader."""
    make = demo.make_loader

    def changed(args, process, *rest):
        return change(make(args, process, *rest), process)

    demo.make_loader = changed


def read_all(folder):
    """Reads a folder's pictures, so that they come from memory when the loader's time is taken."""
    for entry in itertools.islice(os.scandir(folder), MOST_READ):
        if entry.is_file():
            Path(entry).read_bytes()


def time_loader(demo, loader, steps):
    """Shows images/s of a loader over the last two thirds of so many batches, and ends."""
    if hasattr(demo, "keep_memory"):  # which training calls in its second step: an older has none
        demo.keep_memory()
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in itertools.islice(batches, steps // 3):
        pass
    begin = time.perf_counter()
    images = sum(len(batch[1]) for batch in itertools.islice(batches, steps - steps // 3))
    show(img_per_s=images / (time.perf_counter() - begin))
    sys.exit()


def note_phases(demo):
    """Shows the seconds of each phase up to the first step's end, and the peak memory then."""
    moments = [float(os.environ["BENCHMARK_BEGAN"])]  # one clock in all processes of a machine

    def end_phase(name, function, *args):
        if len(moments) == 1 + list(PHASES).index(name):
            moments.append(time.monotonic())
            if len(moments) > len(PHASES):
                spans = (b - a for a, b in itertools.pairwise(moments))
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
                phases = dict(zip(PHASES.values(), spans, strict=True))
                show(rank=int(os.environ["RANK"]), phases=phases, peak=peak)
        return function(*args)

    for name in PHASES:
        inner = getattr(demo, name)
        setattr(demo, name, lambda *args, name=name, inner=inner: end_phase(name, inner, *args))


def profile(demo):
    """Shows the ms of a step in which a kernel ran; has the Summary count from the same step on.

    The profiler starts in the last step before those: that takes long, and is none of their time.
    """
    import torch
    from torch.profiler import ProfilerActivity

    step, end, kind = demo.train_step, demo.summarize, "CUDA" if GPU else "CPU"
    profiler = torch.profiler.profile(activities=[getattr(ProfilerActivity, kind)])
    demo.WARM_UP = int(os.environ["BENCHMARK_WARM"])  # steps that the Summary leaves out
    first = demo.WARM_UP - 1

    def profiled_step(run, micro_batches):
        if run.step == first:
            profiler.start()
        return step(run, micro_batches)

    def profiled_end(run):
        profiler.stop()
        # an annotation, such as the optimizer's step, covers the gaps between its kernels, too
        kernels = [e for e in profiler.events() if not e.is_user_annotation]
        spans = [e.time_range for e in kernels if e.device_type.name == kind]
        busy = union((span.start, span.end) for span in spans)
        show(ms=busy / 1e3 / (run.args.max_steps - first))
        end(run)

    demo.train_step, demo.summarize = profiled_step, profiled_end


def union(spans):
    """How long at least one of (begin, end) lasted."""
    total, reached = 0, -math.inf
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def given_options(argv):
    """The options of the script that other children need."""
    parser = argparse.ArgumentParser()
    for name in ("coco_image_path", "annotation_path"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("batch_size", "max_steps"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_known_args(argv)[0]


def child_decode(_, argv):
    """img/s of torchvision's decoder alone, in one thread."""
    import torch
    from torchvision.io import ImageReadMode, decode_image

    given = given_options(argv)
    torch.set_num_threads(1)
    read_all(given.coco_image_path)
    count = given.max_steps * given.batch_size
    files = [entry.path for entry in os.scandir(given.coco_image_path)][:count]
    for file in files[: count // 3]:
        decode_image(file, ImageReadMode.RGB)
    begin = time.perf_counter()
    for file in files[count // 3 :]:
        decode_image(file, ImageReadMode.RGB)
    show(img_per_s=len(files[count // 3 :]) / (time.perf_counter() - begin))


def child_pycocotools(_, argv):
    """Seconds to index an instances file as tutorials do."""
    from pycocotools.coco import COCO

    begin = time.perf_counter()
    COCO(given_options(argv).annotation_path)
    show(**{"image list": time.perf_counter() - begin})


def child(how, argv):
    """What `Bench.script` starts: name+change+change of one of the functions above."""
    name, *changes = how.split("+")
    if "core" in changes:  # with its workers, which inherit it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kinds = {"decode": child_decode, "pycocotools": child_pycocotools}
    kinds.get(name, child_demo)(changes, argv)


# --- Arguments and output ----------------------------------------------------------------------

MEASURE = {
    "step": measure_step,
    "input": measure_input,
    "start": measure_start,
    "links": measure_links,
    "predictions": measure_predictions,
    "loss": measure_loss,
    "gpu": measure_gpu,
    "overlap": measure_overlap,
}
SMALL = {"batch_size": 16, "image_size": 64}  # what two processes of one thread do quickly
DEFAULTS = {
    "input": {"repeats": 15},  # a run is over in a second or two: lest that second's luck decides
    "links": SMALL | {"warm_steps": 6},  # PowerSGD has to have started by then
    "predictions": SMALL | {"steps": 20},
    "loss": SMALL | {"steps": 200},
    "gpu": {"steps": 40, "warm_steps": 10, "batch_size": 256, "limit": 240},
}
NUMBERS = [  # name, default, subcommands, meaning
    ("repeats", 5, "step input start links", "rounds; fewer than 5 are a trial"),
    ("steps", 12, "step input start links loss gpu", "measured steps of a run"),
    ("warm_steps", 3, "step input start links loss gpu", "steps before them"),
    ("batch_size", 256 if GPU else 32, "step input start links loss gpu", "images per process"),
    ("image_size", 224, "step input start links loss gpu", "pixels a side"),
    (
        "workers",
        None,
        "step input start links loss gpu",
        "loader workers; unset: the script's own",
    ),
    (
        "limit",
        1800,
        "step input start links loss gpu overlap",
        "seconds of a run, or of a part of gpu",
    ),
    ("images", FULL, "start gpu", "of the full-size set"),
    ("seeds", 3, "loss", "runs of each kind"),
    ("forward_ms", 4, "overlap", "of a step's forward pass"),
    ("backward_ms", 8, "overlap", "of its backward pass"),
]


def listed(kind):
    """A type for argparse: several of a kind, with commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def path(text):
    return Path(text).resolve()


def add_options(add, name):
    kind = "links" if name == "predictions" else name  # which takes the same numbers
    for option, default, commands, text in NUMBERS:
        if kind in commands.split():
            default = DEFAULTS.get(name, {}).get(option, default)
            add(f"--{option}", type=int, default=default, metavar="N", help=text)
    add("--json", metavar="FILE", help="write the table as JSON, too")
    add("--data", type=path, metavar="DIR", help="COCO's folder; unset: generated pictures")
    add("--data_folder", type=path, metavar="DIR", help="keeps generated sets for the next time")
    add("--script", type=path, metavar="FILE", default=SCRIPT, help="the script to measure")
    if name in ("step", "input"):
        add("--against", type=path, metavar="FILE", help="another version of it, in turns")
    if name == "step":
        add("--peer", type=path, metavar="FILE", help="imagenet/main.py of pytorch/examples")
    if name == "links":
        rates = ["unshaped", "1gbit", "100mbit"]
        add("--rates", type=listed(str), default=rates, metavar="R,R", help="as tc writes them")
        add("--delays", type=listed(int), default=[2, 10], metavar="N,N", help="ms one way")
    if name == "predictions":
        rates, text = ["unshaped", "1gbit"], "as tc writes them"
        add("--rates", type=listed(str), default=rates, metavar="R,R", help=text)
        text = "on each of the two nodes"
        add("--ranks_a_node", type=listed(int), default=[1, 2], metavar="N,N", help=text)
        add("--old_cpu", action="store_true", help="as on a CPU without bf16")
    if name in ("links", "loss"):
        methods = list(KINDS[name])
        add("--methods", type=listed(str), default=methods, metavar="M,M", help="none is first")
    if name == "gpu":
        add("--part", choices=PARTS, help="one of them; unset: all, one after another")
        sizes = [256, 64, 512, 128]
        add("--batch_sizes", type=listed(int), default=sizes, metavar="N,N", help="to try")
        add("--cpu", action="store_true", help="on the CPU: tries the parts, measures no GPU")


def parse_arguments(argv):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in MEASURE.items():
        text = function.__doc__.split("\n")[0]
        sub = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        add_options(sub.add_argument, name)
        sub.error = lambda text: parser.error(text)
    parser.error = lambda text: parser.exit(2, f"benchmark.py: error: {text}; see --help\n")
    args = parser.parse_args(
        argv, argparse.Namespace(against=None, peer=None, log_every=1, cpu=False)
    )
    check(args, parser.error)
    return args


def check(args, error):
    """Ends with one line where arguments do not fit together."""
    for name, value in vars(args).items():
        least = 0 if name in ("warm_steps", "workers") else 1
        if type(value) is int and value < least:
            error(f"--{name} {value} is not at least {least}")
    for name in ("script", "against", "peer"):
        file = getattr(args, name)
        if file and not file.is_file():
            error(f"--{name} {file} is not there: give the path of a script")
    if args.peer and args.image_size != 224:
        error("--peer crops to 224 pixels: leave --image_size at 224")
    if args.data and not (args.data / "annotations" / "instances_train2017.json").is_file():
        error(f"--data {args.data} lacks annotations/instances_train2017.json: give COCO's folder")
    if wrong := [
        rate for rate in getattr(args, "rates", ()) if not gbps(rate) and rate != "unshaped"
    ]:
        error(f"--rates {wrong[0]}: write unshaped, 100mbit or 1gbit")
    if args.command == "predictions" and len({*args.rates}) < 2:
        error(f"--rates {','.join(args.rates)}: give two or more, to tell one from another")
    methods = getattr(args, "methods", ["none"])
    known = KINDS.get(args.command, METHODS)
    if methods[0] != "none" or not {*methods} <= {*known}:
        error(f"--methods {','.join(methods)}: give none, then others of {', '.join(known)}")
    if args.json and not os.access(Path(args.json).absolute().parent, os.W_OK):
        error(f"--json {args.json}: its folder cannot be written")


def machine():
    """One line: processor, cores this process may use, GPU, versions."""
    import torch

    file = Path("/proc/cpuinfo")
    info = file.read_text() if file.exists() else ""
    name = re.search(r"^model name\s*: (.+)$", info, re.M)
    extras = [flag for flag in ("amx_bf16", "avx512_bf16") if f" {flag} " in info]
    extras += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    name = ", ".join([name[1] if name else platform.machine(), *extras])
    return f"{name}, {CORES} cores, torch {torch.__version__}, Python {platform.python_version()}"


def cells(entry):
    """A row as text: what, demo, reference, ratio."""
    figures = ("-" if entry[k] is None else f"{entry[k]:.4g}" for k in ("demo", "reference"))
    ratio = "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
    return f"{entry['what']} ({entry['unit']})", *figures, ratio


def result_of(args, rows):
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {"machine": machine(), "settings": settings, "rows": rows}


def write_json(args, rows):
    """Writes what --json asks for."""
    if args.json:
        text = json.dumps(result_of(args, rows), indent=1) + "\n"
        Path(args.json).write_text(text, encoding="ascii")


def table(result):
    """The result as text: a line on the machine, then one line for each row."""
    lines = [("what", "demo", "reference", "ratio"), *map(cells, result["rows"])]
    wide = [max(len(line[k]) for line in lines) for k in range(4)]
    args = result["settings"]
    how = "by the model" if args["command"] == "overlap" else "one run each"
    if repeats := args.get("repeats"):
        how = f"median of {repeats}" + ", a trial" * (repeats < 5)
    shown = [f"{args['command']}, {how}: {result['machine']}"]
    for what, *figures in lines:
        pairs = zip(figures, wide[1:], strict=True)
        shown.append("  ".join([what.ljust(wide[0]), *(f.rjust(w) for f, w in pairs)]))
    return "\n".join(shown)


def stop_on_signal(number, _):
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a second one must not cut the clean-up short
    raise SystemExit(128 + number)


def main(argv=None):
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)
    folder = tempfile.mkdtemp(prefix="demo-benchmark-")
    try:
        bench = Bench(args, folder)
        rows = MEASURE[args.command](bench)
        print(table(result_of(args, rows)))
        write_json(args, rows)
        if bench.failed:
            raise Failure("; ".join(bench.failed)[:300])
    except (Failure, OSError) as error:
        sys.exit(say(f"benchmark.py: error: {error}") or 2)
    except SystemExit:
        say("benchmark.py: error: stopped on a signal; nothing is left running")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
