"""The processes under this one: found (on Linux), ended, and tied to its life."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Ranks whose torchrun is gone become children of this process, which then can end them."""
    if LIBC:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def tied_to(parent: int) -> None:
    """In the child: torchrun does not outlive its supervisor; the ranks then end by themselves."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants() -> dict[int, int]:
    """{process: its parent} of those under this one that are alive, torchrun's ranks included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, parents = {}, [os.getpid()]
    for parent in parents:
        found |= dict.fromkeys(children.get(parent, []), parent)
        parents += children.get(parent, [])
    return found


def ranks_alive(torchrun: int) -> set[int]:
    """The ranks that torchrun has started and that are there, orphaned or not."""
    found = set()
    for process, parent in descendants().items():
        if parent in (torchrun, os.getpid()):  # a rank's loader workers have its variables, too
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                found |= {int(v[5:]) for v in variables if v.startswith(b"RANK=")}
    return found


def kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def end_the_rest(seconds: float, say: Callable[[str], None]) -> None:
    """Gives processes that are left so long to end by themselves, then kills them.

    NOTE: no SIGTERM: one rank that stops on a signal makes all stop, on every node, for good.
    """
    end, kills = time.monotonic() + seconds, 0
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants()
        if not left or kills == 12:  # some a kernel's driver does not let go
            return
        if time.monotonic() > end:
            say(f"killing what is left of this attempt: {len(left)} processes")
            kill(left)
            end, kills = time.monotonic() + 5, kills + 1
        time.sleep(0.1)
