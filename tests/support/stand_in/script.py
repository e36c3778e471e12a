"""In the script's place: says what it was given, and does what the file `plan` says.

The plan has one word for each attempt, the last one for all that follow; or label=action, for the
runs of that RUN_NAME.
"""

import itertools
import json
import os
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NAMES = ("NCCL_", "GLOO_", "OMP_", "IFNAME", "NETWORK", "RUN_NAME", "DEMO_SET")
report = {
    "rank": rank,
    "world_size": world_size,
    "argv": sys.argv[1:],
    "port": os.environ["MASTER_PORT"],
    "node_rank": os.environ["GROUP_RANK"],
    "script": Path(__file__).name,
    "env": {name: value for name, value in os.environ.items() if name.startswith(NAMES)},
}


def say(text):
    print(text + "\n", end="", flush=True)  # in one piece


say(f"REPORT {json.dumps(report)}")
folder = Path(__file__).parent
is_probe = folder.name == "tools"
folder = folder.parent if is_probe else folder


def attempts(rank):
    count = folder / f"attempts{rank}"
    return len(count.read_text()) if count.exists() else 0


attempt = attempts(rank)
(folder / f"attempts{rank}").write_text("x" * (attempt + 1))
plan = (folder / "plan").read_text().split()
if "=" in plan[0]:
    named = dict(word.split("=") for word in plan)
    action = "done" if is_probe else named.get(os.environ.get("RUN_NAME"), "done")
else:
    action = plan[min(attempt, len(plan) - 1)]


def end(text, kind, code):
    """As the script does: a line, and the same in torchelastic's error file."""
    say(text)
    about = {"kind": kind, "rank": rank, "timestamp": time.time(), "py_callstack": text}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(
        json.dumps({"message": {"message": text, "extraInfo": about}})
    )
    (folder / "said").touch()
    sys.exit(code)


def wait_for_all():
    """Torchrun, when one fails, ends also the ranks that have not come so far."""
    while any(attempts(other) <= attempt for other in range(world_size)):
        time.sleep(0.02)


def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)


def fail_with_a_bug():
    """Rank 1 sees rank 0 go, and says so first."""
    if rank:
        wait_for("raising")
        end("[CPU 1] ERROR: in step 3: Connection closed by peer", "lost", 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action == "traceback":  # takes longer on a busy machine than the launcher waits for ranks
        from torch.distributed.elastic.multiprocessing.errors import record
    (folder / "raising").touch()
    time.sleep(0.3 * (world_size - 1))
    if action == "bug":  # as the script does
        end("[CPU 0] RuntimeError: a bug in the script", "bug", 1)

    def main():
        raise ValueError("a bug in the script")

    record(main)()


def wait_for_a_signal():
    """Until then as the script does: save, say so, code 75."""
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stopped.append(signal.Signals(number).name))
    say(f"[CPU {rank}] waiting {os.getpid()}")
    while not stopped:
        time.sleep(0.05)
    time.sleep(0.5)
    end(f"[CPU {rank}] Stopped on {stopped[0]} | step 12 | exit code 75", "asked", 75)


def send():
    """Node 1 sends to node 0 as fast as the link lets it."""
    if rank == 0:
        server = socket.create_server(("10.213.0.1", 29400))
        connection = server.accept()[0]
        size, marks = 0, []  # one every 2 MB; at the first of them the queue has filled
        while data := connection.recv(1 << 20):
            size += len(data)
            if size > 2_000_000 * (len(marks) + 1):
                marks.append((size, time.perf_counter()))
        # In one or two of these parts the machine may do something else.
        parts = itertools.pairwise(marks)
        rate = statistics.median(8e-6 * (b - a) / (t - s) for (a, s), (b, t) in parts)
        mtu = Path("/sys/class/net/veth0/mtu").read_text().strip()
        say(f"RATE {rate:.2f} MTU {mtu}")
        return
    for _ in range(100):
        try:
            connection = socket.create_connection(("10.213.0.1", 29400))
            break
        except OSError:
            time.sleep(0.1)
    connection.sendall(bytes(30_000_000))
    connection.close()


if action == "error":
    if rank:
        wait_for("said")
    end(f"[CPU {rank}] ERROR: no such folder: /nowhere{rank}", "user", 1)
elif action == "lost":
    wait_for_all()
    end(f"[CPU {rank}] ERROR: in step 3: Connection closed by peer", "lost", 1)
elif action in ("bug", "traceback"):
    fail_with_a_bug()
elif action == "kill":
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif action == "silent":
    wait_for_all()
    say("the last words")
    sys.exit(3)
elif action == "wait":
    wait_for_a_signal()
elif action == "hang":  # neither torchrun's end nor a signal ends it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(f"[CPU {rank}] hanging {os.getpid()}")
    time.sleep(120)
elif action == "send":
    send()
