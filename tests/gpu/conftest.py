"""The order of these tests, and what they leave: with GPU_RECORDS=FILE.tar the output of all that
they start, NCCL's text and logs. It is written as each of them ends.
"""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import Started, counter

RECORDS = os.environ.get("GPU_RECORDS") and os.path.abspath(os.environ["GPU_RECORDS"])
KEPT = {".log", ".json", ".txt", ".md", ".csv"}
MOST = 2**21  # bytes of one file


def keep(name: str, content: bytes) -> None:
    """Adds a file of the present test to the records, which pytest-xdist's workers share."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].partition(" (")[0]
    entry = tarfile.TarInfo(f"{test or 'session'}/{os.getpid()}-{next(counter)}-{name}")
    entry.size = len(content)
    with open(f"{RECORDS}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tarfile.open(RECORDS, "a") as records:
            records.addfile(entry, io.BytesIO(content))


def forget_and_keep(started: Started) -> None:
    for path in (started.log, started._err):
        if path.exists() and path.stat().st_size:
            text = f"$ {' '.join(started.command)}\nended with {started.process.poll()}\n"
            keep(path.name, text.encode() + path.read_bytes()[-MOST:])
    forget(started)


forget = Started._forget
if RECORDS:
    Started._forget = forget_and_keep


@pytest.fixture(autouse=True)
def keep_files(tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.rglob("*") if RECORDS else ():
        if path.suffix in KEPT and path.is_file() and "instances" not in path.name:
            keep(path.name, path.read_bytes()[-MOST:])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two ranks come first. With --dist loadgroup tests stay with what takes long to make."""
    items.sort(key=lambda item: item.path.name == "test_one_gpu.py")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        if "trained" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("trained"))
        if "gradients" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(item.callspec.id.partition("-")[0]))
