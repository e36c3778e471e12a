#!/usr/bin/env python3
"""Faults that the tests must notice. Each one is put into a copy of the project, where the tests
that guard against it then have to fail, three times of three.

    tests/mutants.py                    all faults: about 15 minutes on two cores
    tests/mutants.py set-epoch shares   these
    tests/mutants.py --list             their names

A test says which faults it guards against: @pytest.mark.guards("set-epoch"). Before you take code
or a test away, look for the fault that would show the loss; if there is none, add it here first.
Exit code: 0: all were noticed; 1: one was not, or its text is no longer in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = 3  # a fault that is noticed by chance is not noticed
SECONDS = 300  # for one run of the tests of one fault
SCRIPT = "demo_coco_resnet18.py"


@dataclass(frozen=True)
class Fault:
    """In the file `path` the text `old`, which is in it once, becomes `new`. `shows` says what a
    user would see. A fault with `untestable`, the reason, is not tried: `old` is then its comment.
    """

    name: str
    path: str
    old: str
    new: str
    shows: str
    untestable: str = ""

    def problem(self) -> str:
        """Why it cannot be put into the file; nothing if it can."""
        count = (ROOT / self.path).read_text().count(self.old)
        return "" if count == 1 else f"its text is {count} times in {self.path}"

    def put_into(self, folder: Path) -> None:
        file = folder / self.path
        file.write_text(file.read_text().replace(self.old, self.new))
        if file.suffix == ".py":
            compile(file.read_text(), file, "exec")
        elif file.suffix == ".sh":
            subprocess.run(["bash", "-n", file], check=True)


FAULTS = [
    # ---- The script: shares, gradients, sums, restarts and ends
    Fault(
        "set-epoch",
        SCRIPT,
        "    loader.sampler.set_epoch(epoch)\n",
        "",
        "each epoch repeats the first one's order and crops",
    ),
    Fault(
        "validation-shares",
        SCRIPT,
        "        sampler.end += 1\n",
        "        pass\n",
        "validation leaves images out",
    ),
    Fault(
        "shares",
        SCRIPT,
        "    sampler = EpochSampler(dataset, process.world_size, process.rank, seed=args.seed)\n",
        "    sampler = EpochSampler(dataset, process.world_size, 0, seed=args.seed)\n",
        "each rank trains on the same share of the images",
    ),
    Fault(
        "val-padded",
        SCRIPT,
        "    sampler.end = len(dataset) // process.world_size\n",
        "    sampler.end = sampler.num_samples\n",
        "validation counts images that pad the shares twice",
    ),
    Fault(
        "unknown-launcher",
        SCRIPT,
        '        if env.get(name, "").lstrip("0") not in ("", "1"):\n',
        '        if name == "":\n',
        "each process of an unknown launcher trains alone, as rank 0 of one",
    ),
    Fault(
        "broadcast-buffers",
        SCRIPT,
        "bucket_cap_mb=args.bucket_cap_mb,",
        "bucket_cap_mb=args.bucket_cap_mb, broadcast_buffers=False,",
        "batch-norm statistics of pretrained weights do not reach the other ranks",
    ),
    Fault(
        "workers-before-backward",
        SCRIPT,
        "    start_workers(train_loader, val_loader)  # the processes that load images\n"
        "    rebuild_buckets(training)  #",
        "    rebuild_buckets(training)\n    start_workers(train_loader, val_loader)  #",
        "a start hangs now and then: loader workers are forked beside threads",
    ),
    Fault(
        "workers-idle",
        SCRIPT,
        "            loader.sampler.start = loader.sampler.num_samples  # the share is empty\n",
        "",
        "loader workers decode images that nobody uses",
    ),
    Fault(
        "rebuild-buckets",
        SCRIPT,
        "    rebuild_buckets(training)  #",
        "    #",
        "a resumed run's weights differ from those of an unbroken one",
    ),
    Fault(
        "powersgd-start",
        SCRIPT,
        "start_powerSGD_iter=UNMEASURED_STEPS + 1,",
        "start_powerSGD_iter=UNMEASURED_STEPS,",
        "PowerSGD begins among the steps that averages leave out",
    ),
    Fault(
        "powersgd-one-bucket",
        SCRIPT,
        "        args.bucket_cap_mb = 1024  # NOTE: over Gloo PowerSGD hangs with two buckets\n",
        "",
        "PowerSGD hangs over Gloo",
    ),
    Fault(
        "compression",
        SCRIPT,
        "        ddp.register_comm_hook(None, hooks[args.grad_compression])\n",
        "        pass\n",
        "--grad_compression bf16 sends as many bytes as before",
    ),
    Fault(
        "gc-collect",
        SCRIPT,
        "    # NOTE: this frees DDP. Threads of the group that still run could abort Python",
        "",
        "Python now and then aborts at a run's end",
        untestable="only by chance: the threads have ended nearly always",
    ),
    Fault(
        "precision-minimum",
        SCRIPT,
        "saved or min(all_gather(fastest_precision(process))",
        "saved or max(all_gather(fastest_precision(process))",
        "--precision auto takes what one rank's hardware cannot do fast",
    ),
    Fault(
        "one-write",
        SCRIPT,
        '        os.write(to, f"{process.name} {text}\\n".encode(errors="replace"))\n',
        '        for part in (f"{process.name} ", f"{text}\\n"):\n'
        '            os.write(to, part.encode(errors="replace"))\n',
        "log lines of several ranks mix",
    ),
    Fault(
        "non-printables",
        SCRIPT,
        '"".join(c if c.isprintable() else "?" for c in text)',
        "text",
        "a file's name breaks a log line, or changes the terminal",
    ),
    Fault(
        "log-errors",
        SCRIPT,
        "with suppress(OSError):  # a full disk, or a reader",
        "with nullcontext():  # a full disk, or a reader",
        "a training ends when nobody reads its output any more",
    ),
    Fault(
        "loader-timeout",
        SCRIPT,
        "        timeout=min(args.timeout, MOST_LOADER_SECONDS) if workers else 0,\n",
        "        timeout=args.timeout if workers else 0,\n",
        "a very long --timeout ends the run at its first batch",
    ),
    Fault(
        "workers-killed",
        SCRIPT,
        "        worker.kill()\n",
        "        pass\n",
        "loader workers outlive a rank that has failed",
    ),
    Fault(
        "old-torch-store",
        SCRIPT,
        "    # NOTE: torchrun of 2.8 keeps its store, so that it has the addresses",
        "",
        "with PyTorch 2.6 to 2.8 torchrun's own restart does not connect",
        untestable="the store of this PyTorch is a new one at each restart",
    ),
    Fault(
        "weights-only",
        SCRIPT,
        '        return torch.load(path, map_location="cpu", weights_only=True)\n',
        '        return torch.load(path, map_location="cpu", weights_only=False)\n',
        "code in a weights file is run",
    ),
    Fault(
        "no-sync-forward",
        SCRIPT,
        "            with nullcontext() if is_last else ddp.no_sync():\n"
        "                logits = forward(training, ddp, images)\n",
        "            logits = forward(training, ddp, images)\n"
        "            with nullcontext() if is_last else ddp.no_sync():\n",
        "each micro-batch sends its gradients",
    ),
    Fault(
        "counts-mean",
        SCRIPT,
        "    dist.all_reduce(counts)\n",
        "    dist.all_reduce(counts)\n    counts //= process.world_size\n",
        "validation counts a part of the images",
    ),
    Fault(
        "own-loss",
        SCRIPT,
        "            loss_of_step += loss.detach()",
        "            dist.broadcast(shared := loss.detach(), src=0)\n"
        "            loss_of_step += shared",
        "all ranks log rank 0's loss as theirs",
    ),
    Fault(
        "started-alike",
        SCRIPT,
        "            if own.get(name) != value:\n",
        "            if False:\n",
        "ranks with different arguments train, wrongly",
    ),
    Fault(
        "agree-fixed",
        SCRIPT,
        "    return max(1, min(MOST_STEPS_WITHOUT_AGREEMENT, int(1 / max(slowest, 1e-9))))\n",
        "    return MOST_STEPS_WITHOUT_AGREEMENT\n",
        "with steps of 2 s a stop signal takes 40 s",
    ),
    Fault(
        "resume-offset",
        SCRIPT,
        "    loader.sampler.start = steps_done * args.accumulate_steps * args.batch_size\n",
        "    loader.sampler.start = 0\n",
        "a run resumed in mid-epoch trains on images that it has had",
    ),
    Fault(
        "resume-epoch",
        SCRIPT,
        "    first_epoch = max(1, math.ceil(training.step / args.steps_per_epoch))\n",
        "    first_epoch = 1\n",
        "a resumed run validates and saves once more for each earlier epoch",
    ),
    Fault(
        "checkpoint-in-place",
        SCRIPT,
        'open(f"{path}.new", "wb") as file:',
        'open(path, "wb") as file, suppress(FileNotFoundError):',
        "a disk that fills up destroys the last checkpoint",
    ),
    Fault(
        "barrier-at-end",
        SCRIPT,
        "    dist.barrier()\n    # NOTE: this frees",
        "    # NOTE: this frees",
        "a rank that is done first breaks the connections of the others",
    ),
    Fault(
        "errors-alone",
        SCRIPT,
        "    errors = all_gather(error)\n",
        "    errors = [error]\n",
        "a user's error on one rank becomes a lost connection on the others",
    ),
    Fault(
        "explains-once",
        SCRIPT,
        "            if process.local_rank == 0 or not dist.is_initialized():\n",
        "            if True:\n",
        "an error of a user is told by each rank",
    ),
    Fault(
        "user-error-code",
        SCRIPT,
        "            code = EXIT_USER\n",
        "            code = EXIT_FAILED\n",
        "launchers start a run again that ends on a user's error",
    ),
    Fault(
        "argument-code",
        SCRIPT,
        "        parser.exit(EXIT_USER, ",
        "        parser.exit(EXIT_FAILED, ",
        "launchers start a run again that has a wrong argument",
    ),
    Fault(
        "damaged-image",
        SCRIPT,
        "        except Exception as error:  # damaged images raise errors of any type\n",
        "        except ZeroDivisionError as error:\n",
        "a damaged image ends the run",
    ),
    Fault(
        "storage-gone",
        SCRIPT,
        "content = Path(path).read_bytes()",
        'content = Path(path).read_bytes() if os.path.exists(path) else b""',
        "training goes on with black images when the storage is gone",
    ),
    Fault(
        "image-keys",
        SCRIPT,
        "        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**32)\n",
        "",
        "crops differ from run to run, and in a resumed one",
    ),
    Fault(
        "accumulate-mean",
        SCRIPT,
        '                loss = cross_entropy(logits, labels, reduction="sum") / images_in_step\n',
        "                loss = cross_entropy(logits, labels)\n",
        "gradients grow with --accumulate_steps",
    ),
    Fault(
        "warm-up",
        SCRIPT,
        "lr_factor = min(1, (training.step + 1) / max(1, args.warmup_steps))",
        "lr_factor = 1",
        "--warmup_steps does nothing",
    ),
    Fault(
        "lr-scaling",
        SCRIPT,
        "        base, args.lr = args.lr, args.lr * global_batch / LR_BATCH\n",
        "        base = args.lr\n",
        "--lr_scaling linear does nothing",
    ),
    Fault(
        "worker-signals",
        SCRIPT,
        "        worker_init_fn=ignore_stop_signals,\n",
        "",
        "a stop signal to all processes ends the run unsaved",
    ),
    Fault(
        "parent-ended",
        SCRIPT,
        "    if not stop and watched and os.getppid() != process.parent:\n",
        "    if not stop and watched and os.getppid() == 0:\n",
        "ranks train on after their torchrun was killed",
    ),
    Fault(
        "statistics-shared",
        SCRIPT,
        "            dist.broadcast(buffer, src=0)\n",
        "            pass\n",
        "ranks validate different models",
    ),
    Fault(
        "replicas",
        SCRIPT,
        '        "replicas_identical": len(set(digests)) == 1,\n',
        '        "replicas_identical": True,\n',
        "replicas are called identical, whatever they are",
    ),
    Fault(
        "exposed-mark",
        SCRIPT,
        "        next(model.parameters()).register_post_accumulate_grad_hook(\n",
        "        [*model.parameters()][-1].register_post_accumulate_grad_hook(\n",
        "nearly all of backward is called exposed communication",
    ),
    Fault(
        "unmeasured-steps",
        SCRIPT,
        "    mean = mean_time(times[UNMEASURED_STEPS:] or times)\n",
        "    mean = mean_time(times)\n",
        "the slow first steps are in the averages",
    ),
    Fault(
        "wait-each-step",
        SCRIPT,
        "shown_loss = loss.item() if log_due else None",
        "shown_loss = loss.item()",
        "a GPU waits for the script in each step",
    ),
    Fault(
        "stop-exit-code",
        SCRIPT,
        "EXIT_STOPPED = os.EX_TEMPFAIL  # 75, from sysexits.h: try again later\n",
        "EXIT_STOPPED = EXIT_FAILED\n",
        "a stopped run looks like a failed one",
    ),
    Fault(
        "second-start-resumes",
        SCRIPT,
        "        args.resume = True\n",
        "        pass\n",
        "torchrun's own restart begins again from step 0",
    ),
    Fault(
        "nan-of-one-rank",
        SCRIPT,
        "not_finite = not math.isfinite(training.loss_sum)",
        "not_finite = process.rank == 0 and not math.isfinite(training.loss_sum)",
        "a loss that is not a number goes into the weights of all ranks",
    ),
    Fault(
        "missing-rank",
        SCRIPT,
        "    timer.start()\n",
        "",
        "a rank that does not answer at the start is waited for without end",
    ),
    Fault(
        "profiled-steps",
        SCRIPT,
        "training.timer.unread.pop()",
        "pass",
        "profiled steps, which take longer, are in the averages",
    ),
    Fault(
        "nccl2-setting",
        SCRIPT,
        "    # NOTE: by its source, the new process group of NCCL in PyTorch 2.15",
        "",
        "with PyTorch 2.15 an all-reduce does not overlap with backward",
        untestable="needs two GPUs",
    ),
    Fault(
        "gpu-by-local-rank",
        SCRIPT,
        "    # DDP 2/6: each process takes a GPU of its own, by its local rank.",
        "",
        "all ranks of a node compute on GPU 0",
        untestable="needs two GPUs (tests/gpu has the test)",
    ),
    # ---- Files: annotations, images, prepared and generated sets
    # ---- compare_logs.py and analysis/
    # ---- NCCL's text, counters, probe, preflight
    # ---- Launchers, environment, nodes, schedulers
    # ---- The lesson, the pages, the benchmark
]


def copy_project(folder: Path) -> Path:
    """A copy of what git knows or would add, with the same neighbours."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    project = folder / "project"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return project


def pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a copy; the long tests, too."""
    env = {**os.environ, "TEST_LONG": "1", "TMPDIR": str(project.parent), "PYTHONPATH": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=project,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )


def find_guards(project: Path) -> dict[str, list[str]]:
    """The tests that guard against each fault, by their node ids."""
    file = project.parent / "guards.json"
    done = pytest(project, "--collect-only", f"--write-guards={file}")
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout}")
    return json.loads(file.read_text())


def pass_without_faults(guards: dict[str, list[str]]) -> None:
    """Ends the program unless all these tests pass: otherwise a failure would say nothing."""
    tests = sorted({test for found in guards.values() for test in found})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        share = ["-n", str(os.cpu_count()), "--dist", "loadfile"]
        done = pytest(copy_project(Path(folder)), *share, "-rs", *tests)
    if done.returncode or re.search(r"^SKIPPED", done.stdout, re.MULTILINE):
        raise SystemExit(f"without a fault these tests fail, or skip:\n{done.stdout}")


def notice(fault: Fault, tests: list[str]) -> tuple[str, str, float]:
    """(what is wrong, or nothing; the first test that failed; seconds for all times)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        project = copy_project(Path(folder))
        fault.put_into(project)
        found = ""
        for number in range(1, TIMES + 1):
            try:
                done = pytest(project, "-x", "-rfE", "--tb=no", *tests)
            except subprocess.TimeoutExpired:
                return f"not over after {SECONDS} s", "", time.monotonic() - begin
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if done.returncode != 1 or not failed:
                end = done.stdout.strip().rpartition("\n")[2]
                return f"NOT NOTICED, run {number}: {end}", "", time.monotonic() - begin
            found = failed[1].removeprefix("tests/")
    return "", found, time.monotonic() - begin


def choose(names: Iterable[str]) -> list[Fault]:
    by_name = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}; --list shows their names")
    return [by_name[name] for name in names] or FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="FAULT", help="default: all of them")
    parser.add_argument(
        "--list", action="store_true", help="print their names, and what they show"
    )
    args = parser.parse_args()
    faults = choose(args.names)
    if args.list:
        for fault in faults:
            print(f"{fault.name:24} {fault.path:32} {fault.shows}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        guards = find_guards(copy_project(Path(folder)))
    tried = [fault for fault in faults if not fault.untestable]
    pass_without_faults({fault.name: guards.get(fault.name, []) for fault in tried})

    def judge(fault: Fault) -> bool:
        problem, test, seconds = fault.problem(), "", 0.0
        if not problem and not fault.untestable:
            if fault.name in guards:
                problem, test, seconds = notice(fault, guards[fault.name])
            else:
                problem = "NOT NOTICED: no test is marked with it"
        verdict = problem or test or f"not testable here: {fault.untestable}"
        print(f"| {fault.name} | {fault.shows} | {verdict} | {seconds:.0f} s |", flush=True)
        return not problem

    begin = time.monotonic()
    print("| fault | what it shows | noticed by | time |\n|---|---|---|---|")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(judge, faults))
    count, minutes = results.count(False), (time.monotonic() - begin) / 60
    print(f"{len(faults)} faults, {count} not noticed, {minutes:.1f} minutes")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
