#!/usr/bin/env python3
"""Measure the demo against its own ceilings, and against what a user would write instead of it.

    python tools/benchmark.py step [--peer examples/imagenet/main.py]   training speed
    python tools/benchmark.py input                 the loader, and what the step waits for it
    python tools/benchmark.py step --script NEW.py --against OLD.py      two versions in turns
    python tools/benchmark.py start                 launch to first step, on train2017's full size
    python tools/benchmark.py scale                 more processes; more data
    python tools/benchmark.py overhead              what the script's own timers and log cost
    sudo python tools/benchmark.py links [--loss]   gradient compression over shaped links

Each prints one table: what (unit), demo, reference, ratio = demo / reference. All figures are
medians over `--repeats` rounds; a round runs every case once, demo and references side by side,
and every second round in reverse order, so that a machine that warms up or is shared favours none.
`input` runs what is on one core in three times as many rounds, of three times as many steps.

The demo is the real script in processes of its own, and its figures come from its log: a step's
time and its wait for data from the lines of `--log_every 1` after the warm-up, within one epoch
that is longer than what is measured, so that the workers never run dry early. img/s are images
over the sum of these times. Nothing probes. The data are generated (make_sample_coco.py) unless
options name others; they are in the page cache. Where a case needs more than the log:
  resident   main() of the script with one change: its loader gives the first batch for ever
  loader     main() with one change: only the first step trains, all others cost nothing
  peak       the kernel's figure for the largest process of a run (ru_maxrss)
  memory     notes the memory of the loader's workers at the second and the last step
  phases     main() with functions wrapped, which notes the clock and the memory where a phase
             ends; peak memory is the kernel's high-water mark (VmHWM), reset at each note
--script takes another file than the one beside tools/, of this version or of one with the probe in
the script; --against a second one, measured in the same rounds (`the other` in the table).
The recipe is what tutorials write: COCO(file) and weights in every rank, Pillow and the transforms
up to Normalize in the loader, fp32, Adam, DistributedDataParallel; it is part of this file.

Needs Linux and what the demo needs. Exit codes: 0 done; 2 wrong arguments, or a run that failed,
in one line; 128 + signal when stopped. Whatever it started ends with it.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BEGAN = time.monotonic()  # seconds; the same clock in all processes of a machine
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "demo_coco_resnet18.py"
FULL = 118_287  # images of train2017
STEP = re.compile(
    r"\[(?:GPU|CPU|MPS) (\d+)\] Epoch \d+ \| Step \d+ \| Loss: (\S+) \| \S+ img/s "
    r"\| data (\S+) ms \| step (\S+) ms"
)
PEER = re.compile(r"Epoch: \[0\]\[ *\d+/\d+\]\s+Time +(\S+) \(.*?Data +(\S+) ")
FOREIGN = re.compile(  # what a launcher or scheduler around this process says to its own ranks
    "(SLURM|SBATCH|OMPI|PMIX?|TORCHELASTIC|GROUP|ROLE|MASTER|NCCL|GLOO|OMP)_|(LOCAL_)?(RANK|WORLD"
    "_SIZE)$|(NNODES|NODE_RANK|GPUS|GPUS_PER_NODE|RUN_NAME|LOG_DIR|RESTARTS|NETWORK|IFNAME|PROBE)$"
)
PHASES = [
    "launcher",
    "imports",
    "rendezvous",
    "index",
    "check of images",
    "weights and DDP",
    "warm-up pass",
    "workers and first batch",
    "first step",
]
METHODS = {
    "none": ["--grad_compression", "none"],
    "fp16": ["--grad_compression", "fp16"],
    "bf16": ["--grad_compression", "bf16"],
    "powersgd": ["--grad_compression", "powersgd"],
    "accumulate": ["--grad_compression", "none", "--accumulate_steps", "4"],
}


class Failure(Exception):
    """What the user can mend, or a run that failed; its text is the one line that is shown."""


# --- processes that are measured ---


class Bench:
    """Starts processes in `folder` (temporary), marked in their environment, and ends them all."""

    def __init__(self, args, folder):
        self.args, self.folder = args, Path(folder)
        self.tag = f"DEMO_BENCHMARK={os.getpid()}-{time.time_ns()}"
        bins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.env = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)} | {
            "PATH": bins,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LOG_DIR": str(self.folder / "logs"),
            "PROBE": "0",
            **dict([self.tag.split("=")]),
        }
        if sys.prefix != sys.base_prefix:
            self.env["VIRTUAL_ENV"] = sys.prefix

        own = vars(args)
        self.files = {"demo": own.get("script", SCRIPT), "other": own.get("against")}
        self.peak = None  # MB, of the largest process of the last command

    @functools.cache  # noqa: B019 (there is one Bench in a process)
    def options(self, name="demo"):
        """What a script says of its options."""
        return self.run([sys.executable, self.files[name], "--help"])[0]

    def run(self, command, until=None, **env):
        """(output, moment of the start) of a command; it is ended after `until`: (regex, lines).

        Raises Failure on an exit code other than 0, and after --limit seconds.
        """
        began, lines, seen, code = time.monotonic(), [], 0, None
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=self.env | env,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timer = threading.Timer(self.args.limit, self.stop, [process])
        timer.start()
        try:
            for line in process.stdout:
                lines.append(line)
                seen += bool(until and until[0].search(line))
                if until and seen == until[1]:
                    return "".join(lines), began
            _, status, used = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(status)
            self.peak = used.ru_maxrss * 1024 / 1e6
        finally:
            timer.cancel()
            self.stop(process)
            process.stdout.close()
        if code or until:
            errors = [t for t in lines if re.search(r"(?i)error: \S", t)] or lines[-1:] or ["?"]
            late = f" (over --limit {self.args.limit} s)" * (
                time.monotonic() - began > self.args.limit
            )
            raise Failure(
                f"{Path(command[1]).name} ended with {code}{late}: "
                + " ".join(errors[0].split())[:300]
            )
        return "".join(lines), began

    def stop(self, process):
        """Ends a command in good order, then what is left of it, wherever it has moved."""
        if process.poll() is None:
            process.terminate()  # two_nodes.sh takes its namespaces down
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        self.sweep()
        process.wait()
        for space in Path("/run/netns").glob(f"two_nodes{process.pid}-[01]"):
            subprocess.run(["ip", "netns", "delete", space.name], check=False)

    def sweep(self):
        """Kills whatever was started here and is still alive."""
        found = True
        while found:
            found = False
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                    if self.tag.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)
                        found = True
            time.sleep(0.02 * found)

    def script(self, how, arguments, processes=1, **env):
        """run() of a script, of one with changes ("demo+loader"), or of the recipe."""
        command = [sys.executable]
        if processes > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={processes}",
            ]
        name = how.split("+")[0]
        file = self.files.get(name, SCRIPT)
        own = [file] if how == name in self.files else [Path(__file__).resolve(), "_child", how]
        command += [*own, *arguments, *self.quiet("--log_every", 1, name=name)]
        return self.run(command, BENCHMARK_SCRIPT=str(file), **env)

    def quiet(self, *rest, name="demo"):
        """Options for every run: no probe where the script itself has one, and `rest`."""
        probes = name in self.files and "--probe_steps" in self.options(name)
        return [*(["--probe_steps", "0"] if probes else []), *map(str, rest)]


def rounds(bench, cases, times=1):
    """{case: {figure: [value of each round]}} of {case: function that gives {figure: value}}.

    There are `times` as many rounds as --repeats says.
    """
    found, count = {name: {} for name in cases}, times * bench.args.repeats
    for turn in range(count):
        for name in list(cases)[:: 1 - 2 * (turn % 2)]:
            begin, figures = time.monotonic(), cases[name]()
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
            shown = ", ".join(f"{k} {v:.4g}" for k, v in list(figures.items())[:4])
            print(
                f"round {turn + 1} of {count}: {name}: {shown} [{time.monotonic() - begin:.0f} s]",
                file=sys.stderr,
                flush=True,
            )
    return found


def row(what, unit, demo, reference=None):
    """One line of the table, from the values of all rounds, in `unit`."""
    a, b = (statistics.median(v) if v else None for v in (demo, reference))
    return {
        "what": what,
        "unit": unit,
        "demo": a,
        "reference": b,
        "ratio": a / b if a is not None and b else None,
        "demo_all": demo,
        "reference_all": reference,
    }


def step_times(text, skip, count, rank="0"):
    """[(loss, ms waited for data, ms in all)] of a rank's steps after the first `skip`."""
    found = [tuple(map(float, m[1:])) for m in STEP.findall(text) if m[0] == rank][skip:]
    if len(found) < count:
        raise Failure(
            f"{len(found)} steps after the warm-up, not {count}: give more images, a "
            "smaller --batch_size or fewer --steps"
        )
    return found


def speed(text, batch, skip, count):
    """Figures of rank 0 over the steps after the first `skip`; `batch` images in each."""
    found = step_times(text, skip, count)
    total = sum(step for _, _, step in found)
    return {
        "img_per_s": 1e3 * batch * len(found) / total,
        "step_ms": statistics.median(step for _, _, step in found),
        "waiting": 100 * sum(data for _, data, _ in found) / total,
    }


def notes(text, began):
    """{rank: {phase: (seconds, peak MB)}} and the notes on loader workers, from a run's output."""
    ranks, workers, last = {}, [], {}
    for line in re.findall(r"^NOTE (\{.*\})$", text, re.M):
        note = json.loads(line)
        if "uss" in note:
            workers.append(note)
            continue
        rank = note["rank"]
        ranks.setdefault(rank, {})[note["phase"]] = (
            note["at"] - last.get(rank, began),
            note["peak"],
        )
        last[rank] = note["at"]
    return ranks, workers


# --- data ---


def make_sample(bench, images, *options):
    """Folder of a generated data set; it stays, and is found again, in --data_folder."""
    base = bench.args.data_folder or bench.folder
    folder = base / "-".join(["sample", str(images), *(o.strip("-") for o in options)])
    print(f"data: {images} images in {folder}", file=sys.stderr, flush=True)
    bench.run(
        [
            sys.executable,
            ROOT / "tools" / "make_sample_coco.py",
            folder,
            "--images",
            images,
            "--val_images",
            0,
            *options,
        ]
    )
    return folder


def data_options(folder, images="train2017"):
    return [
        "--coco_image_path",
        folder / images,
        "--annotation_path",
        folder / "annotations" / "instances_train2017.json",
    ]


def chosen_data(bench, images):
    """Options that name the user's data, or a generated set of so many usable images."""
    args = bench.args
    if args.coco_image_path:
        return [
            "--coco_image_path",
            args.coco_image_path,
            "--annotation_path",
            args.annotation_path,
        ]
    return data_options(make_sample(bench, args.images or math.ceil(1.03 * images) + 4))


def needed(args, workers, processes=1):
    """Images that keep all workers busy until the last measured step has ended."""
    return processes * args.batch_size * (args.warm_steps + args.steps + 2 * workers + 1)


def list_again(bench, folder, name, files):
    """Options for a generated set without pictures: its names link to `files`, again and again.

    The names are read from the file's head, without parsing hundreds of MB of annotations.
    """
    head, out = "", bench.folder / f"{name}-{folder.name}"
    with open(folder / "annotations" / "instances_train2017.json", encoding="ascii") as file:
        while '"annotations": [' not in head and (part := file.read(2**22)):
            head += part
    out.mkdir()
    for link, target in zip(re.findall(r'"file_name": "([^"]+)"', head), itertools.cycle(files)):
        os.symlink(target, out / link)
    return data_options(folder, out)


def common(args, *more, workers=None, steps=None):
    """The script's options for a run that stops in its first epoch, after the measured steps."""
    return [
        *map(
            str,
            [
                "--weights",
                "none",
                "--num_epochs",
                1,
                "--image_size",
                args.image_size,
                "--batch_size",
                args.batch_size,
                "--max_steps",
                steps or args.warm_steps + args.steps,
                "--workers",
                args.workers if workers is None else workers,
                *more,
            ],
        )
    ]


# --- subcommands ---


def measure_step(bench):
    """Rows: training from JPEG files against a resident batch, the recipe, and the peer."""
    args = bench.args
    data = chosen_data(bench, needed(args, args.workers))

    def case(how, precision="fp32", workers=None):
        options = [*data, *common(args, "--precision", precision, workers=workers)]

        def run():
            text, _ = bench.script(how, options)
            found = speed(text, args.batch_size, args.warm_steps, args.steps)
            return found | {"peak": bench.peak}

        return run

    if args.against:  # the two versions alone: a round of it all takes minutes
        return two_versions(bench, case)
    cases = {
        "files": case("demo", "auto"),
        "files fp32": case("demo"),
        "resident": case("demo+resident", "auto", 0),
        "resident fp32": case("demo+resident", "fp32", 0),
        "recipe": case("recipe"),
        "recipe, no workers": case("recipe", workers=0),
    }
    if args.peer:
        cases["peer"] = peer_case(bench, data[1])
    measured = rounds(bench, cases)
    found = {name: figures["img_per_s"] for name, figures in measured.items()}
    rows = [
        row("as shipped, JPEG files / resident batch", "img/s", found["files"], found["resident"]),
        row(
            "fp32, JPEG files / resident batch",
            "img/s",
            found["files fp32"],
            found["resident fp32"],
        ),
        row("fp32 / recipe, same workers", "img/s", found["files fp32"], found["recipe"]),
        row("as shipped / recipe, same workers", "img/s", found["files"], found["recipe"]),
        row(
            "as shipped / recipe, default loader (no workers)",
            "img/s",
            found["files"],
            found["recipe, no workers"],
        ),
    ]
    for name in ("files fp32", "files") if args.peer else ():
        what = "fp32" if name != "files" else "as shipped"
        rows.append(
            row(
                f"{what} / {args.peer.parent.name}/{args.peer.name}",
                "img/s",
                found[name],
                found["peer"],
            )
        )
    return rows


def two_versions(bench, case):
    """Rows: speed and peak memory of --script against --against, in the same rounds."""
    kinds = {"as shipped": "auto", "fp32": "fp32"}
    cases = {
        f"{which} {kind}": case(which, precision)
        for kind, precision in kinds.items()
        for which in ("demo", "other")
    }
    measured, rows = rounds(bench, cases), []
    for kind in kinds:
        mine, other = measured[f"demo {kind}"], measured[f"other {kind}"]
        rows.append(row(f"{kind} / the other", "img/s", mine["img_per_s"], other["img_per_s"]))
        rows.append(row(f"{kind}: peak / the other's", "MB", mine["peak"], other["peak"]))
    return rows


def peer_case(bench, images):
    """pytorch/examples' imagenet script on the same pictures, timed by the meters it prints."""
    args, folder = bench.args, bench.folder / "peer"
    names = sorted(entry.name for entry in os.scandir(images))[: needed(args, args.workers) + 4]
    for split, part in (("train", names), ("val", names[:1])):
        (folder / split / "any").mkdir(parents=True)
        for name in part:
            os.symlink(Path(images, name).resolve(), folder / split / "any" / name)
    command = [
        sys.executable,
        args.peer,
        "-a",
        "resnet18",
        "-b",
        args.batch_size,
        "-j",
        args.workers,
        "--epochs",
        1,
        "-p",
        1,
        folder,
    ]

    def run():
        text, _ = bench.run(command, until=(PEER, args.warm_steps + args.steps))
        found = [float(whole) for whole, _ in PEER.findall(text)][args.warm_steps :]
        return {"img_per_s": args.batch_size * len(found) / sum(found)}

    return run


def measure_input(bench):
    """Rows: the loader on one core, and the step's wait for data by number of workers."""
    args = bench.args
    # the first step trains, then two batches lie ready, and the first few hundred images of a
    # worker are slower than all that follow
    skip = max(args.warm_steps, 16)
    # what trains nothing is over in a second: more of it, lest that second's luck decides
    steps, times = 3 * args.steps, 3
    data = chosen_data(
        bench, max(needed(args, max(args.worker_counts)), args.batch_size * (skip + steps + 3))
    )

    def alone(how):
        options = [*data, *common(args, workers=1, steps=skip + steps)]
        return lambda: speed(
            bench.script(f"{how}+loader+core", options)[0], args.batch_size, skip, steps
        )

    def decode():
        text, _ = bench.script("decode+core", [*data, "--images", steps * args.batch_size])
        return json.loads(text.splitlines()[-1])

    def training(how, workers):
        options = [*data, *common(args, workers=workers)]
        return lambda: speed(
            bench.script(how, options)[0], args.batch_size, args.warm_steps, args.steps
        )

    cases = {"loader": alone("demo"), "decode": decode, "recipe": alone("recipe")}
    if args.against:
        cases["other"] = alone("other")
    found = rounds(bench, cases, times)
    cases = {"resident": training("demo+resident", 0)}
    cases |= {f"{n} workers": training("demo", n) for n in args.worker_counts}
    if args.against:
        cases |= {f"other, {n} workers": training("other", n) for n in args.worker_counts}
    found |= rounds(bench, cases)
    images = {name: figures["img_per_s"] for name, figures in found.items()}
    rows = [
        row(
            "loader, 1 worker on 1 core / bare decode on 1 core",
            "img/s",
            images["loader"],
            images["decode"],
        ),
        row(
            "loader, 1 worker on 1 core / the recipe's",
            "img/s",
            images["loader"],
            images["recipe"],
        ),
    ]
    for n in args.worker_counts:
        rows += [
            row(f"step waits for data, workers {n}", "%", found[f"{n} workers"]["waiting"]),
            row(
                f"training, workers {n} / resident batch",
                "img/s",
                images[f"{n} workers"],
                images["resident"],
            ),
        ]
    if args.against:
        what = "loader, 1 worker on 1 core / the other's"
        rows.append(row(what, "img/s", images["loader"], images["other"]))
        for n in args.worker_counts:
            mine, other = found[f"{n} workers"], found[f"other, {n} workers"]
            what = f"training, workers {n} / the other"
            rows.append(row(what, "img/s", mine["img_per_s"], other["img_per_s"]))
            what = f"step waits for data, workers {n} / the other's"
            rows.append(row(what, "%", mine["waiting"], other["waiting"]))
    return rows


def measure_start(bench):
    """Rows: seconds and peak memory by phase against the recipe, and loader workers."""
    args, weights = bench.args, bench.folder / "weights.pt"
    # the tiny set, too, has whole batches for both ranks
    pictures = make_sample(bench, max(48, 6 * args.batch_size)) / "train2017"
    full = make_sample(bench, args.images, "--annotations_only")
    bench.script("weights", [weights])
    begin = common(args, "--weights", weights, steps=2)
    data = {
        "full": list_again(bench, full, "pictures", sorted(pictures.iterdir())),
        "tiny": data_options(pictures.parent),
        "epoch": list_again(bench, full, "small", small_pictures(bench.folder / "small")),
    }
    epoch = [
        *data["epoch"],
        "--image_size",
        "33",
        "--workers",
        "1",
        "--weights",
        "none",
        "--num_epochs",
        "1",
        "--batch_size",
        str(args.batch_size),
    ]

    def phases(how, size):
        ranks, _ = notes(*bench.script(how, [*data[size], *begin], processes=2))
        found = {}
        for rank in (0, 1):
            for phase, (seconds, peak) in ranks[rank].items():
                if phase in PHASES:
                    found |= {
                        f"rank {rank}: {phase}, s": seconds,
                        f"rank {rank}: {phase}, MB": peak,
                    }
            shares = [ranks[rank][phase] for phase in PHASES if phase in ranks[rank]]
            found[f"rank {rank}: launch to first step, s"] = sum(s for s, _ in shares)
            found[f"rank {rank}: launch to first step, MB"] = max(peak for _, peak in shares)
        return found

    def workers(how):
        _, found = notes(*bench.script(f"{how}+loader+memory", epoch))
        return {
            f"{kind} {when}": found[at][kind]
            for at, when in ((0, "first"), (-1, "last"))
            for kind in ("uss", "pss")
        }

    found = rounds(
        bench,
        {
            "demo": lambda: phases("demo+phases", "full"),
            "recipe": lambda: phases("recipe", "full"),
            "tiny": lambda: phases("demo+phases", "tiny"),
            "demo's workers": lambda: workers("demo"),
            "recipe's workers": lambda: workers("recipe"),
        },
    )
    return start_rows(found)


def start_rows(found):
    rows = []
    for unit, rank in itertools.product(("s", "MB"), (0, 1)):
        # the phases of the others are those of rank 0, or waiting for it
        for phase in [*(PHASES if (unit, rank) == ("s", 0) else []), "launch to first step"]:
            name = f"rank {rank}: {phase}, {unit}"
            if name in found["demo"]:
                rows.append(
                    row(
                        f"{name[: -len(unit) - 2]}{', peak' * (unit == 'MB')} / recipe",
                        unit,
                        found["demo"][name],
                        found["recipe"].get(name),
                    )
                )
    name = "rank 1: launch to first step, MB"
    rows.append(
        row("rank 1: peak, full size / tiny set", "MB", found["demo"][name], found["tiny"][name])
    )
    mine, other = found["demo's workers"], found["recipe's workers"]
    for kind in ("uss", "pss"):
        rows += [
            row(
                f"loader worker: {kind.upper()}, last / first step of an epoch",
                "MB",
                mine[f"{kind} last"],
                mine[f"{kind} first"],
            ),
            row(
                f"loader worker: {kind.upper()} at the last step / recipe's",
                "MB",
                mine[f"{kind} last"],
                other[f"{kind} last"],
            ),
        ]
    return rows


def small_pictures(folder, count=16):
    """Pictures that decode in no time: an epoch over the full size in a minute or two."""
    from PIL import Image

    folder.mkdir()
    for n in range(count):
        Image.effect_noise((64, 48), 16 + n).convert("RGB").save(folder / f"{n}.jpg")
    return sorted(folder.iterdir())


def measure_scale(bench):
    """Rows: step time, memory and start-up by processes, and by the size of the data set."""
    args, cases = bench.args, {}
    pictures = sorted((make_sample(bench, 48) / "train2017").iterdir())
    sizes = {
        n: list_again(
            bench, make_sample(bench, n * args.images, "--annotations_only"), "x", pictures
        )
        for n in args.sizes
    }

    def case(processes, size):
        def run():
            text, began = bench.script(
                "demo+phases",
                [*sizes[size], *common(args)],
                processes,
                OMP_NUM_THREADS=str(args.threads),
            )
            found, (ranks, _) = (
                speed(text, args.batch_size, args.warm_steps, args.steps),
                notes(text, began),
            )
            peaks = [max(peak for _, peak in ranks[rank].values()) for rank in sorted(ranks)]
            starts = [
                sum(s for phase, (s, _) in ranks[rank].items() if phase in PHASES)
                for rank in ranks
            ]
            return {
                "step, ms": found["step_ms"],
                "start to first step, s": max(starts),
                "peak of rank 0, MB": peaks[0],
                "peak of the others, MB": max(peaks[1:] or [0]),
            }

        return run

    def one(n):
        return f"{n} process" + "es" * (n > 1)

    least = min(args.sizes)
    cases |= {one(n): case(n, least) for n in args.processes}
    cases |= {f"data {n}x": case(2, n) for n in args.sizes}
    found, rows = rounds(bench, cases), []
    for group in ([*map(one, args.processes)], [f"data {n}x" for n in args.sizes]):
        for name, figure in itertools.product(group[1:], found[group[0]]):
            reference = found[group[0]][figure]
            what, unit = figure.split(", ")
            rows.append(
                row(
                    f"{name} / {group[0].split()[-1] if 'data' in name else group[0]}: {what}",
                    unit,
                    found[name][figure],
                    reference if any(reference) else None,
                )
            )
    return rows


def measure_links(bench):
    """Rows: a step under each compression against none, at each rate; or losses with --loss."""
    args = bench.args
    if "--grad_compression" not in bench.options():
        raise Failure(f"{SCRIPT.name} has no --grad_compression: nothing to compare")
    if args.loss:
        return measure_loss(bench)
    if os.geteuid():
        raise Failure("links needs root for its network namespaces: start it with sudo")
    data, cases = chosen_data(bench, 620), {}
    number = itertools.count()

    def case(rate, method):
        parts = 4 if method == "accumulate" else 1
        options = [*data, *common(args, *METHODS[method]), "--num_epochs", "1000"]
        shape = ["--rate", rate] if rate != "unshaped" else []

        def run():
            name = f"run{next(number)}"
            bench.run(
                [
                    "bash",
                    ROOT / "tools" / "two_nodes.sh",
                    *shape,
                    "--name",
                    name,
                    "--",
                    *options,
                    *bench.quiet("--log_every", 1),
                ],
                OMP_NUM_THREADS="1",
            )
            text = (bench.folder / "logs" / name / "node0.log").read_text(errors="replace")
            step = speed(text, args.batch_size, args.warm_steps, args.steps)["step_ms"]
            summary = json.loads(re.search(r"Summary (\{.*\})", text)[1])
            return {"ms": step / parts, "MB": summary["wire_bytes_per_step"] / parts / 1e6}

        return run

    for rate, method in itertools.product(args.rates, args.methods):
        cases[f"{rate}, {method}"] = case(rate, method)
    found, rows, first = rounds(bench, cases), [], args.rates[0]
    for rate, method in itertools.product(args.rates, args.methods):
        mine, what = found[f"{rate}, {method}"], f"{rate}, {method}: "
        per = "step" if method != "accumulate" else "step / 4"
        rows.append(
            row(f"{what}{per} / none, {rate}", "ms", mine["ms"], found[f"{rate}, none"]["ms"])
        )
        if rate != first:
            rows.append(
                row(
                    f"{what}{per} / none, {first}", "ms", mine["ms"], found[f"{first}, none"]["ms"]
                )
            )
        rows.append(
            row(f"{what}bytes of a {per} / none", "MB", mine["MB"], found[f"{rate}, none"]["MB"])
        )
    return rows


def measure_loss(bench):
    """Rows: the loss with each compression against none's, by seed and over all seeds.

    A run's loss is the mean over both ranks and the last quarter of its steps: single steps
    scatter by their batch, and all runs of a seed see the same images in the same order. With
    accumulation they see as many in a quarter of the steps.
    """
    args, found = bench.args, {}
    data = chosen_data(bench, 460)
    for method, seed in itertools.product(args.methods, range(args.seeds)):
        steps = args.loss_steps // (4 if method == "accumulate" else 1)
        options = [*data, *common(args, *METHODS[method], "--seed", seed, steps=steps)]
        text, _ = bench.script("demo", [*options, "--num_epochs", "1000"], 2, OMP_NUM_THREADS="1")
        skip = steps - math.ceil(steps / 4)
        losses = [loss for rank in "01" for loss, _, _ in step_times(text, skip, 1, rank)]
        found.setdefault(method, []).append(statistics.mean(losses))
        print(f"{method}, seed {seed}: loss {found[method][-1]:.4f}", file=sys.stderr)
    rows = []
    for method in args.methods[1:]:
        rows += [
            row(f"seed {seed}: loss, {method} / none", "nats", [loss], [found["none"][seed]])
            for seed, loss in enumerate(found[method])
        ]
        rows.append(
            row(
                f"mean loss, {method} / none",
                "nats",
                *([statistics.mean(found[name])] for name in (method, "none")),
            )
        )
    return rows


def measure_overhead(bench):
    """Rows: a step with the script's timers and a log line against one without, two ranks.

    Both kinds take turns within one run, so that what else the machine does meets both alike.
    """
    args = bench.args
    options = [*chosen_data(bench, 460), *common(args, "--num_epochs", 1000)]

    def run():
        text, _ = bench.script("demo+overhead", options, 2, OMP_NUM_THREADS="1")
        return json.loads(re.search(r"^OVERHEAD (.*)$", text, re.M)[1])

    found = rounds(bench, {"in turns": run})["in turns"]
    return [row("step with timers and log line / without", "ms", found["with"], found["without"])]


# --- what runs in a process of its own ---


class Notes:
    """Writes, at the end of each phase of this rank, the clock and the phase's peak memory."""

    def __init__(self):
        self.rank, self.seen = int(os.environ.get("RANK", 0)), set()
        self("launcher", BEGAN)

    def __call__(self, phase, at=None):
        if phase in self.seen:
            return
        self.seen.add(phase)
        peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        self.write(
            rank=self.rank, phase=phase, at=at or time.monotonic(), peak=int(peak[1]) * 1024 / 1e6
        )
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew

    def workers(self, step):
        """Notes the mean over the loader workers of what is their own (USS), and of their PSS."""
        total = {}
        for worker in (workers := multiprocessing.active_children()):
            for name, kb in re.findall(
                r"^(Pss|Private_Clean|Private_Dirty):\s+(\d+)",
                Path(f"/proc/{worker.pid}/smaps_rollup").read_text(),
                re.M,
            ):
                kind = "pss" if name == "Pss" else "uss"
                total[kind] = total.get(kind, 0) + int(kb) * 1024 / 1e6 / len(workers)
        self.write(rank=self.rank, step=step, **total)

    def write(self, **fields):
        os.write(1, f"NOTE {json.dumps(fields)}\n".encode())

    def around(self, module, name, before=None, after=None):
        """Has module.name, if there is one, note that a phase ended before or after it."""
        if inner := getattr(module, name, None):

            @functools.wraps(inner)
            def outer(*args, **kwargs):
                if before:
                    self(before)
                result = inner(*args, **kwargs)
                if after:
                    self(after)
                return result

            setattr(module, name, outer)


class Resident:
    """Stands for a loader, and gives its first batch for ever, the images on `device`."""

    def __init__(self, loader, device):
        self.sampler, self.dataset = loader.sampler, loader.dataset
        loader.sampler.set_epoch(1)
        images, *rest = next(iter(loader))
        self.batch = (images.to(device), *rest)

    def __iter__(self):
        return itertools.repeat(self.batch)


def load_script():
    """The module of the script that $BENCHMARK_SCRIPT names, by default the one beside tools/."""
    file = Path(os.environ.get("BENCHMARK_SCRIPT", SCRIPT))
    spec = importlib.util.spec_from_file_location("demo", file)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    sys.argv[0] = str(file)
    spec.loader.exec_module(demo)
    return demo


def names_of(demo):
    """(name of the function that makes a step, that of what makes DDP's first pass, main).

    Version b40073c, which had the probe in the script, called them otherwise.
    """
    if hasattr(demo, "optimizer_step"):
        return "optimizer_step", "probe", demo.main
    return "train_step", "fix_bucket_order", lambda: demo.one_line_errors(demo.main)


def child_demo(modes, argv, note):
    """main() of the real script, with the changes that `modes` name."""
    sys.argv[1:] = argv
    demo = load_script()
    step_name, first_pass, main = names_of(demo)
    note("imports")
    if "phases" in modes:
        note.around(demo, "set_up", after="rendezvous")
        note.around(demo, "check_images", before="index")
        note.around(demo, "build_model", before="check of images", after="weights and DDP")
        note.around(demo, first_pass, after="warm-up pass")
        note.around(demo, step_name, before="workers and first batch", after="first step")
        note.around(demo, "summarize", before="training")
    if "resident" in modes:
        make = demo.make_loaders
        demo.make_loaders = lambda args, process, *rest: (
            Resident(make(args, process, *rest)[0], process.device),
            None,
        )
    if "loader" in modes:
        train_once(demo, step_name, note if "memory" in modes else None)
    if "overhead" in modes:
        alternate(demo)
    main()


def train_once(demo, step_name, note):
    """Has only the first step train, all others cost nothing; `note`: notes workers' memory."""
    step, done = getattr(demo, step_name), []

    def once(run, micro_batches):
        if note and run.step in (1, run.args.max_steps - 1):
            note.workers(run.step)
        if not done:
            done.append(step(run, micro_batches))
        elif step_name == "train_step":  # the step's own moments, which its timer counts on
            run.timer.mark()
            run.timer.mark()
        return done[0]

    setattr(demo, step_name, once)


def alternate(demo):
    """Has every second step run without timers and log line; rank 0 prints the medians of both.

    Where a step ends is noted in both, as the script goes by it to let the ranks talk.
    """
    step, log, mark, end_step = (
        demo.train_step,
        demo.log,
        demo.StepTimer.mark,
        demo.StepTimer.end_step,
    )
    last, times, quiet = [None], {"with": [], "without": []}, [False]

    def mark_or_not(timer, *_):
        if quiet[0] and timer.marks:
            timer.marks.append(timer.marks[-1])
        else:
            mark(timer)

    def end(timer, images):
        kind, quiet[0] = quiet[0], False
        end_step(timer, images)
        quiet[0] = kind

    def turn(run, micro_batches):
        now = time.perf_counter()
        kind = "without" if last[0] and last[0][0] == "with" else "with"
        if last[0] and run.step > run.args.max_steps // 10:  # after the warm-up
            times[last[0][0]].append(1e3 * (now - last[0][1]))
        last[0], quiet[0] = (kind, now), kind == "without"
        demo.log = (lambda *_, **__: None) if quiet[0] else log
        if run.step == run.args.max_steps - 1:
            demo.log = log
            if run.process.rank == 0:
                found = {kind: statistics.median(values) for kind, values in times.items()}
                os.write(1, f"OVERHEAD {json.dumps(found)}\n".encode())
        return step(run, micro_batches)

    demo.train_step, demo.StepTimer.mark, demo.StepTimer.end_step = turn, mark_or_not, end


class RecipeImages:
    """COCO's images as tutorials read them: (tensor of floats, label of the first annotation)."""

    def __init__(self, folder, file, size):
        from PIL import Image
        from pycocotools.coco import COCO
        from torchvision import transforms

        self.folder, self.coco, self.open = folder, COCO(file), Image.open
        self.ids = [n for n in self.coco.imgs if self.coco.getAnnIds(n)]
        self.labels = {category: k for k, category in enumerate(sorted(self.coco.cats))}
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(size),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, n):
        image_id = self.ids[n]
        name = self.coco.loadImgs(image_id)[0]["file_name"]
        image = self.open(os.path.join(self.folder, name)).convert("RGB")
        label = self.coco.loadAnns(self.coco.getAnnIds(image_id))[0]["category_id"]
        return self.transform(image), self.labels[label]


def recipe_model(given, torch, device):
    """(DDP model, its optimizer), with the weights of a file read by every rank."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=80)
    if given.weights != "none":
        model.load_state_dict(torch.load(given.weights))
    model = torch.nn.parallel.DistributedDataParallel(model.to(device))
    return model, torch.optim.Adam(model.parameters())


def child_recipe(modes, argv, note):
    """The recipe's training, for the script's options; its step lines have the script's form."""
    parser = argparse.ArgumentParser()
    for name in ("coco_image_path", "annotation_path", "weights"):
        parser.add_argument(f"--{name}")
    for name in ("image_size", "batch_size", "workers", "max_steps"):
        parser.add_argument(f"--{name}", type=int)
    given, _ = parser.parse_known_args(argv)
    import torch
    import torch.distributed as dist
    import torchvision  # noqa: F401 (its time belongs to the imports)
    from pycocotools.coco import COCO  # noqa: F401
    from torch.utils.data import DataLoader, DistributedSampler

    note("imports")
    gpu, alone = torch.cuda.is_available(), "RANK" not in os.environ
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else "cpu"
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        **({"rank": 0, "world_size": 1, "store": dist.HashStore()} if alone else {}),
    )
    note("rendezvous")
    dataset = RecipeImages(given.coco_image_path, given.annotation_path, given.image_size)
    note("index")
    model, optimizer = recipe_model(given, torch, device)
    note("weights and DDP")
    loader = DataLoader(
        dataset, given.batch_size, num_workers=given.workers, sampler=DistributedSampler(dataset)
    )
    last, end = given.max_steps or len(loader), time.perf_counter()
    for step, (images, labels) in enumerate(loader, 1):
        note("workers and first batch")
        start, end = end, time.perf_counter()
        waited = end - start
        if "memory" in modes and step in (2, last):
            note.workers(step - 1)
        if "loader" not in modes or step == 1:
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()  # waits for a GPU
        note("first step")
        whole = (end := time.perf_counter()) - start
        os.write(
            1,
            f"[CPU {note.rank}] Epoch 1 | Step {step} | Loss: {value:.4f} | "
            f"{len(labels) / whole:.1f} img/s | data {1e3 * waited:.3f} ms | "
            f"step {1e3 * whole:.3f} ms\n".encode(),
        )
        if step == last:
            break
    note("training")
    dist.destroy_process_group()


def child_decode(_, argv, __):
    """img/s of torchvision's decoder alone, in one thread, over pictures in the page cache."""
    import torch
    from torchvision.io import ImageReadMode, decode_image

    parser = argparse.ArgumentParser()
    parser.add_argument("--coco_image_path", type=Path)
    parser.add_argument("--images", type=int)
    given, _ = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    files = sorted(str(p) for p in given.coco_image_path.iterdir() if p.suffix == ".jpg")
    files = files[:: max(1, len(files) // given.images)][: given.images]
    for file in files[:8]:
        decode_image(file, ImageReadMode.RGB)
    for file in files:
        Path(file).read_bytes()
    begin = time.perf_counter()
    for file in files:
        decode_image(file, ImageReadMode.RGB)
    print(json.dumps({"img_per_s": len(files) / (time.perf_counter() - begin)}))


def child_weights(_, argv, __):
    """Writes a state dict of the demo's model, with random values, to a file."""
    import torch
    from torchvision.models import resnet18

    torch.save(resnet18(num_classes=80).state_dict(), argv[0])


def child(how, argv):
    """What `Bench.script` starts: name+mode+mode of one of the functions above."""
    name, *modes = how.split("+")
    if "core" in modes:  # with its workers, which inherit it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kinds = {"demo": child_demo, "other": child_demo, "recipe": child_recipe}
    kinds |= {"decode": child_decode, "weights": child_weights}
    kinds[name](modes, argv, Notes())


# --- arguments and output ---


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, where argparse would print the usage too."""
        self.exit(2, f"benchmark.py: error: {message} (--help lists the options)\n")


def whole(least):
    """A type for argparse: a whole number, at least so much."""

    def number(text):
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def listed(kind):
    """A type for argparse: several of a kind, with commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def path(text):
    return Path(text).resolve()


def add_common(add, name):
    small = name in ("scale", "links", "overhead")
    add("--repeats", type=whole(1), default=5, help="rounds; fewer than 5 are a trial")
    add("--json", metavar="FILE", help="write the table as JSON, too; -: to stdout")
    add(
        "--steps",
        type=whole(1),
        default={"overhead": 200, "scale": 10}.get(name, 12),
        help="measured steps of a run",
    )
    add(
        "--warm_steps",
        type=whole(1),
        default=6 if name == "links" else 3,
        help="steps before them; with links PowerSGD has to have started by then",
    )
    add(
        "--batch_size",
        type=whole(1),
        default={"scale": 8}.get(name, 16 if small else 32),
        help="images per process and step",
    )
    add("--image_size", type=whole(33), default=64 if small else 224, help="pixels a side")
    add("--workers", type=whole(0), default=1, help="loader workers per process")
    add("--limit", type=whole(1), default=1800, help="seconds after which a run has failed")
    add(
        "--data_folder",
        type=path,
        metavar="DIR",
        help="keeps generated data sets for the next time; unset: a temporary folder",
    )
    default = {"start": FULL, "scale": FULL // 100}.get(name)
    add(
        "--images",
        type=whole(48),
        default=default,
        help="size of the generated data set; unset: what the steps need",
    )
    if name in ("step", "input", "start", "scale"):
        add("--script", type=path, metavar="FILE", default=SCRIPT, help="the script to measure")
    if name in ("step", "input"):
        add("--against", type=path, metavar="FILE", help="another version of it, in turns")
    if name in ("step", "input", "links", "overhead"):
        add("--coco_image_path", type=path, metavar="DIR", help="pictures to use instead")
        add("--annotation_path", type=path, metavar="FILE", help="their instances file")


def parse_arguments(argv):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in MEASURE.items():
        sub = commands.add_parser(
            name,
            help=function.__doc__.split("\n")[0],
            formatter_class=formatter,
            allow_abbrev=False,
        )
        add = sub.add_argument
        add_common(add, name)
        if name == "step":
            add("--peer", type=path, metavar="FILE", help="imagenet/main.py of pytorch/examples")
        elif name == "input":
            add("--worker_counts", type=listed(whole(1)), default=[1, 2, 4], metavar="N,N")
        elif name == "scale":
            add("--processes", type=listed(whole(1)), default=[1, 2, 4, 8], metavar="N,N")
            add(
                "--sizes",
                type=listed(whole(1)),
                default=[1, 10, 100],
                metavar="N,N",
                help="of the data set, in multiples of --images",
            )
            add("--threads", type=whole(1), default=1, help="OMP_NUM_THREADS of each process")
        elif name == "links":
            add(
                "--rates",
                type=listed(str),
                default=["unshaped", "1gbit", "100mbit"],
                metavar="RATE,RATE",
                help="as tc writes them; the first one is the base",
            )
            add("--methods", type=listed(str), default=list(METHODS), metavar="NAME,NAME")
            add("--loss", action="store_true", help="losses of these methods; no root needed")
            add("--loss_steps", type=whole(4), default=200, help="steps of a run with --loss")
            add("--seeds", type=whole(1), default=3, help="runs of each kind with --loss")
    args = parser.parse_args(argv)
    check(args, parser.error)
    return args


def check(args, error):
    """Ends with one line where arguments do not fit together."""
    own = vars(args)
    if (own.get("coco_image_path") is None) != (own.get("annotation_path") is None):
        error("--coco_image_path and --annotation_path go together: give both")
    for name in ("script", "against"):
        if own.get(name) and not own[name].is_file():
            error(f"--{name} {own[name]} is not there: give the path of a script")
    if own.get("peer") and not args.peer.is_file():
        error(f"--peer {args.peer} is not there: give the path of imagenet/main.py")
    if own.get("peer") and args.image_size != 224:
        error("--peer crops to 224 pixels: leave --image_size at 224")
    if args.command == "scale" and args.images < (
        least := math.ceil(1.03 * needed(args, args.workers, max(args.processes)))
    ):
        error(f"--images {args.images} is too few for these processes: give {least} or more")
    for name in own.get("methods", ()):
        if name not in METHODS:
            error(f"argument --methods: {name!r} is none of {', '.join(METHODS)}")
    if own.get("methods", ["none"])[0] != "none":
        error("argument --methods: none is the reference, name it first")
    if args.json not in (None, "-") and not os.access(Path(args.json).absolute().parent, os.W_OK):
        error(f"argument --json: the folder of {args.json} cannot be written")


def machine():
    """One line: processor, cores this process may use, GPU, versions."""
    import torch

    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.+)$", info, re.M)
    extras = [flag for flag in ("amx_bf16", "avx512_bf16") if f" {flag} " in info]
    extras += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return (
        f"{', '.join([name[1] if name else platform.machine(), *extras])}, "
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def table(result):
    """The result as text: a line on the machine, then one line for each row."""
    lines = [("what", "demo", "reference", "ratio")]
    lines += [
        (
            f"{r['what']} ({r['unit']})",
            *("-" if r[k] is None else f"{r[k]:.4g}" for k in ("demo", "reference")),
            "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
        )
        for r in result["rows"]
    ]
    wide = [max(len(line[k]) for line in lines) for k in range(4)]
    rounds_text = f"median of {result['repeats']}" + ", a trial" * (result["repeats"] < 5)
    if result["settings"].get("loss"):
        rounds_text = f"runs of {result['settings']['seeds']} seeds"
    return "\n".join(
        [
            f"{result['command']}, {rounds_text}: {result['machine']}",
            *(
                "  ".join([line[0].ljust(wide[0]), *(line[k].rjust(wide[k]) for k in (1, 2, 3))])
                for line in lines
            ),
        ]
    )


MEASURE = {
    "step": measure_step,
    "input": measure_input,
    "start": measure_start,
    "scale": measure_scale,
    "overhead": measure_overhead,
    "links": measure_links,
}


def stop_on_signal(number, _):
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a second one must not cut the clean-up short
    raise SystemExit(128 + number)


def main(argv=None):
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)
    folder = tempfile.mkdtemp(prefix="demo-benchmark-")
    bench = Bench(args, folder)
    try:
        rows = MEASURE[args.command](bench)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        result = {
            "command": args.command,
            "machine": machine(),
            "repeats": args.repeats,
            "settings": settings,
            "rows": rows,
        }
        print(table(result), file=sys.stderr if args.json == "-" else sys.stdout)
        text = json.dumps(result, indent=1)
        if args.json == "-":
            print(text)
        elif args.json:
            Path(args.json).write_text(text + "\n", encoding="ascii")
    except (Failure, OSError) as error:
        print(f"benchmark.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit:
        print("benchmark.py: error: stopped on a signal; nothing is left running", file=sys.stderr)
        raise
    finally:
        bench.sweep()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
