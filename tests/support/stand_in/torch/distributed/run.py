"""torchrun as the launchers know it: starts ranks, ends them together, reports how they ended.

Where tests start this one, tests/run.sh --ci starts the real one as well.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRACE = 30  # seconds from the first signal to SIGKILL, as torchrun has it
CLOSING = (
    "W1122 10:00:00.000 {own} torch/distributed/elastic/multiprocessing/api.py:1] "
    "Sending process {pid} closing signal {name}"
)
FAILED = "E1122 10:00:00.000 {pid} torch/distributed/run.py:1] failed (exitcode: {code})"
REPORT = "  rank      : {rank} (local_rank: {local})\n  exitcode  : {code} (pid: {pid})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--nproc_per_node", type=int, required=True)
    parser.add_argument("--rdzv_backend", choices=["static"])
    parser.add_argument("--rdzv_endpoint")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.standalone:
        with socket.create_server(("127.0.0.1", 0)) as server:
            args.rdzv_endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    return args


def spawn(args: argparse.Namespace, local: int) -> subprocess.Popen:
    host, _, port = args.rdzv_endpoint.rpartition(":")
    place = {
        "RANK": args.node_rank * args.nproc_per_node + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": args.nnodes * args.nproc_per_node,
        "LOCAL_WORLD_SIZE": args.nproc_per_node,
        "GROUP_RANK": args.node_rank,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": error_file(local),
    }
    command = [sys.executable, "-u", args.script, *args.arguments]
    env = os.environ | {name: str(value) for name, value in place.items()}
    env.pop("PYTHONPATH", None)  # this stand-in is not for the ranks
    return subprocess.Popen(command, env=env, start_new_session=True)


def error_file(local: int) -> Path:
    path = Path(os.environ["PET_LOG_DIR"], "run", "attempt_0", str(local), "error.json")
    path.parent.mkdir(parents=True)
    return path


def end(ranks: list[subprocess.Popen], number: int) -> None:
    """Of the ranks that are left."""
    for rank in ranks:
        if rank.poll() is None:
            name = signal.Signals(number).name
            print(CLOSING.format(own=os.getpid(), pid=rank.pid, name=name), file=sys.stderr)
            rank.send_signal(number)
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        try:
            rank.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("PET_LOG_DIR", folder)
        return run()


def run() -> int:
    args, signals = parse_arguments(), []
    handled = os.environ.get("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    for name in handled.split(","):
        signal.signal(signal.Signals[name], lambda number, _: signals.append(number))
    ranks = [spawn(args, local) for local in range(args.nproc_per_node)]
    while not signals and not any(rank.poll() for rank in ranks):
        if all(rank.poll() == 0 for rank in ranks):
            return 0
        time.sleep(0.02)
    failed = [(local, rank) for local, rank in enumerate(ranks) if rank.poll()]
    end(ranks, signals[0] if signals else signal.SIGTERM)
    for local, rank in failed:
        about = {"code": rank.returncode, "pid": rank.pid, "local": local}
        about["rank"] = args.node_rank * args.nproc_per_node + local
        print(FAILED.format(**about), REPORT.format(**about), sep="\n", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
