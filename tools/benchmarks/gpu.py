"""What only a GPU can show, in parts that are run once, the most valuable first.

docs/speed.md says what each part shows. Each figure is written at once, to --json too, and no part
takes over 4 minutes. Step lines, at each of which a GPU waits, are 20 steps apart or more.
"""

import time

from benchmarks import settings
from benchmarks.figures import cells, record, row, speed, write_json
from benchmarks.one_machine import loader_speed
from benchmarks.runner import Failure, say
from benchmarks.settings import counted, fed, unfed

FOR_EVER = 100_000  # epochs, of a batch that never ends
CANDIDATES = {  # by the change of children.py that makes them
    "ahead": "a batch copied to the GPU a step ahead, on a stream of its own",
    "cudnn": "torch.backends.cudnn.benchmark",
    "unbatched": "DDP without batched_grad_copy",
}


def measure_gpu(bench):
    """all that only a GPU can show, in parts of 4 minutes at most; figures as soon as known"""
    import torch

    args, rows = bench.args, []
    if not args.cpu and not torch.cuda.is_available():
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


def once(bench, how, folder, args, processes=0, launch=(), **more):
    """([img/s of all processes], output) of one run, with the step counts of `args`."""
    given = settings.options(args, folder, **more)
    env = {"BENCHMARK_WARM": str(args.warm_steps)}
    text = bench.script(how, given, processes, launch, **env)
    ranks = range(record(text, "Run")["world_size"])
    rate = sum(speed(text, args, rank)["img_per_s"] for rank in ranks)
    what = "".join(f", {name} {value}" for name, value in more.items())
    say(f"{how}, batch of {args.batch_size}{what}: {rate:.4g} img/s")
    return [rate], text


def resident(bench, folder, size, how="demo+resident", **more):
    """[img/s] of one run with a batch of this size that stays in memory."""
    return once(bench, how, folder, unfed(bench.args, size), num_epochs=FOR_EVER, **more)[0]


def train(bench):
    args = fed(bench.args)
    folder = settings.pictures(bench, 2 * settings.needed(args))
    for processes, more in ((1, {}), (2, settings.TWO)):
        found, text = once(bench, "demo+emptied", folder, args, processes, **more)
        run = "{world_size} process(es) on {devices}, {backend}, {precision} by auto"
        yield row(run.format(**record(text, "Run")), "img/s", found)


def each_size(bench, what, one, other):
    """Resident batches of each size with the options of `one` against those of `other`."""
    folder = settings.pictures(bench, max(bench.args.batch_sizes))
    for size in bench.args.batch_sizes:
        pair = [resident(bench, folder, size, **options) for options in (one, other)]
        yield row(f"resident batch of {size}: {what}", "img/s", *pair)


def step(bench):
    return each_size(bench, "as shipped / strict fp32", {}, {"precision": "fp32"})


def compiled(bench):
    return each_size(bench, "--compile / without", {"compile": True}, {})


def fed_input(bench):
    args = fed(bench.args)
    original = settings.pictures(bench, settings.needed(args))
    device = resident(bench, original, args.batch_size)
    yield row(f"resident batch of {args.batch_size}", "img/s", device)
    for name in ("prepared", "original"):
        folder = settings.prepared(bench, original) if name == "prepared" else original
        loader = [loader_speed(bench, "demo+loader", folder, args.steps)["img_per_s"]]
        rate, text = once(bench, "demo+emptied", folder, args)
        workers = record(text, "Run")["workers"]
        yield row(f"{name}: loader of {workers} workers / resident batch", "img/s", loader, device)
        yield row(f"{name}: fed / the lower of both", "img/s", rate, min(loader, device))


def split(bench):
    args, size = fed(bench.args), bench.args.batch_size
    folder = settings.pictures(bench, settings.needed(args))
    cases = {
        "fed": ("demo+emptied+profile", args, {}),
        "resident": ("demo+resident+profile", unfed(bench.args, size), {"num_epochs": FOR_EVER}),
    }
    for name, (how, counts, more) in cases.items():
        _, text = once(bench, how, folder, counts, **more)
        summary, busy = record(text, "Summary"), record(text, "FIGURES")
        compute, whole = summary["compute_ms"] + summary["exposed_ms"], summary["step_ms"]
        yield row(f"{name}: compute and exposed / kernels running", "ms", [compute], [busy["ms"]])
        yield row(f"{name}: waiting for data", "%", [100 * summary["data_ms"] / whole])
        # the profile is of one step more, which may have been a slower one
        yield row(f"{name}: no kernel running", "%", [max(0, 100 * (1 - busy["ms"] / whole))])


def job(bench):
    folder = settings.prepared(bench, settings.pictures(bench, bench.args.images))
    more = {"num_epochs": 2, "max_steps": None, "log_every": None}
    more["annotation_path"] = settings.first_annotations(folder)
    begin = time.monotonic()
    text = bench.script("demo", settings.options(bench.args, folder, **more), 1)
    took = [time.monotonic() - begin]
    if "Cleanup complete" not in text:
        raise Failure("the job has ended without its last line")
    run, summary = record(text, "Run"), record(text, "Summary")
    yield row(f"2 epochs of {run['images']} prepared pictures, launch to end", "s", took)
    yield row("the same: training alone", "s", [summary["train_s"]])
    yield row("the same: whole job", "img/s", [summary["img_per_s"]])


def candidates(bench):
    size = bench.args.batch_size
    folder = settings.pictures(bench, settings.needed(fed(bench.args)))
    shipped = {how: resident(bench, folder, size, how) for how in ("demo+resident", "demo+host")}
    for change, what in CANDIDATES.items():
        base = "demo+host" if change == "ahead" else "demo+resident"
        changed = resident(bench, folder, size, f"{base}+{change}")
        yield row(f"{what} / as shipped", "img/s", changed, shipped[base])
    yield from lines(bench, folder, shipped["demo+resident"])
    yield from cores(bench, settings.prepared(bench, folder))


def lines(bench, folder, shipped):
    """Step lines nearer together and farther apart: each makes the GPU wait."""
    warm, steps = bench.args.warm_steps, bench.args.steps
    for every in (1, 5, 50):
        args = counted(bench.args, every, warm, steps, workers=0)
        rate, _ = once(bench, "demo+resident", folder, args, num_epochs=FOR_EVER)
        yield row(f"--log_every {every} / {settings.LINE_EVERY}", "img/s", rate, shipped)


def cores(bench, folder):
    """Cores left free of workers, and workers bound to the cores beside the GPU: fed runs."""
    args = fed(bench.args)
    shipped, text = once(bench, "demo+emptied", folder, args, 1)
    workers = record(text, "Run")["workers"]
    for fewer in range(1, min(3, workers)):
        few = fed(bench.args, workers=workers - fewer)
        rate, _ = once(bench, "demo+emptied", folder, few, 1)
        what = f"fed by {workers - fewer} workers / by {workers}, as shipped"
        yield row(what, "img/s", rate, shipped)
    if not args.cpu:  # it asks for the cores beside a GPU
        rate, _ = once(bench, "demo+emptied", folder, args, 1, ["--numa-binding=node"])
        yield row("fed, torchrun --numa-binding=node / without", "img/s", rate, shipped)


PARTS = {  # each yields rows
    "train": train,
    "step": step,
    "input": fed_input,
    "split": split,
    "job": job,
    "compile": compiled,
    "candidates": candidates,
}
