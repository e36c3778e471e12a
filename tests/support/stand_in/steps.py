"""In the script's place: ranks that are joined as the script's are, by sockets in place of Gloo.

In each step all wait for all, --timeout seconds at most; they keep their phase, leave error files,
and on a signal agree to save and stop. `--fault RANK:STEP:WHAT` happens before a first restart,
`again` after it, too.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--timeout", type=float, default=300)
parser.add_argument("--steps", type=int, default=99999)
parser.add_argument("--first", default="rendezvous:0", help="PHASE:SECONDS before all meet")
parser.add_argument("--orphan", action="store_true", help="goes on without its torchrun")
parser.add_argument("--checkpoint")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--fault", action="append", default=[])
args = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
phases = Path(os.environ["DEMO_PHASES"])
now, stopped, parent = "", "", os.getppid()


def say(text):
    os.write(1, f"{text}\n".encode())  # in one piece


def phase(text):
    global now
    now = text
    new = phases / f".{rank}"
    new.write_text(text + "\n")
    new.replace(phases / str(rank))


def stop(number, _frame):
    global stopped
    stopped = signal.Signals(number).name


def end(kind, text, code=1):
    """As the script does: a line, and the same in torchelastic's error file."""
    text = f"[CPU {rank}] {text}"
    say(text)
    about = {"kind": kind, "rank": rank, "phase": now, "timestamp": time.time()}
    about = {"message": {"message": text, "extraInfo": about}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(about))
    os._exit(code)


def meet():
    """Rank 0's connections to all, the others' to rank 0."""
    if rank == 0:
        server = socket.create_server(("", place[1]), backlog=world_size)
        server.settimeout(args.timeout)
        return [server.accept()[0] for _ in range(world_size - 1)]
    for _ in range(int(10 * args.timeout)):
        try:
            return [socket.create_connection(place, args.timeout)]
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError("rank 0 did not come")


def agree(peers):
    """Whether any rank has got a signal: all wait for all."""
    word = b"S" if stopped else b"."
    if rank:
        peers[0].sendall(word)
    heard = [peer.recv(1) for peer in peers]
    if not all(heard):
        raise ConnectionError("Connection closed by peer")
    if rank == 0:
        word = b"S" if stopped or b"S" in heard else b"."
        for peer in peers:
            peer.sendall(word)
        return word == b"S"
    return heard == [b"S"]


def meet_fault(step):
    """Does what --fault says of this rank and step."""
    for fault in args.fault:
        who, when, what = fault.split(":", 2)
        if (int(who), int(when)) != (rank, step) or (args.resume and what != "again"):
            continue
        say(f"FAULT {time.time()}")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "again":
            end("bug", "RuntimeError: wrong shapes")
        else:
            end("user", "ERROR: in step 3: CUDA out of memory. Give less than --batch_size 8")


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
say(f"PHASES {phases}")
first, seconds = args.first.split(":")
phase(first)
time.sleep(float(seconds))
phase("rendezvous")
try:
    peers = meet()
    for peer in peers:
        peer.settimeout(args.timeout)
    for step in range(1, args.steps + 1):
        phase(f"the data of step {step}")
        time.sleep(0.1)
        meet_fault(step)
        if os.getppid() != parent and not args.orphan:  # its torchrun is gone
            end("stopped", f"Stopped on the end of its parent process | step {step}", 75)
        phase(f"step {step}")
        all_stop = agree(peers)
        say(f"[CPU {rank}] Epoch 1 | Step {step} | Loss: 1.0000")
        if rank == 0 and args.checkpoint:
            Path(args.checkpoint).write_text(str(step))
        if all_stop:
            # One that only heard of it does not name the signal itself.
            end("asked", f"Stopped on {stopped or 'SIGTERM'} | step {step} | exit code 75", 75)
except OSError as error:
    end("lost", f"ERROR: in {now}: {error}")
sys.exit(0)
