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
    # ---- Files: annotations, images, prepared and generated sets
    # ---- compare_logs.py and analysis/
    # ---- NCCL's text, counters, probe, preflight
    # ---- Launchers, environment, nodes, schedulers
    # ---- The lesson, the pages, the benchmark
    Fault(
        "page-option",
        "README.md",
        "--num_epochs 2 --checkpoint coco.pt",
        "--num_epochs 2 --save coco.pt",
        "a command of the README ends with: unrecognized arguments",
    ),
    Fault(
        "page-link",
        "README.md",
        "](docs/speed.md#a-slow-link)",
        "](docs/speed.md#slow-link)",
        "a link of the README leads to a section that is not there",
    ),
    Fault(
        "page-message",
        "demo_coco_resnet18.py",
        "this PyTorch has no code for this GPU",
        "this PyTorch cannot use this GPU",
        "a reader looks up an error message, and the page has another",
    ),
    Fault(
        "page-variable",
        "launch_multinode.sh",
        "#   CONNECT_TIMEOUT=300 ",
        "#   CONNECT_TIMEOUT=600 ",
        "the launcher and the page state different defaults",
    ),
    Fault(
        "page-map",
        "docs/development.md",
        "| `tools/nccl_log.py` | after a run: what NCCL's text means |\n",
        "",
        "the map leaves a tool out",
    ),
    Fault(
        "lesson-shares",
        "docs/lesson/ddp.py",
        "DistributedSampler(data, world_size, rank)",
        "DistributedSampler(data, 1, 0)",
        "all students' ranks train on the same images",
    ),
    Fault(
        "lesson-wrap",
        "docs/lesson/ddp.py",
        "ddp = DistributedDataParallel(model)",
        "ddp = model",
        "each rank trains a model of its own",
    ),
    Fault(
        "lesson-forward",
        "docs/lesson/ddp.py",
        "outputs = ddp(images)",
        "outputs = model(images)",
        "backward averages nothing, and no error message appears",
    ),
    Fault(
        "lesson-set-epoch",
        "docs/lesson/ddp.py",
        "    sampler.set_epoch(epoch)  # a different order in each epoch\n",
        "",
        "each epoch of the lesson repeats the first one's order",
    ),
    Fault(
        "lesson-sum",
        "docs/lesson/ddp.py",
        "    dist.all_reduce(results)\n",
        "",
        "the loss of all ranks is that of rank 0",
    ),
    Fault(
        "lesson-rank-0",
        "docs/lesson/ddp.py",
        '    if rank == 0:\n        say(f"epoch',
        '    if True:\n        say(f"epoch',
        "every rank prints the results of all ranks",
    ),
    Fault(
        "lesson-seed",
        "docs/lesson/ddp.py",
        "torch.manual_seed(0)  #",
        "#",
        "each run begins with other weights, and ends with others than plain.py",
    ),
    Fault(
        "lesson-plain",
        "docs/lesson/plain.py",
        "    sampler.generator.manual_seed(epoch)  # a different order in each epoch\n",
        "",
        "plain.py shuffles otherwise than ddp.py, and their losses differ",
    ),
    Fault(
        "lesson-threads",
        "docs/lesson/ddp.py",
        "del ddp, outputs, loss\n",
        "",
        "a thread of Gloo's may crash Python after all results",
    ),
    Fault(
        "lesson-notebook",
        "docs/lesson/lesson.ipynb",
        '!python plain.py"',
        '!python3 plain.py"',
        "the notebook is no longer the one that the programs and the page make",
    ),
    Fault(
        "benchmark-ratio",
        "tools/benchmark.py",
        "{medians[name] / medians[last]:.3f}",
        "{medians[last] / medians[name]:.3f}",
        "the benchmark calls the slower script the faster one",
    ),
    Fault(
        "benchmark-order",
        "tools/benchmark.py",
        "for name in list(cases)[:: -1 if number % 2 else 1]:",
        "for name in cases:",
        "in each round the same case runs last, on a machine that has become warm",
    ),
    Fault(
        "benchmark-median",
        "tools/benchmark.py",
        "statistics.median(rates) for name",
        "statistics.mean(rates) for name",
        "one disturbed round moves the benchmark's figure",
    ),
    Fault(
        "benchmark-variables",
        "tools/benchmark.py",
        "text = run(args, command, FASTER)",
        "text = run(args, command)",
        "the benchmark measures a step slower than the launchers run it",
    ),
    Fault(
        "benchmark-against",
        "tools/benchmark.py",
        "[sys.executable, script, *given]",
        "[sys.executable, SCRIPT, *given]",
        "the benchmark compares the script with itself, whatever --against names",
    ),
    Fault(
        "benchmark-start",
        "tools/benchmark.py",
        'longer = seconds["long"] - seconds["short"]',
        'longer = seconds["long"]',
        "a peer that starts slowly comes out as slow in training",
    ),
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
