#!/usr/bin/env python3
"""Faults that the tests must notice. Each one is put into a copy of the project, where the tests
that guard against it then have to fail, three times of three.

    tests/mutants.py                    all faults: about an hour on two cores
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
SECONDS = 600  # for all times of the tests of one fault
UNTESTABLE = "not testable here: "


@dataclass(frozen=True)
class Fault:
    """In the file `path` the lines `old`, which are in it once, become `new`. `shows` says what a
    user would see. A fault with `untestable`, the reason, is not tried: `old` is then its comment.
    """

    name: str
    path: str
    shows: str
    old: str
    new: str
    untestable: str = ""

    def problem(self) -> str:
        """Why it cannot be put into the file; nothing if it can."""
        count = f"\n{(ROOT / self.path).read_text()}".count(f"\n{self.old}")
        return "" if count == 1 else f"its lines are {count} times in {self.path}"

    def put_into(self, folder: Path) -> None:
        file = folder / self.path
        text = f"\n{file.read_text()}".replace(f"\n{self.old}", f"\n{self.new}")
        file.write_text(text.removeprefix("\n"))
        if file.suffix == ".py":
            compile(file.read_text(), file, "exec")
        elif file.suffix == ".sh":
            subprocess.run(["bash", "-n", file], check=True)


def read_faults(path: Path) -> list[Fault]:
    """Those of faults.txt, whose first lines say how they are written."""
    faults = []
    for block in path.read_text().split("\n\n"):
        first, *lines = block.strip("\n").split("\n")
        if first.startswith(("#", "====")):
            continue
        name, file, shows = first.split(" | ")
        old, new = ("".join(f"{li[1:]}\n" for li in lines if li[0] == sign) for sign in "-+")
        reasons = [line for line in lines if line.startswith(UNTESTABLE)]
        reason = reasons[0].removeprefix(UNTESTABLE) if reasons else ""
        faults.append(Fault(name, file, shows, old, new, reason))
    return faults


FAULTS = read_faults(Path(__file__).with_name("faults.txt"))


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


# One process for all times: it loads PyTorch once, and so does its fork server (support/forks.py).
SEVERAL_TIMES = """
import os, sys, pytest
os.environ["TEST_SESSION"] = str(os.getpid())
for time in range(int(sys.argv[1])):
    code = pytest.main(sys.argv[2:])
    if code != 1:
        break
sys.exit(code)
"""


def pytest(
    project: Path, times: int, *arguments: str, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a copy so many times, or until it does not fail; the long tests, too."""
    os.chmod(project.parent, 0o711)  # tests that become another user go through it
    env = {**os.environ, "TEST_LONG": "1", "TMPDIR": str(project.parent), "PYTHONPATH": ""}
    options = ["-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [sys.executable, "-c", SEVERAL_TIMES, str(times), *options],
        cwd=project,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
    )


def find_guards(project: Path) -> dict[str, list[str]]:
    """The tests that guard against each fault, by their node ids."""
    file = project.parent / "guards.json"
    done = pytest(project, 1, "--collect-only", f"--write-guards={file}")
    if done.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{done.stdout}")
    return json.loads(file.read_text())


def pass_without_faults(guards: dict[str, list[str]]) -> None:
    """Ends the program unless all these tests pass: otherwise a failure would say nothing."""
    tests = sorted({test for found in guards.values() for test in found})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        share = ["-n", str(os.cpu_count()), "--dist", "loadfile"]
        done = pytest(copy_project(Path(folder)), 1, *share, *tests, seconds=6 * SECONDS)
    if done.returncode or re.search(r"^skipped \d+: ", done.stdout, re.MULTILINE):
        raise SystemExit(f"without a fault these tests fail, or skip:\n{done.stdout}")


def notice(fault: Fault, tests: list[str]) -> tuple[str, str, float]:
    """(what is wrong, or nothing; the first test that failed; seconds for all times)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        project = copy_project(Path(folder))
        fault.put_into(project)
        try:
            done = pytest(project, TIMES, "-x", "-rfE", "--tb=no", *tests)
        except subprocess.TimeoutExpired:
            return f"not over after {SECONDS} s", "", time.monotonic() - begin
    found = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or len(found) != TIMES:
        end = done.stdout.strip().rpartition("\n")[2]
        return f"NOT NOTICED, {len(found)} times of {TIMES}: {end}", "", time.monotonic() - begin
    return "", found[0], time.monotonic() - begin


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
    with ThreadPoolExecutor(os.cpu_count() + 1) as pool:  # some tests wait
        results = list(pool.map(judge, faults))
    count, minutes = results.count(False), (time.monotonic() - begin) / 60
    print(f"{len(faults)} faults, {count} not noticed, {minutes:.1f} minutes")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
