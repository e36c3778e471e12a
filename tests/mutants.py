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
    Fault(
        "old-logs",
        "tools/analysis/runs.py",
        '    if log.ours and not run.record("Summary"):\n',
        '    if log.ours and "peak_gpu_bytes" not in run.record("Summary"):\n',
        "a log that an earlier version wrote is called incomplete",
    ),
    Fault(
        "gpus-of-each-node",
        "tools/analysis/logs.py",
        "    first = max(log.ranks) + 1 if log.ranks and not log.ours else 0\n",
        "    first = 0\n",
        "two nodes' logs of the talk's demo are read as one node's",
    ),
    Fault(
        "restart-as-start",
        "tools/analysis/logs.py",
        'found.get("resume") is False and not',
        "not",
        "a restart without a checkpoint is called another run",
    ),
    Fault(
        "earlier-attempt",
        "tools/analysis/logs.py",
        '        log.records.pop("Summary", None)\n',
        "",
        "a run cut off after its restart is scored by its first attempt",
    ),
    Fault(
        "failed-before",
        "tools/analysis/logs.py",
        '            failed = found["error"]',
        '            failed = failed or found["error"]',
        "a run that was well at the second try is called failed",
    ),
    Fault(
        "torn-loss",
        "tools/analysis/logs.py",
        '\\.\\d{4}(?!\\d))"',
        '\\.\\d{1,4})"',
        "a loss that was cut off in the middle counts",
    ),
    Fault(
        "steps-kept",
        "tools/analysis/logs.py",
        "    if len(log.steps) < MOST_STEPS:\n",
        "    if True:\n",
        "a log of days fills the memory",
    ),
    Fault(
        "node-0-alone",
        "tools/analysis/runs.py",
        "    return {rank for rank in range(total) if nodes[rank] in present}\n",
        "    return set(range(total))\n",
        "node 0's log alone is called incomplete",
    ),
    Fault(
        "incomplete-run",
        "tools/analysis/runs.py",
        '        ("no end line from", present - log.ended.keys()),\n',
        "",
        "a run of which one rank did not end is scored as whole",
    ),
    Fault(
        "slowest-node",
        "tools/analysis/runs.py",
        "        return min(self.networks,",
        "        return max(self.networks,",
        "the faster node's network is judged",
    ),
    Fault(
        "probe-of-others",
        "tools/analysis/runs.py",
        "    if count and run.processes and count != run.processes:\n",
        "    if False:\n",
        "a run is judged by the probe of another number of processes",
    ),
    Fault(
        "compressed-bytes",
        "tools/analysis/runs.py",
        "        run.probe_s = milliseconds / 1000 * run.wire_bytes / size\n",
        "        run.probe_s = milliseconds / 1000\n",
        "compressed gradients are said to take as long as whole ones",
    ),
    Fault(
        "link-gbps",
        "tools/analysis/runs.py",
        "    run.link_gbps = run.link_gbps or (run.network and run.network.stated)\n",
        "    run.link_gbps = (run.network and run.network.stated) or run.link_gbps\n",
        "--link_gbps does not replace what the interface states",
    ),
    Fault(
        "restarted-time",
        "tools/analysis/runs.py",
        "        return self.start_step > 0 or self.log.attempts > 1\n",
        "        return self.start_step > 0\n",
        "the time of a restarted run's last attempt counts as that of the run",
    ),
    Fault(
        "stray-bytes",
        "tools/analysis/network.py",
        "STRAY = 0.01\n",
        "STRAY = 0.0\n",
        "an interface that carried a node's other traffic is called the network",
    ),
    Fault(
        "bytes-twice",
        "tools/analysis/network.py",
        "    return [top] if top else []  #",
        "    return seen  #",
        "bytes through a tunnel count twice",
    ),
    Fault(
        "ring-factor",
        "tools/analysis/projection.py",
        "    return 2 * (run.processes - 1) / run.processes * run.wire_bytes\n",
        "    return run.wire_bytes\n",
        "the model's all-reduce sends too few bytes",
    ),
    Fault(
        "hidden-part",
        "tools/analysis/projection.py",
        "    hidden = max(0.0, here_s - run.exposed_s) * min(1.0, there_s / here_s)\n",
        "    hidden = max(0.0, here_s - run.exposed_s)\n",
        "over a faster link more is hidden than there is to send",
    ),
    Fault(
        "time-ratio-inverted",
        "tools/analysis/likeness.py",
        "    return run.wall_s / base.wall_s\n",
        "    return base.wall_s / run.wall_s\n",
        "the faster run is said to have taken longer",
    ),
    Fault(
        "loss-mean",
        "tools/analysis/likeness.py",
        " if key in shared] or",
        "] or",
        "losses of one node's ranks stand beside losses of all ranks",
    ),
    Fault(
        "powersgd-rank",
        "tools/analysis/likeness.py",
        '        keys.append("powersgd_rank")\n',
        "        pass\n",
        "runs that compress differently are compared",
    ),
    Fault(
        "unlike-runs",
        "tools/compare_logs.py",
        "    if unlike and not force:\n",
        "    if False:\n",
        "runs that did other work are compared as if it were the same",
    ),
    Fault(
        "exit-code-incomplete",
        "tools/compare_logs.py",
        "    return 0 if all(run.complete for run in runs) else 1\n",
        "    return 0\n",
        "a script that compares takes an incomplete run for a whole one",
    ),
    Fault(
        "same-wire",
        "tools/compare_logs.py",
        '        "same_wire": likeness.same_wire(runs),\n',
        '        "same_wire": [],\n',
        "two networks over one wire are compared without a word",
    ),
    Fault(
        "speed-up-inverted",
        "tools/analysis/scaling.py",
        "    speed_up = img_per_s(run) / img_per_s(base)\n",
        "    speed_up = img_per_s(base) / img_per_s(run)\n",
        "more processes seem to make it slower",
    ),
    Fault(
        "efficiency",
        "tools/analysis/scaling.py",
        "    found.efficiency = speed_up * base.processes / run.processes\n",
        "    found.efficiency = speed_up / run.processes\n",
        "beside a base of two processes the efficiency is half of what it is",
    ),
    Fault(
        "weak-as-strong",
        "tools/analysis/scaling.py",
        '    return "weak" if',
        '    return "strong" if',
        "weak scaling is called strong",
    ),
    Fault(
        "median-base",
        "tools/analysis/scaling.py",
        "    middle = statistics.median_low(",
        "    middle = max(",
        "of several runs with one process the fastest is the base",
    ),
    Fault(
        "images-per-second",
        "tools/analysis/scaling.py",
        "    return run.global_batch / step_ms * 1000 if known else None\n",
        "    return run.img_per_s if known else None\n",
        "the first, slow steps count in the speed-up",
    ),
    Fault(
        "base-of-each-network",
        "tools/analysis/scaling.py",
        "        own = [other for other in first if network_of(other) == network_of(run)]\n",
        "        own = first\n",
        "a run over one network is measured by another network's base",
    ),
    Fault(
        "bound-largest",
        "tools/analysis/verdict.py",
        "    verdict.bound = max(parts, key=parts.get)\n",
        "    verdict.bound = min(parts, key=parts.get)\n",
        "the smallest part of a step is said to bound the run",
    ),
    Fault(
        "straggler",
        "tools/analysis/verdict.py",
        "        parts = parts_around_slow_rank(run)\n",
        "        pass\n",
        "waiting for one slow rank is blamed on the link",
    ),
    Fault(
        "stated-share",
        "tools/analysis/verdict.py",
        "    if reached < HEALTHY:\n",
        "    if reached > HEALTHY:\n",
        "a link that delivers is said not to be what it states",
    ),
    Fault(
        "fallback-named",
        "tools/analysis/verdict.py",
        "    says = say_fallback(network)\n",
        "    says = []\n",
        "InfiniBand was asked for and TCP was used, and nothing says so",
    ),
    Fault(
        "gpudirect-off",
        "tools/analysis/verdict.py",
        "        and not network.with_gpudirect\n",
        "        and network.with_gpudirect\n",
        "the link is blamed for what host memory limits",
    ),
    Fault(
        "packets-lost",
        "tools/analysis/verdict.py",
        "LOSSY = 0.01\n",
        "LOSSY = 1.0\n",
        "lost packets are not told",
    ),
    Fault(
        "ip-over-infiniband",
        "tools/analysis/verdict.py",
        '    if run.network.kind == "ipoib":\n',
        "    if False:\n",
        "IP over InfiniBand is not told from InfiniBand",
    ),
    Fault(
        "negotiated-speed",
        "tools/analysis/advice.py",
        "FALLEN_GBPS = 0.1 ",
        "FALLEN_GBPS = 0.001 ",
        "a port that fell back to 100 Mb/s is not named",
    ),
    Fault(
        "overcome",
        "tools/analysis/advice.py",
        '        problems = [p for p in problems if p.get("id") not in OVERCOME]\n',
        "        pass\n",
        "a whole run is advised on what a restart has overcome",
    ),
    Fault(
        "trace-overlap",
        "tools/analysis/trace.py",
        "sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for",
        "sum(max(0.0, max(a[1], b[1]) - min(a[0], b[0])) for",
        "an all-reduce is said to be beside compute where it is exposed",
    ),
    Fault(
        "trace-gpu-step",
        "tools/analysis/trace.py",
        '("user_annotation", "gpu_user_annotation")',
        '("gpu_user_annotation", "user_annotation")',
        "the script's step is drawn in place of the GPU's",
    ),
    Fault(
        "profiled-step",
        "tools/analysis/trace.py",
        "events, max(shared))",
        "events, min(shared))",
        "the first profiled step is drawn, in which caches are cold",
    ),
    Fault(
        "csv-columns",
        "tools/analysis/report.py",
        "                measured = line.loss, line.img_per_s, line.data_ms, line.step_ms\n",
        "                measured = line.loss, line.img_per_s, line.step_ms, line.data_ms\n",
        "the columns of --csv are not what their head says",
    ),
    Fault(
        "json-nan",
        "tools/analysis/report.py",
        ", parse_constant=lambda name: None)",
        ")",
        "--json writes NaN, which is no JSON",
    ),
    Fault(
        "markdown-escape",
        "tools/analysis/report.py",
        '    text = report(result, address).replace("<", "&lt;")\n',
        "    text = report(result, address)\n",
        "a viewer of --report hides what stands in <>",
    ),
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
