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

from launcher.output import counted

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# In the environment of what this process starts, and of what that starts in turn.
OWN = {"DEMO_SUPERVISOR": f"{os.getpid()}-{time.time_ns()}"}


def adopt_orphans() -> None:
    """Ranks whose torchrun is gone become children of this process, which then can end them."""
    if LIBC:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def tied_to(parent: int, number: int = signal.SIGKILL) -> None:
    """In the child: it does not outlive its parent, but gets this signal. Linux alone knows that.

    Torchrun is killed with its supervisor, and its ranks then end by themselves.
    """
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it was gone before: nobody sends the signal any more
            os._exit(1)


def children_of_all() -> dict[int, list[int]]:
    """{process: its children} of those that are alive."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    return children


def below(parents: list[int], children: dict[int, list[int]]) -> dict[int, int]:
    """{process: its parent} of those under these."""
    found, parents = {}, [*parents]
    for parent in parents:
        found |= dict.fromkeys(children.get(parent, []), parent)
        parents += children.get(parent, [])
    return found


def descendants() -> dict[int, int]:
    """{process: its parent} of all under this one that are alive."""
    return below([os.getpid()], children_of_all())


def own_descendants() -> dict[int, int]:
    """Those of them that this process has started, torchrun's ranks included.

    Not what the shell had started that became this process (`monitor & exec ...`), nor what has
    lost its parent and come to this one, as in a container whose first process this is.
    """
    children, own = children_of_all(), os.getpid()
    first = [process for process in children.get(own, []) if has_own_mark(process)]
    return dict.fromkeys(first, own) | below(first, children)


def has_own_mark(process: int) -> bool:
    """By its environment; one that shows none, as under a title that it gave itself, counts."""
    environment = Path(f"/proc/{process}/environ")
    try:
        variables = environment.read_bytes()
        if not variables:  # as for a moment amid its exec; or it is ending, but not gone
            time.sleep(0.05)
            variables = environment.read_bytes()
    except OSError:  # it is gone, or another user's
        return False
    ((name, value),) = OWN.items()
    return f"{name}={value}".encode() in variables.split(b"\0") or b"=" not in variables


def ranks_alive(torchrun: int) -> set[int]:
    """The ranks that torchrun has started and that are there, orphaned or not."""
    found = set()
    for process, parent in own_descendants().items():
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
        left = own_descendants()
        if not left or kills == 12:  # some a kernel's driver does not let go
            return
        if time.monotonic() > end:
            count = counted(len(left), "process", "processes")
            say(f"killing what is left of this attempt: {count}")
            kill(left)
            end, kills = time.monotonic() + 5, kills + 1
        time.sleep(0.1)
