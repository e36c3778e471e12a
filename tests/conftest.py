"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.processes import ROOT
from support.slurm import SlurmCluster

# A worker takes seconds to make the test files ready; written once, they and the tools are read by
# all that start here later. Many containers forbid it, and each process would do all of it anew.
sys.dont_write_bytecode = False


QUICK = 0.3  # seconds for ten starts of Python on two quiet cores, on which limits were tried


def slowness() -> float:
    """How many times as long as there they take here now; at least 1."""
    begin = time.monotonic()
    for _ in range(10):
        subprocess.run([sys.executable, "-S", "-c", "import json, subprocess"], check=True)
    return max(1.0, (time.monotonic() - begin) / QUICK)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write recorded answers anew: their diff shows what has changed"
    parser.addoption("--record", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """A test session that is told to end cleans up as on Ctrl-C: no namespace or daemon stays; nor
    does a temporary folder of a process that a test has killed.
    """
    with contextlib.suppress(ValueError):  # only a main thread can
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # In the background of a script, under nohup and in some CIs these are ignored, and what
        # is started inherits that. A handler, even one that does nothing, is not inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)
    if "TEST_FACTOR" not in os.environ:  # a worker has its session's
        os.environ["TEST_FACTOR"] = str(slowness())
    if "TEST_SESSION" not in os.environ:
        os.environ["TEST_SESSION"] = str(os.getpid())  # what outlives it (forks.py) then ends
        tempfile.gettempdir()  # pytest's own folders, with what failed, stay where they are
        scratch = tempfile.TemporaryDirectory(prefix="demo-", ignore_cleanup_errors=True)
        os.chmod(scratch.name, 0o711)  # tests that become another user go through it
        os.environ["TMPDIR"] = scratch.name
        config.add_cleanup(scratch.cleanup)


# Files that take minutes, the longest first: started last, they would end long after the rest.
LONGEST = "gpu_harness two_nodes lesson readme lost_nodes slurm training launchers preflight "
LONGEST += (
    "machines last_line environment ends stop_signals talk ranks benchmark step_log probe script"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, and why."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture
def assert_recorded(pytestconfig: pytest.Config) -> Callable[[Path, str], None]:
    """Compares a text with the file that holds what is expected; --record writes it anew."""

    def compare(path: Path, text: str) -> None:
        if pytestconfig.getoption("--record"):
            path.write_text(text, encoding="utf-8")
        assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()

    return compare


@pytest.fixture(scope="session")
def demo() -> ModuleType:
    """The script as a module: one for all tests of a worker."""
    import demo_coco_resnet18

    return demo_coco_resnet18


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One temporary folder for the whole session: the same for all pytest-xdist workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def sample(shared_tmp: Path) -> Path:
    """A small synthetic data set in COCO's layout, made once a session: 96 training and 20
    validation images.
    """
    folder = shared_tmp / "sample"
    with (shared_tmp / "sample.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker makes it, the others wait
        done = folder / "done"
        if not done.exists():
            command = [sys.executable, ROOT / "tools" / "make_sample_coco.py", folder]
            command += ["--images", "96", "--val_images", "20"]
            subprocess.run(command, check=True, timeout=120)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_coco() -> Path:
    """Fifty plus fifty real COCO images with their instances files; they lie beside the checkout,
    not in it.
    """
    folder = ROOT.parent / "shared" / "data" / "tiny_coco"
    if not folder.is_dir():  # skips with --ci as well
        pytest.skip(f"real photos, which no clone has to have: {folder} is not there")
    return folder


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A running SLURM cluster of two nodes."""
    with SlurmCluster() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A launcher is started in a folder with a space and an accent in its name."""
    path = tmp_path / "mein Gerät"
    path.mkdir()
    return path
