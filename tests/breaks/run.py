#!/usr/bin/env python3
"""For whoever moves or rewrites code: breaks it on purpose, to see that the tests notice.

    tests/breaks/run.py                     each break of table.py, one after the other
    tests/breaks/run.py epoch-not-set ...   these alone
    tests/breaks/run.py --list              their names, and what a user would see

Works in a copy of the working tree, with the Python that runs this: makes one break, runs the
tests that table.py names for it, takes the break back. First it runs all these tests without a
break, because one that fails then, or skips, says nothing. A line for each break:
    NAME: caught by TEST (SECONDS s)
    NAME: NOT CAUGHT (SECONDS s): what a user would see
    NAME: stale: ...                        table.py does not fit the tree: mend it there
    NAME: not tried: ...                    its tests skip here, or fail without the break
Some tests need root, for network namespaces and small disks.
Exit code: 0 all caught; 1 not all; 2 wrong arguments; 130 or 143 ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from table import BREAKS, Break, Stale

ROOT = Path(__file__).resolve().parents[2]
# Made by git, by the launchers and by caches: no part of what is tested.
LEFT_OUT = (".git", ".venv", "data", "logs", "__pycache__", ".*_cache", ".hypothesis", "*.pt")
# What would have the tests look at another script, or take a skip for a failure.
FOREIGN = ("TEST_SCRIPT", "TEST_LONG", "TEST_REQUIRE_ALL", "PYTEST_ADDOPTS")
SECONDS = 300  # for the tests of one break: with some they wait for what does not come
ENDING = 30  # seconds in which pytest clears away what its tests have started
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Failure(Exception):
    """Pytest could not run the tests."""


# --- A copy of the tree, and pytest in it ------------------------------------------------------


class Copy:
    """A copy of the working tree, in which one pytest at a time runs."""

    running: ClassVar[set[subprocess.Popen]] = set()  # of all copies

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "tree"
        ignore = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(ROOT, self.tree, symlinks=True, ignore=ignore)
        shared = ROOT.parent / "shared"  # what tests take where it is there
        if shared.is_dir():
            (folder / "shared").symlink_to(shared)

    def run(self, tests: Iterable[str], long: bool, *options: str, limit: float | None = None):
        """{test: (how it ended, why)} of each case that was run. Raises Failure."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        env |= {"PYTHONDONTWRITEBYTECODE": "1"} | ({"TEST_LONG": "1"} if long else {})
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}", f"--basetemp={self.folder / 'tmp'}", *options, *tests]
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.add(process)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Failure(f"no end within {limit:g} s") from None
        finally:
            end(process)
            self.running.discard(process)
        if not report.exists():
            lines = (self.folder / "output").read_text(errors="replace").split("\n")
            errors = [line for line in lines if "ERROR" in line or "Error" in line]
            raise Failure(f"pytest says: {(errors or ['nothing'])[0].strip()}")
        return dict(map(outcome, ElementTree.parse(report).iter("testcase")))

    @contextlib.contextmanager
    def broken(self, broken: Break):
        """The tree with a break in it. Raises Stale."""
        text, path = broken.broken(self.tree), self.tree / broken.file
        before = path.read_bytes()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_bytes(before)


def end(process: subprocess.Popen) -> None:
    """Ends pytest, which first ends what its tests have started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    """(test, (how it ended, why)) of an entry of pytest's report."""
    file, name = case.get("classname", "").replace(".", "/"), case.get("name", "")
    # A file that cannot be imported has no class name.
    test = f"{file}.py::{name}" if file else f"{name.replace('.', '/')}.py"
    for part in case:
        if part.tag in ("failure", "error"):
            return test, (FAILED, part.get("message", ""))
        if part.tag == "skipped":
            return test, (SKIPPED, part.get("message", ""))
    return test, (PASSED, "")


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def without_case(test: str) -> str:
    """The test function's name, without the values in brackets."""
    return test.partition("[")[0]


# --- Without a break ---------------------------------------------------------------------------


def run_unbroken(copy: Copy, tests: list[str], long: bool) -> dict[str, str]:
    """{test: why it says nothing of a break}, of those that fail or skip on the whole tree."""
    try:
        found = copy.run(tests, long)
    except Failure as failure:
        return dict.fromkeys(tests, str(failure))
    why = {}
    for test in tests:
        # Named with its values it is one case, else all of them.
        cases = [how for name, how in found.items() if test in (name, without_case(name))]
        failed = [message for how, message in cases if how == FAILED]
        skipped = [message for how, message in cases if how == SKIPPED]
        if failed:
            why[test] = f"fails without the break: {first_line(failed[0])}"
        elif len(skipped) == len(cases):
            why[test] = f"skips: {skipped[0]}" if skipped else "was not run"
    return why


def useless_tests(pool, copies, breaks: list[Break], jobs: int) -> dict[tuple[str, bool], str]:
    """{(test, long): why it says nothing here}."""
    groups: dict[tuple, dict[str, None]] = {}
    for one in breaks:
        for test in one.tests:
            # Together they share what is costly; with several jobs each file is a group.
            file = test.partition("::")[0] if jobs > 1 else ""
            groups.setdefault((one.long, file), {})[test] = None
    say(f"running {sum(map(len, groups.values()))} tests without a break first")
    found = {}
    tasks = [(long, [*tests]) for (long, _), tests in groups.items()]

    def task(long, tests):
        with lent(copies) as copy:
            return {(test, long): why for test, why in run_unbroken(copy, tests, long).items()}

    for part in pool.map(lambda given: task(*given), tasks):
        found |= part
    return found


# --- With a break ------------------------------------------------------------------------------


def verdict(copy: Copy, one: Break, useless: dict, args: argparse.Namespace) -> tuple[bool, str]:
    """(was it caught, what to say of it)."""
    tests = [test for test in one.tests if (test, one.long) not in useless]
    if not tests:
        return False, f"not tried: {useless[one.tests[0], one.long]}"
    began = time.monotonic()
    try:
        with copy.broken(one):
            found = copy.run(tests, one.long, "-x", limit=args.seconds)
    except Stale as stale:
        return False, str(stale)
    except Failure as failure:
        return False, f"NOT CAUGHT: {failure}"
    seconds = f"{time.monotonic() - began:.1f} s"
    for test, (how, why) in found.items():
        if how == FAILED:
            reason = f"\n    {first_line(why)}" if args.why else ""
            return True, f"caught by {test} ({seconds}){reason}"
    return False, f"NOT CAUGHT ({seconds}): {one.seen}"


def check(one: Break) -> str:
    """Why a break cannot be tried at all; empty: it can."""
    try:
        one.broken(ROOT)
    except Stale as stale:
        return str(stale)
    if missing := one.missing_tests(ROOT):
        return f"stale: there is no {', '.join(missing)}"
    return ""


@contextlib.contextmanager
def lent(copies: queue.SimpleQueue):
    """A copy for one task, given back at its end."""
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)


def try_all(breaks: list[Break], args: argparse.Namespace) -> list[bool]:
    """Prints a line for each break; returns whether each was caught."""
    caught, jobs = [], args.jobs
    with (
        tempfile.TemporaryDirectory(prefix="demo-breaks-", ignore_cleanup_errors=True) as folder,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))
        try:
            useless = useless_tests(pool, copies, breaks, jobs)

            def task(one):
                with lent(copies) as copy:
                    return one, *verdict(copy, one, useless, args)

            tasks = [pool.submit(task, one) for one in breaks]
            for done in concurrent.futures.as_completed(tasks):
                one, good, text = done.result()
                say(f"{one.name}: {text}")
                caught.append(good)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(Copy.running):
                end(process)
            raise
    return caught


# --- The command line --------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="of a break; none: all of them")
    add("--list", action="store_true", help="print the names, and what a user would see")
    add("--jobs", type=int, default=1, metavar="N", help="breaks at a time, each in its copy; 1")
    add("--why", action="store_true", help="print what the test says, too: is it about the break?")
    text = f"time limit for the tests of one break; {SECONDS}"
    add("--seconds", type=float, default=SECONDS, metavar="S", help=text)
    args = parser.parse_args(argv)
    known = [one.name for one in BREAKS]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no break is named {', '.join(unknown)}: --list has their names")
    if args.jobs < 1 or args.seconds <= 0:
        parser.error("--jobs and --seconds are numbers above 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    chosen = [one for one in BREAKS if not args.names or one.name in args.names]
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough
        for one in chosen:
            say(f"{one.name}{' (TEST_LONG=1)' * one.long}\n    {one.file}: {one.seen}")
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began, good = time.monotonic(), []
    for one in chosen:
        if why := check(one):
            say(f"{one.name}: {why}")
        else:
            good.append(one)
    try:
        caught = try_all(good, args) if good else []
    except KeyboardInterrupt:
        return 130
    count, seconds = sum(caught), time.monotonic() - began
    say(f"{len(chosen)} breaks: {count} caught, {len(chosen) - count} not; {seconds:.0f} s")
    return 0 if count == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
