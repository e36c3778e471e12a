"""tests/machines.sh: on small projects, that its machines are what they say; its cheap rows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support.processes import LONG, ROOT, Run, Started, require, start, wait_until

BARE = ["-p", "no:hypothesispytest", "-p", "no:xdist"]  # pytest starts sooner
MACHINES = ROOT / "tests" / "machines.sh"
PAGE = ROOT / "docs" / "machines.md"
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]


class Project:
    """A small one with the command in it; what the command makes lies in `tmp`."""

    def __init__(self, folder: Path) -> None:
        self.tmp, self.path = folder / "tmp", folder / "project"
        self.tmp.mkdir()
        (self.path / "tests").mkdir(parents=True)
        self.command = shutil.copy(MACHINES, self.path / "tests")

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def start(self, *words: str, **env: str) -> Started:
        own = {"TMPDIR": str(self.tmp), "LC_ALL": None, "CDPATH": None}
        return start(["bash", self.command, *words], env=own | env)

    def run(self, *words: str, expect: int = 0, **env: str) -> Run:
        with self.start(*words, **env) as started:
            return started.finish(100, expect=expect)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def results(run: Run) -> dict[str, list[str]]:
    """The other cells of each row of the table, by its first."""
    cells = [line.strip("| ").split(" | ") for line in run.out.splitlines() if line[:2] == "| "]
    return {first: rest for first, *rest in cells[1:]}


def descriptions() -> dict[str, str]:
    out = subprocess.run(["bash", MACHINES, "--list"], capture_output=True, text=True, check=True)
    return dict(line.split(maxsplit=1) for line in out.stdout.splitlines())


def test_page_has_every_row():
    page, rows = PAGE.read_text(), descriptions()
    table = re.findall(r"^\| (.*?) \|", page.partition("## The rows")[0], re.MULTILINE)
    assert table[1:] == [*rows.values()]
    for name in rows:
        assert name.startswith("python3") or f"| `{name}` |" in page, name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rows", "one_core,none"], "no row is called none: --list has their names"),
        (["--rows"], "--rows needs names"),
        (["-k", "x"], "unknown option -k"),
    ],
)
def test_wrong_words_are_refused(project, words, line):
    run = project.run(*words, expect=2)
    assert run.out.startswith(f"machines.sh: error: {line}") and len(run.lines()) == 1
    assert not [*project.tmp.iterdir()]


# --- Clones and environments -------------------------------------------------------------------

FIRST = """#!/bin/sh
[ "${LC_ALL:-}" != C ] || { echo "first goes wrong"; exit 3; }
echo "HERE $PWD, environment ${VIRTUAL_ENV:-none}"
"""
SECOND = """#!/bin/sh
[ "${1:-}" != --version ] || exec python3 -m venv --without-pip .venv
[ -z "${CDPATH:-}" ] || { echo "FAILED tests/test_x.py::test_y - a | b"; exit 1; }
echo "=== 3 passed, 1 skipped in 1.23s ==="
"""


def commit(project: Project, first: str, second: str) -> None:
    require(shutil.which("git"), "clones need git")
    project.write("launch_single.sh", first)
    project.write("tests/run.sh", second)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*GIT, *words], cwd=project.path, check=True)


@LONG
def test_command_that_does_not_end_and_environment_that_cannot_be_made(project):
    commit(project, "#!/bin/sh\nsleep 100\n", "#!/bin/sh\necho no index\nexit 1\n")
    found = results(project.run("--rows", "nothing,locale", expect=2, LIMIT="2"))
    nothing, locale = found.values()
    assert nothing[2:] == ["-", "**failed**: launch_single.sh did not end within 2 s"]
    assert locale[1:] == ["-", "-", "**failed**: no environment: no index"]


def test_each_row_is_a_fresh_clone_with_its_result(project):
    commit(project, FIRST, SECOND)
    project.write("launch_single.sh", "exit 9")  # not committed, so it is in no clone
    (project.path / "bin").mkdir()
    project.write("bin/python3.12", "#!/bin/sh\nexit 127\n")
    path = f"{project.path}/bin:{os.environ['PATH']}"
    names = "nothing,odd_path,cdpath,locale,python3.12"
    outer = {"DEMO_ROW": "of one that has called this one"}
    run = project.run("--rows", names, expect=2, PATH=path, **outer)
    rows, found = descriptions(), results(run)
    assert [*found] == [rows[name] for name in names.split(",")]
    for name in ("nothing", "odd_path"):
        *seconds, result = found[rows[name]][1:]
        assert all(re.fullmatch(r"\d+ s", cell) for cell in seconds), name
        assert result == "passed: 3 passed, 1 skipped"
    why = "**failed**: run.sh, code 1: FAILED tests/test_x.py::test_y - a / b"
    assert found[rows["cdpath"]][3] == why
    why = "**failed**: launch_single.sh, code 3: first goes wrong"
    assert found[rows["locale"]][2:] == ["-", why]
    assert found[rows["python3.12"]][3] == "not run: no python3.12 is on PATH"
    assert "error: failed: cdpath locale" in run.out
    (work,) = project.tmp.iterdir()  # of what failed the logs stay, and nothing else
    assert [path.name for path in work.iterdir()] == ["logs"]
    assert "environment none" in (work / "logs/nothing.first").read_text()
    text = (work / "logs/odd_path.first").read_text()
    assert re.search(r"^HERE \S+/odd_path/a folder é, environment \S+/\.venv$", text, re.MULTILINE)


# --- The machines ------------------------------------------------------------------------------

LOOK = """
import json, os, pwd, shutil, signal, socket, tempfile
from pathlib import Path
def works(function):
    try:
        function()
    except (OSError, KeyError):
        return False
    return True
def test_look():
    facts = {
        "cores": len(os.sched_getaffinity(0)),
        "flags": Path("/proc/cpuinfo").read_text().partition("flags")[2].split(),
        "isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "folder": os.getcwd(),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "shm": shutil.disk_usage("/dev/shm").total,
        "user": os.getuid(),
        "name": works(lambda: pwd.getpwuid(os.getuid())),
        "home": works(lambda: tempfile.TemporaryFile(dir=os.environ["HOME"]).close()),
        "cdpath": os.environ.get("CDPATH"),
        "locale": os.environ.get("LC_ALL"),
        "ipv6": works(lambda: socket.create_server(("::1", 0), family=socket.AF_INET6).close()),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "pytest": [name for name in os.environ if name in ("PYTEST_XDIST_WORKER", "DEMO_LONG")],
    }
    Path(os.environ["TMPDIR"], "facts").write_text(json.dumps(facts))
"""
UNLIKE = {
    "one_core": lambda f: f["cores"] == 1,
    "old_cpu": lambda f: "avx2" in f["flags"] and f["isa"] == "AVX2",
    "odd_path": lambda f: f["folder"].endswith("/odd_path/a folder é"),
    "quota": lambda f: "cpu:/demo-machines." in f["cgroup"] or "::/demo-machines" in f["cgroup"],
    "small_shm": lambda f: f["shm"] == 1 << 20,
    "other_user": lambda f: f["user"] == 61234 and not f["name"] and f["home"],
    "closed_home": lambda f: not f["home"],
    "cdpath": lambda f: (f["cdpath"] or "").endswith("/cdpath/elsewhere:."),
    "locale": lambda f: f["locale"] == "C",
    "no_ipv6": lambda f: not f["ipv6"],
}


@LONG
def test_machines_are_unlike_this_one_in_what_they_say(project):
    require(os.geteuid() == 0, "most of these machines need root")
    project.write("tests/test_look.py", LOOK)
    words = ["--keep", "--quick", "--rows", ",".join(UNLIKE), "--", "tests/test_look.py", *BARE]
    run = project.run(*words, DEMO_LONG="1", PYTEST_XDIST_WORKER="x")
    rows = descriptions()
    assert {cells[3] for cells in results(run).values()} == {"passed: 1 passed"}, run.tail()
    assert [*results(run)] == [rows[name] for name in rows if name in UNLIKE]
    (work,) = project.tmp.iterdir()
    found = {name: json.loads((work / name / "tmp/facts").read_text()) for name in UNLIKE}
    for name, facts in found.items():
        assert facts["interrupts"] and not facts["pytest"], name
        assert UNLIKE[name](facts), (name, facts)
    for name in ("quota", "small_shm", "other_user", "closed_home", "cdpath", "locale"):
        assert not UNLIKE[name](found["odd_path"]), name
    flags = found["old_cpu"]["flags"]
    assert not [flag for flag in flags if flag.startswith(("avx512", "amx"))]


STAYS = """
import subprocess, sys, time
def test_stays():
    stays = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(stays, start_new_session=True)
    time.sleep(SECONDS)
    assert False
"""


@LONG
def test_failed_test_fails_the_row_and_what_it_left_is_ended(project):
    project.write("tests/test_stays.py", STAYS.replace("SECONDS", "0"))
    run = project.run("--quick", "--rows", "cdpath", "--", "tests/test_stays.py", *BARE, expect=2)
    why = (
        r"\*\*failed\*\*: python.*, code 1: FAILED tests/test_stays.py::test_stays - assert False"
    )
    assert re.fullmatch(why, results(run)["an exported CDPATH"][3])
    assert "machines.sh: still running: " in run.out  # and `finish` has seen none


@LONG
@pytest.mark.parametrize("name", ["quota", "no_ipv6", "other_user"])
def test_signal_ends_a_row_and_leaves_nothing(project, name):
    require(os.geteuid() == 0, "these machines need root")
    project.write("tests/test_stays.py", STAYS.replace("SECONDS", "600"))
    with project.start("--quick", "--rows", name, "--", "tests/test_stays.py", *BARE) as started:
        wait_until(lambda: len(started.pids("time.sleep(600)")) == 1, 30, "the test")
        (work,) = project.tmp.iterdir()
        started.signal(signal.SIGTERM)
        started.finish(40, expect=143)
    assert not work.exists()
    assert not [*Path("/sys/fs/cgroup").glob(f"**/{work.name}")]


# --- The cheap rows ----------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("name", ["old_cpu", "one_core", "other_user"])
def test_chosen_tests_pass_on_another_machine(name):
    """A part of the tests; tests/machines.sh runs all of them, and the first command, by hand."""
    with start(["bash", MACHINES, "--quick", "--rows", name]) as started:
        run = started.finish(900, expect=None)
    ((cells),) = results(run).values() or [["", "", "", "nothing was run"]]
    require(not cells[3].startswith("not run"), f"{name}: {cells[3]}")
    assert run.returncode == 0 and cells[3].startswith("passed: "), run.tail(200)
