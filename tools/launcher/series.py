"""Node 0's lock, token and name of its series, before anything of it is written.

    series.py [options] -- COMMAND...

launch_multinode.sh has itself started anew by this where it is to choose the run's name: on node
0, and where there is one node alone. What is taken here is held by the process that COMMAND
becomes, and the kernel gives it back when that ends, whatever ends it:
- the port, so that a second start on this machine finds the first before it harms it. It is a
  name, not a file: an abstract socket, which a network namespace has of its own as it has its
  ports, which every user sees, and for which nothing has to be written (on Linux);
- the run's folder, by a lock on its run.lock, so that no two runs write there. A name that is made
  up is that of a new folder; one that was given (RUN_NAME) stays as it is: what an earlier run has
  left there is renamed, unless this start goes on with it.
In the environment COMMAND finds DEMO_SERIES, for Series, and DEMO_RUN, the run's name.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import getpass
import json
import os
import re
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the launcher starts this file

from launcher.errors import Refused
from launcher.wire import fits, is_text, printable, read_line, unpack

KEPT = re.compile(r"node\d+\.log|nccl\..*\.log")  # what a run leaves beside its checkpoint


@dataclass
class Series:
    """What a node knows of the series that it belongs to; see series.py."""

    token: str = ""  # node 0's own; the others learn it when they are admitted
    run: str = ""  # its name, which node 0 has chosen, a folder under LOG_DIR
    about: str = ""  # node 0's: who runs it, for those who come too late
    lock: socket.socket | None = None  # node 0's: it listens as long as the series lives
    job: dict[str, str] = field(default_factory=dict)  # what tells it from another job


def this_job(rdzv_id: str = "") -> dict[str, str]:
    """What tells this job from another one."""
    job = {name: os.environ.get(name, "") for name in ("SLURM_JOB_ID", "RUN_NAME")}
    job |= {"--rdzv_id": rdzv_id, "uid": str(os.getuid())}
    with contextlib.suppress(OSError, KeyError):  # a number without a name, as in containers
        job["user"] = getpass.getuser()
    return {name: printable(value, 300) for name, value in job.items() if value}


def stranger(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Why a node with these facts belongs to another job than ours; empty if it may be of ours.

    What both have been given decides: if it differs they are two jobs, if it is the same they are
    one. Only where they have nothing of that in common the user counts.
    """
    given = ("SLURM_JOB_ID", "--rdzv_id", "RUN_NAME")
    both = [name for name in given if ours.get(name) and theirs.get(name)]
    for name in both:
        if ours[name] != theirs[name]:
            return f"{name} is {ours[name]} on node 0 but {theirs[name]} there"
    # On two machines one person may have two names, or two numbers.
    same = [name for name in ("user", "uid") if ours.get(name) == theirs.get(name)]
    if not both and not same and ours.get("user") and theirs.get("user"):
        return f"node 0 is of user {ours['user']}, that node of {theirs['user']}"
    return ""


# --- The lock of a port ------------------------------------------------------------------------


def lock_port(port: int) -> socket.socket | None:
    """Holds it for this process and what it becomes; Refused, with who has it, if another has."""
    if sys.platform != "linux":
        return None
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0demo_coco_resnet18 series at port {port}")
    except OSError:
        raise Refused(
            f"port {port} has a series that goes on ({who_holds(lock, port)}): end it first, or "
            "set another MASTER_PORT on every node"
        ) from None
    lock.listen()
    lock.set_inheritable(True)
    return lock


def who_holds(mine: socket.socket, port: int) -> str:
    """What the holder of a port says of itself; its process alone while it does not listen."""
    with contextlib.suppress(OSError, ValueError):
        mine.settimeout(2)
        mine.connect(f"\0demo_coco_resnet18 series at port {port}")
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", mine.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        with contextlib.suppress(OSError, ValueError):
            greeting = unpack(read_line(mine, time.monotonic() + 1, lambda: None))
            if fits(greeting, {"about": is_text}) and greeting["about"]:
                return greeting["about"]
        return f"pid {pid}"
    return "it does not say whose"


# --- The run's folder --------------------------------------------------------------------------


def new_folder(parent: Path, name: str, goes_on: bool) -> Path:
    """parent/name or name-2, name-3, ...: a new one; where it goes on, the last that is there."""
    last, folder, n = None, parent / name, 1
    while not (goes_on and last and not folder.exists()):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        n += 1
        last, folder = folder, parent / f"{name}-{n}"
    return last


def lock_folder(folder: Path, about: str) -> None:
    """Holds it for this process and what it becomes. Raises Refused if a live run has it."""
    lock = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(lock, 1000).decode(errors="replace").strip()
        who = who if who and is_text(who) else "?"
        raise Refused(
            f"{folder} is the folder of a run that goes on ({who}): give another RUN_NAME"
        ) from None
    except OSError:  # some file systems of networks and clusters know no locks
        pass
    os.set_inheritable(lock, True)
    with contextlib.suppress(OSError):  # a full disk: then it does not say whose the folder is
        os.truncate(lock, 0)
        os.write(lock, f"{about}\n".encode())


def keep_earlier(folder: Path, pattern: re.Pattern = KEPT) -> str:
    """Renames what an earlier run has left in the folder; what there is to say of it."""
    moment, found = time.strftime("%Y%m%d-%H%M%S"), []
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) and path.is_file():
            path.rename(f"{path}.{moment}")
            found.append(path.name)
    if not found:
        return ""
    return (
        f"{folder} has logs of an earlier run, and this is no --resume: kept under their names "
        f"with .{moment} added"
    )


# --- The command line --------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--port", type=int, default=0, help="of node 0, to lock; 0 where there is one node")
    add("--log_dir", type=Path, required=True, help="where the runs' folders are")
    add("--run_name", default="", help="as the user gave it; else one is made of --base")
    add("--base", default="run", help="of a name that is made")
    add("--goes_on", action="store_true", help="with what an earlier start has left there")
    add("--name", default="series.py", help="before each message")
    at = argv.index("--")
    return parser.parse_args(argv[:at]), argv[at + 1 :]


def choose_folder(options: argparse.Namespace) -> Path:
    """The run's, made if it is not there."""
    if options.run_name:
        folder = Path(f"{options.log_dir}/{options.run_name}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    options.log_dir.mkdir(parents=True, exist_ok=True)
    return new_folder(options.log_dir, options.base, options.goes_on)


def take(options: argparse.Namespace) -> dict[str, str]:
    """Takes lock, name and folder; what the environment is to have of them. Raises Refused."""
    series = from_environment()  # of networks.py, whose runs are of one series
    if options.port and not series.token:
        series.lock = lock_port(options.port)
    series.token = series.token or secrets.token_hex(8)
    if not is_text(options.run_name, 255):
        raise Refused("RUN_NAME is no name: give printable characters, up to 255")
    try:
        folder = choose_folder(options)
        series.about = about_this("" if os.environ.get("NETWORKS") else str(folder / "node0.log"))
        lock_folder(folder, series.about)
    except OSError as error:
        raise Refused(
            f"the log folder {options.log_dir / (options.run_name or options.base)} cannot be "
            f"made or written ({error.strerror}): set LOG_DIR to one that can"
        ) from None
    series.run = options.run_name or folder.name
    if not options.goes_on and (kept := keep_earlier(folder)):
        print(f"{options.name}: {kept}", file=sys.stderr)
    known = {"DEMO_SERIES": to_environment(series), "DEMO_RUN": series.run}
    if series.lock:
        series.lock.detach()  # it stays open for the command, whatever becomes of this object
    return known


def of_this_node(node_rank: int, nnodes: int, port: int, log: str, rdzv_id: str = "") -> Series:
    """What this process knows of its series; node 0's without a launcher takes the port itself."""
    series = from_environment()
    series.job = this_job(rdzv_id)
    if node_rank == 0 and nnodes > 1 and not series.token:
        series.lock, series.token = lock_port(port), secrets.token_hex(8)
        series.about = about_this(log)
    return series


def about_this(log: str) -> str:
    """For those who come too late."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"pid {os.getpid()} on {socket.gethostname()}, since {since}"
    return printable(f"{text}, log {log}" if log else text, 1000)


def to_environment(series: Series) -> str:
    lock = series.lock.fileno() if series.lock else -1
    return json.dumps(
        {"token": series.token, "run": series.run, "about": series.about, "lock": lock}
    )


def from_environment() -> Series:
    """The series that this process was started for; an empty one if for none."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(os.environ.get("DEMO_SERIES", ""))
        series = Series(found["token"], found["run"], found["about"])
        with contextlib.suppress(OSError):
            if found["lock"] >= 0:
                series.lock = socket.socket(fileno=found["lock"])
        return series
    return Series()


def main() -> None:
    options, command = parse_arguments(sys.argv[1:])
    try:
        os.environ.update(take(options))
    except (Refused, OSError) as error:
        sys.exit(f"{options.name}: error: {error}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
