#!/usr/bin/env python3
"""Measures the demo's speed beside something else, in turns on the same machine.

    python tools/benchmark.py step       a whole training step, fed from image files
    python tools/benchmark.py input      the loader alone, on one core
    python tools/benchmark.py gpu        steps of one GPU, and its most expensive kernels
    python tools/benchmark.py job        the job of the talk, from start to end

--data takes COCO's folder, or a packed file of tools/prepare_coco.py. step and input take several,
and --against: a commit of this repository, whose script is measured, too. The cases run in turns,
in every second round in the reverse order: a machine that becomes warm or busy favours none. A
figure is the median of the rounds, a ratio that of two medians; the range behind it is that of the
rounds.

Training is the real script in a process of its own, with the variables that the launchers set.
Its figures are those of its Summary, which leaves out the first three steps. Where there are fewer
images than a run needs, they are repeated: how many there are is printed. gpu trains from files
("fed") and with random images that stay on the GPU ("resident"). Use a machine that does nothing
else.

Exit codes: 0 done, 2 wrong arguments, 1 a failed run.
"""

import argparse
import gzip
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

import run as run_py
from analysis.logs import UserError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "demo_coco_resnet18.py"
WARM_UP = 3  # steps that the script's Summary leaves out
JOB_IMAGES, JOB_EPOCHS, JOB_BATCH = 117_266, 2, 256  # the talk's: labelled images of train2017
SHOWN = ["step_ms", "data_ms", "compute_ms", "exposed_ms", "cpu_ms", "peak_gpu_bytes"]
CASES = {  # of gpu: options of the script beside those for the data
    "bf16, fed": {},
    "bf16, resident": {"dummy": True},
    "bf16, fed, 4 epochs, each with a short last batch": {"num_epochs": 4},
    "bf16, resident, --compile": {"dummy": True, "compile": True},
    "bf16, fed, batch of 64": {"batch_size": 64},
    "bf16, resident, batch of 64": {"batch_size": 64, "dummy": True},
    "fp16, fed": {"precision": "fp16"},
    "fp16, resident": {"precision": "fp16", "dummy": True},
    "fp32, fed": {"precision": "fp32"},
    "fp32, resident": {"precision": "fp32", "dummy": True},
}
MOST_KERNELS = 10


def main(argv=None):
    args = parse_arguments(argv)
    where = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    where += [f"{run_py.usable_cores()} cores", f"torch {torch.__version__}", f"commit {commit()}"]
    where += [f"batch of {args.batch_size}, {args.steps} steps"] if args.command != "job" else []
    print(f"{args.command}: {', '.join(where)}")
    with tempfile.TemporaryDirectory(prefix="demo-benchmark-") as folder:
        args.folder = Path(folder)
        try:
            if not args.data:
                args.data = [ROOT / "data" / "sample_coco"]
                run([sys.executable, ROOT / "tools" / "make_sample_coco.py", *args.data])
            for source in args.data:
                print(f"{source}: {count_labelled(source)} labelled images")
            COMMANDS[args.command](args)
        except (UserError, OSError) as error:
            sys.exit(f"benchmark.py: error: {error}")


# ---- The commands


def measure_scripts(args):
    """step and input: of each script, with each kind of data."""
    scripts = {"this script": SCRIPT}
    if args.against:
        scripts[args.against] = args.folder / SCRIPT.name
        command = ["git", "-C", ROOT, "show", f"{args.against}:{SCRIPT.name}"]
        scripts[args.against].write_text(run(command))
    cases = {}
    for name, script in scripts.items():
        for source in args.data:
            if args.command == "input":
                count = args.batch_size * (WARM_UP + args.steps)
                command, more = child("loader", script), {"workers": 0}
            else:
                # The loader still has work in the last step.
                count = args.batch_size * (WARM_UP + args.steps + 2 * run_py.usable_cores())
                command, more = [sys.executable, script], {"max_steps": WARM_UP + args.steps}
            data = make_data(args, source, count)
            given = options(data, batch_size=args.batch_size, **more)
            cases[f"{name}, {source}" if len(args.data) > 1 else name] = [*command, *given]
    measure(args, cases)


def measure_gpu(args):
    """Steps of one GPU, by its clock, then its kernels."""
    if not torch.cuda.device_count():
        raise UserError("PyTorch finds no NVIDIA GPU here: run gpu where nvidia-smi lists one")
    # A loader has two batches a worker in stock when the training begins.
    warm_up = WARM_UP + 2 * run_py.usable_cores()
    cases = {}
    for name, given in CASES.items():
        more = {"batch_size": args.batch_size, "precision": "bf16"} | given
        epochs, batch = more.get("num_epochs", 1), more["batch_size"]
        count = batch * (warm_up + args.steps + 2 * run_py.usable_cores())
        if epochs > 1:  # the last epoch ends after the last step
            count = batch * -(-(warm_up + args.steps) // epochs) - batch // 2
        data = ["--dummy"] if more.pop("dummy", False) else make_data(args, args.data[0], count)
        data += ["--compile"] if more.pop("compile", False) else []
        given = options(data, max_steps=warm_up + args.steps, **more)
        cases[name] = [*torchrun(1), *child(f"warm-up {warm_up}", SCRIPT)[1:], *given]
    measure(args, cases)
    traces = args.folder / "traces"
    run([*cases["bf16, resident"], f"--profile={traces}"])
    print_kernels(traces / "rank0.json.gz")


def print_kernels(path):
    """The kernels of a trace of --profile that took most of the GPU's time, a line each."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    taken, count = Counter(), Counter()
    for event in events:
        if event.get("cat") == "kernel":
            taken[event["name"]] += event["dur"] / 1e3  # ms
            count[event["name"]] += 1
    whole = sum(taken.values()) or 1
    print(f"the GPU's kernels in the profiled steps: {whole:.1f} ms, of which")
    for name, took in taken.most_common(MOST_KERNELS):
        print(f"{took / whole:6.1%}  {took:8.1f} ms  {count[name]:5} times  {name[:100]}")


def measure_job(args):
    """The job is 2 epochs of 117,266 images, with a global batch of 256."""
    talk = (ROOT / "docs" / "talk" / "infiniband.log").read_text()
    talk_seconds = max(map(float, re.findall(r"Total wall time: .*\((.*)s\)", talk)))
    data = make_data(args, args.data[0], JOB_IMAGES)
    given = options(data, num_epochs=JOB_EPOCHS, global_batch_size=JOB_BATCH)
    began = time.monotonic()
    processes = max(1, torch.cuda.device_count())
    text = run([*torchrun(processes), SCRIPT, *given], processes)
    seconds = time.monotonic() - began
    found = summary(text)
    (wall,) = re.findall(r"^\[\w+ 0\] .*Total wall time: .*\((.*)s\)$", text, re.MULTILINE)
    print(f"{found['steps']} steps, {found['img_per_s']:.0f} img/s in them")
    in_script, training = float(wall), found["train_s"]
    text = f"from start to end {seconds:.1f} s: {seconds - in_script:.1f} before the script, "
    print(text + f"{in_script - training:.1f} its start and end, {training:.1f} training")
    text = f"the talk's four GPUs over InfiniBand took {talk_seconds:.1f} s: "
    print(text + f"{talk_seconds / seconds:.1f} times as long")


def torchrun(processes):
    """The beginning of a command that starts so many processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    return [*command, "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={processes}"]


COMMANDS = {
    "step": measure_scripts,
    "input": measure_scripts,
    "gpu": measure_gpu,
    "job": measure_job,
}


# ---- Arguments


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("command", choices=COMMANDS, help="what to measure: see above")
    text = "COCO's folder or a packed file; unset: the sample set"
    add("--data", type=Path, nargs="+", metavar="PATH", help=text)
    add("--against", metavar="COMMIT", help="step, input: measure also this commit's script")
    add("--rounds", type=int, default=3, metavar="N", help="how often all run (3)")
    steps, batch_size = (
        (10 * run_py.usable_cores(), 256) if torch.cuda.device_count() else (12, 32)
    )
    text = f"measured steps of a run, after a warm-up ({steps})"
    add("--steps", type=int, default=steps, metavar="N", help=text)
    text = f"images per process ({batch_size})"
    add("--batch_size", type=int, default=batch_size, metavar="N", help=text)
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.batch_size) < 1:
        parser.error("--rounds, --steps and --batch_size are at least 1")
    return args


# ---- Data


def files_of(source):
    """The images, and their annotation file."""
    images = source if source.suffix == ".rgb" else source / "train2017"
    return images, images.parent / "annotations" / f"instances_{images.stem}.json"


def count_labelled(source):
    """How many images have a label. Raises UserError if none has, or OSError."""
    path, count = files_of(source)[1], 0
    with suppress(ValueError, LookupError, TypeError):  # a file of another kind
        count = len(find_labelled(json.loads(path.read_bytes()))[1])
    if not count:
        raise UserError(f"{path} has no labelled images: tools/check_coco.py says more")
    return count


def find_labelled(content):
    """{id of an image: its label}, and the images that have one."""
    labels = {}
    for each in content["annotations"]:
        labels.setdefault(each["image_id"], each["category_id"])
    return labels, [image for image in content["images"] if image["id"] in labels]


def make_data(args, source, count):
    """The script's options for exactly so many labelled images, repeated if there are fewer.

    source: COCO's folder, or a packed file in it. Raises OSError.
    """
    images, path = files_of(source)
    content = json.loads(path.read_bytes())
    labels, labelled = find_labelled(content)
    listed, annotations = [], []
    for n, image in zip(range(1, count + 1), itertools.cycle(labelled), strict=False):
        listed.append({"id": n, "file_name": image["file_name"]})
        annotations.append({"id": n, "image_id": n, "category_id": labels[image["id"]]})
    file = args.folder / f"{len(os.listdir(args.folder))}.json"
    file.write_text(json.dumps(content | {"images": listed, "annotations": annotations}))
    return ["--coco_image_path", images, "--annotation_path", file, "--weights", "none"]


# ---- Runs


def run(command, processes=1):
    """What a command that starts so many processes prints. Raises UserError if it fails."""
    command = [str(word) for word in command]
    env = {} if run_py.runs_on_gpus(command) else run_py.cpu_variables(os.environ)
    env["OMP_NUM_THREADS"] = str(max(1, run_py.usable_cores() // processes))
    env |= os.environ  # the user's own win
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=env, **pipes, text=True, errors="replace")
    if done.returncode:
        failed = f"exit code {done.returncode}: {shlex.join(command)}"
        raise UserError(f"{failed}\n{done.stdout[-2000:]}")
    return done.stdout


def commit():
    """Of this repository, with -dirty if files have changed; "unknown" in a copy without one."""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def options(data, **more):
    """The script's options for one epoch; `data` are those for its data."""
    return [*(f"--{name}={value}" for name, value in ({"num_epochs": 1} | more).items()), *data]


def summary(text):
    """The last record of rank 0 in a log."""
    return json.loads(re.findall(r"^\[\w+ 0\] Summary (\{.*\})$", text, re.MULTILINE)[-1])


# ---- In a process that is measured


def child(kind, script):
    """The command of such a process. The script's options follow."""
    return [sys.executable, __file__, "child", kind, script]


def run_child(kind, script, options):
    """Runs a script with a change.

    loader: it only loads. warm-up N: its Summary leaves out the first N steps.
    """
    sys.path.insert(0, str(Path(script).parent))  # its loader workers may import it, too
    import demo_coco_resnet18 as demo

    sys.argv = [script, *options]
    if kind == "loader":
        time_loader(demo, demo.parse_arguments(options))
        return
    demo.UNMEASURED_STEPS = int(kind.removeprefix("warm-up "))
    demo.run_and_exit(demo.main)


def time_loader(demo, args):
    """Logs images/s of the training loader in this process, without its first batches."""
    torch.set_num_threads(1)
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
    demo.log(process, "Summary " + json.dumps({"img_per_s": rate}))


# ---- Figures


def measure(args, cases):
    """Runs {name: command} in turns. Prints the medians, and the ratio of each case to those
    after it.
    """
    found = {name: [] for name in cases}
    for number in range(args.rounds):
        for name in list(cases)[:: -1 if number % 2 else 1]:
            figures = summary(run(cases[name]))
            found[name].append(figures["img_per_s"])
            parts = [f", {part} {figures[part]:,.1f}" for part in SHOWN if figures.get(part)]
            text = f"round {number + 1} of {args.rounds}: {name}: {found[name][-1]:.1f} img/s"
            print(text + "".join(parts), flush=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for name, rate in medians.items():
        print(f"{name}: {rate:.1f} img/s")
    for name, other in itertools.combinations(found, 2):
        ratios = [a / b for a, b in zip(found[name], found[other], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} round(s)"
        print(f"img/s, {name} / {other}: {medians[name] / medians[other]:.3f} ({spread})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        for number in (signal.SIGINT, signal.SIGTERM):  # run() then ends what it has started
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        main()
