#!/usr/bin/env python3
"""Measures the demo's speed beside something else, in turns on the same machine.

    python tools/benchmark.py step       a whole training step, fed from image files
    python tools/benchmark.py input      the loader alone, on one core
    python tools/benchmark.py gpu        steps fed from files, and with random images on the GPU
    python tools/benchmark.py job        the job of the talk, from start to end

--data takes COCO's folder, or a packed file of tools/prepare_coco.py. step and input take several,
and --against: another copy of the script, as a file or as a commit of this repository. The cases
run in turns. Every second round has the reverse order, so that a machine
that becomes warm or busy favours none. A figure is the median of the rounds. A ratio is that of
two medians; the range behind it is that of the rounds.

Training is the real script in a process of its own. Its times come from its Summary, which leaves
out the first three steps. The script gets the variables by which the launchers make it faster on a
CPU. Where there are fewer images than a run needs, they are repeated. Use a machine that does
nothing else.

Exit codes: 0 done, 2 wrong arguments, 1 a failed run.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch

import run as run_py
from analysis.logs import UserError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "demo_coco_resnet18.py"
WARM_UP = 3  # steps that the script's Summary leaves out
JOB_IMAGES, JOB_EPOCHS, JOB_BATCH = 117_266, 2, 256  # the talk's: labelled images of train2017

Data = namedtuple("Data", "images file")  # the folder of images, and their instances file


def main(argv=None):
    args = parse_arguments(argv)
    size = "" if args.command == "job" else f", batch of {args.batch_size}, {args.steps} steps"
    print(f"{args.command}: {machine()}{size}")
    with tempfile.TemporaryDirectory(prefix="demo-benchmark-") as folder:
        args.folder = Path(folder)
        try:
            if not args.data:
                args.data = [ROOT / "data" / "sample_coco"]
                run(args, [sys.executable, ROOT / "tools" / "make_sample_coco.py", *args.data])
            COMMANDS[args.command](args)
        except (UserError, OSError) as error:
            sys.exit(f"benchmark.py: error: {error}")


# ---- The commands


def measure_step(args):
    """a whole training step, fed from image files"""
    cases = {}
    for name, script, source in cases_of(args):
        data = make_data(args, source, needed_images(args, WARM_UP))
        given = options(args, data, max_steps=WARM_UP + args.steps)
        cases[name] = partial(training_speed, args, [sys.executable, script, *given])
    show(args, rounds(args, cases), step_time=True)


def measure_input(args):
    """the loader alone, on one core: nothing trains"""
    cases = {}
    for name, script, source in cases_of(args):
        data = make_data(args, source, args.batch_size * (WARM_UP + args.steps))
        given = [*options(args, data), "--workers", "0"]
        cases[name] = partial(loader_speed, args, script, given)
    show(args, rounds(args, cases))


def measure_gpu(args):
    """what only a GPU can show: run this first on a GPU machine"""
    gpus = gpu_count()
    if not gpus:
        raise UserError("PyTorch finds no NVIDIA GPU here: run gpu where nvidia-smi lists one")
    print(f"{'':24} {'img/s':>9} {'step':>8} {'data':>8} {'compute':>8} {'exposed':>8} ms   peak")
    cases = {}
    for processes in sorted({1, gpus}):
        for precision in [args.precision] if args.precision != "auto" else ["bf16", "fp32"]:
            for kind in ("fed", "resident"):
                name = f"{processes} GPU(s), {precision}, {kind}"
                cases[name] = partial(gpu_speed, args, name, processes, precision, kind)
    show(args, rounds(args, cases))


def gpu_speed(args, name, processes, precision, kind):
    """Images/s of one run; prints its row. Times are by the clock of the GPU."""
    # A loader has two batches a worker in stock when the training begins.
    warm_up = WARM_UP + 2 * cores()
    args.precision = precision
    command = [*torchrun(processes), *child(f"warm-up {warm_up}")[1:]]
    if kind == "fed":
        data = make_data(args, args.data[0], processes * needed_images(args, warm_up))
        command += options(args, data, max_steps=warm_up + args.steps)
    else:
        command += ["--dummy", *options(args, None, max_steps=warm_up + args.steps)]
    summary = record(run(args, command), "Summary")
    times = [summary[f"{part}_ms"] for part in ("step", "data", "compute", "exposed")]
    rate = 1e3 * processes * args.batch_size / times[0]
    row = " ".join(f"{ms:8.2f}" for ms in times)
    peak = (summary["peak_gpu_bytes"] or 0) / 1e9
    print(f"{name:24} {rate:9.1f} {row} ms {peak:6.2f} GB", flush=True)
    return rate


def measure_job(args):
    """the talk's job, from start to end: 2 epochs of 117,266 images, a global batch of 256"""
    talk = (ROOT / "docs" / "talk" / "infiniband.log").read_text()
    talk_seconds = max(map(float, re.findall(r"Total wall time: .*\((.*)s\)", talk)))
    data = make_data(args, args.data[0], JOB_IMAGES)
    given = options(args, data, num_epochs=JOB_EPOCHS, global_batch_size=JOB_BATCH)
    began = time.monotonic()
    text = run(args, [*torchrun(max(1, gpu_count())), SCRIPT, *given])
    seconds = time.monotonic() - began
    summary = record(text, "Summary")
    print(f"{summary['steps']} steps, {summary['img_per_s']:.0f} img/s in them")
    print(f"from start to end {seconds:.1f} s; the talk's four GPUs over InfiniBand took", end=" ")
    print(f"{talk_seconds:.1f} s: {talk_seconds / seconds:.1f} times as long")


def torchrun(processes):
    """The beginning of a command that starts so many processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    return [*command, "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]


COMMANDS = {
    "step": measure_step,
    "input": measure_input,
    "gpu": measure_gpu,
    "job": measure_job,
}


# ---- Arguments


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, measure in COMMANDS.items():
        text = measure.__doc__.splitlines()[0]
        sub = commands.add_parser(name, help=text, description=text)
        add_options(sub.add_argument, name)
    return parser.parse_args(argv)


def add_options(add, command):
    many = command in ("step", "input")
    text = "COCO's folder or a packed file; unset: the sample set"
    add("--data", type=full_path, nargs="+" if many else 1, metavar="PATH", help=text)
    add("--image_size", type=positive, default=224, metavar="N", help="pixels a side (224)")
    kinds = ["auto", "fp32", "fp16", "bf16"]
    text = "of the training (auto; gpu: bf16, then fp32)"
    add("--precision", choices=kinds, default="auto", help=text)
    if command == "job":
        return
    steps, batch_size = (10 * cores(), 256) if gpu_count() else (12, 32)
    text = f"measured steps of a run, after a warm-up ({steps})"
    add("--steps", type=positive, default=steps, metavar="N", help=text)
    text = f"images per process ({batch_size})"
    add("--batch_size", type=positive, default=batch_size, metavar="N", help=text)
    count = 3 if command == "gpu" else 5
    text = f"how often all run ({count})"
    add("--rounds", type=positive, default=count, metavar="N", help=text)
    if many:
        text = "another copy of the script, or a commit that has one"
        add("--against", metavar="FILE_OR_COMMIT", help=text)


def positive(text):
    """A type for add_argument: a whole number, 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def full_path(text):
    return Path(text).resolve()


def cases_of(args):
    """(name, script, data) of each case to measure. Raises UserError."""
    found = []
    for script, path in scripts(args).items():
        for source in args.data:
            name = f"{script}, {source}" if len(args.data) > 1 else script
            found.append((name, path, source))
    return found


def scripts(args):
    """{name: path} of the scripts to measure. Raises UserError."""
    found = {"this script": SCRIPT}
    if args.against:
        path = full_path(args.against)
        if not path.is_file():
            command = ["git", "-C", str(ROOT), "show", f"{args.against}:{SCRIPT.name}"]
            done = subprocess.run(command, capture_output=True, timeout=60)
            if done.returncode:
                raise UserError(f"--against {args.against}: no file and no commit that has one")
            path = args.folder / SCRIPT.name
            path.write_bytes(done.stdout)
        found[args.against] = path
    return found


# ---- Data


def make_data(args, source, count):
    """Data of exactly so many labelled images, repeated if there are fewer. Raises OSError.

    source: COCO's folder, or a packed file in it.
    """
    packed = source.suffix == ".rgb"
    images = source if packed else source / "train2017"
    path = images.parent / "annotations" / f"instances_{images.stem}.json"
    content = json.loads(path.read_bytes())
    labels = {each["image_id"]: each["category_id"] for each in content["annotations"]}
    labelled = [image for image in content["images"] if image["id"] in labels]
    listed, annotations = [], []
    for n, image in zip(range(1, count + 1), itertools.cycle(labelled), strict=False):
        listed.append({"id": n, "file_name": image["file_name"]})
        annotations.append({"id": n, "image_id": n, "category_id": labels[image["id"]]})
    file = args.folder / f"{len(os.listdir(args.folder))}.json"
    file.write_text(json.dumps(content | {"images": listed, "annotations": annotations}))
    return Data(images, file)


def needed_images(args, warm_up):
    """Of one process, so that the loader still has work in the last step."""
    return args.batch_size * (warm_up + args.steps + 2 * cores())


# ---- Runs


def run(args, command, variables=()):
    """What a command prints. Raises UserError if it fails.

    variables: of the environment, where the user has not set them.
    """
    command = [str(word) for word in command]
    env = {**dict(variables), **os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=args.folder, env=env, **pipes, text=True, errors="replace")
    if done.returncode:
        last = " | ".join([line.strip() for line in done.stdout.splitlines() if line.strip()][-3:])
        failed = f"exit code {done.returncode}: {shlex.join(command)[:300]}"
        raise UserError(f"{failed}: {last[-600:]}")
    return done.stdout


def options(args, data, **more):
    """The script's options for one epoch of the data; without data, for --dummy."""
    given = {"image_size": args.image_size, "precision": args.precision}
    if data:
        given |= {"coco_image_path": data.images, "annotation_path": data.file, "weights": "none"}
    if "batch_size" in args:
        given |= {"batch_size": args.batch_size}
    pairs = ({"num_epochs": 1} | given | more).items()
    return [str(word) for name, value in pairs for word in (f"--{name}", value)]


def record(text, kind):
    """A record of rank 0: Run, Summary or Loader. Raises UserError."""
    found = re.findall(rf"^\[\w+ 0\] {kind} (\{{.*\}})$", text, re.MULTILINE)
    if not found:
        raise UserError(f"a run has printed no {kind} record: is it a copy of the demo's script?")
    return json.loads(found[-1])


def launchers_variables():
    """{name: value} of what the launchers set for CPUs, except what the user has set."""
    wanted = run_py.cpu_variables(os.environ)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def training_speed(args, command):
    """Images/s of a run, without its first steps."""
    text = run(args, command, launchers_variables())
    return 1e3 * args.batch_size / record(text, "Summary")["step_ms"]


def loader_speed(args, script, given):
    """Images/s of the loader of a script."""
    variables = launchers_variables() | {"OMP_NUM_THREADS": "1"}
    text = run(args, [*child("loader", script), *given], variables)
    return record(text, "Loader")["img_per_s"]


# ---- In a process that is measured


def child(kind, script=SCRIPT):
    """The command of such a process. The script's options follow."""
    return [sys.executable, __file__, "child", kind, script]


def run_child(kind, script, options):
    """Runs a script with a change.

    loader: it only loads. warm-up N: its Summary leaves out the first N steps.
    """
    sys.path.insert(0, str(Path(script).parent))  # loader workers may import it again
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, script)
    demo = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    sys.argv = [script, *options]
    if kind == "loader":
        time_loader(demo, demo.parse_arguments(options))
        return
    demo.UNMEASURED_STEPS = int(kind.removeprefix("warm-up "))
    demo.run_and_exit(demo.main)


def time_loader(demo, args):
    """Logs images/s of the training loader in this process, without its first batches."""
    images = demo.read_image_list(args.annotation_path)
    process = demo.ProcessInfo()
    loader = demo.make_train_loader(args, process, images)
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in range(WARM_UP):
        next(batches)
    began = time.perf_counter()
    loaded = sum(len(labels) for _, labels, *_ in batches)
    rate = loaded / (time.perf_counter() - began)
    demo.log(process, "Loader " + json.dumps({"img_per_s": rate}))


# ---- Figures


def rounds(args, cases):
    """{name: [images/s of each round]} of {name: function}. The cases take turns."""
    found = {name: [] for name in cases}
    for number in range(args.rounds):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            rate = cases[name]()
            found[name].append(rate)
            text = f"round {number + 1} of {args.rounds}: {name}: {rate:.1f} img/s"
            print(text, file=sys.stderr, flush=True)
    return found


def show(args, found, step_time=False):
    """Prints the medians, and the ratio of each case to those after it."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for name, rate in medians.items():
        step = f", {1e3 * args.batch_size / rate:.1f} ms a step" if step_time else ""
        print(f"{name}: {rate:.1f} img/s{step}")
    for name, other in itertools.combinations(found, 2):
        ratios = [a / b for a, b in zip(found[name], found[other], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} round(s)"
        print(f"img/s, {name} / {other}: {medians[name] / medians[other]:.3f} ({spread})")


def cores():
    """How many cores this process may use; not every system can tell them from the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def gpu_count():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def machine():
    names = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([*names, f"{cores()} cores", f"torch {torch.__version__}"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
