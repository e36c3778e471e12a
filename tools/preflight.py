#!/usr/bin/env python3
"""Checks this node and the way to the other nodes, before a job: what is wrong, and what to do.

    python tools/preflight.py                                              # this node alone
    NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 python tools/preflight.py    # on node 0, and at the
    NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 python tools/preflight.py    # same time on node 1
    srun --nodes=2 --ntasks-per-node=1 python tools/preflight.py           # the same under SLURM

IFNAME=eth0,mlx5_0 names what the job will use. What is wrong with an interface or adapter that
nobody named is a note. The nodes meet at MASTER_PORT (29500), within CONNECT_TIMEOUT (60) seconds.
Linux and IPv4 only. Exit code: 1 if a line begins with WRONG.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from analysis.kernel_counters import SYSFS, text_of
from analysis.node import most_locked, read_node
from run import UserError, adapter, gpu_is_present, job, whole

ROOT = Path(__file__).resolve().parents[1]
PORTS = {name: facts for name, facts in read_node()["ports"].items() if name != "lo"}
IFNAME = [name for name in os.environ.get("IFNAME", "").split(",") if name]
LARGE = b"large packets" * 2000
SECONDS = 3  # to reach a port: TCP sends a lost packet again after 1 s
said = set()  # WRONG, note, ok


def report(wrong: str, fine: str = "", *, named: bool = True) -> None:
    """One line: what is wrong and what to do, or what is fine."""
    word = "ok" if not wrong else "WRONG" if named else "note"
    said.add(word)
    print(f"{word}: {wrong or fine}", flush=True)


# --- This node ---------------------------------------------------------------------------------


def check_python() -> None:
    """That of the launchers, if there is one that they take."""
    code = 'source "$1"; choose_python; echo "$PYTHON"'
    words = ["bash", "-c", code, "preflight.py", ROOT / "tools/environment.sh"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().rpartition("error: ")[2]
        report(why or "no Python here has PyTorch: run tools/environment.sh")
        return
    python = done.stdout.strip()
    report("", f"{python} has torch, torchvision, pycocotools and pillow")
    check_gpus(python)


# For that Python: how many GPUs the script can use. Its error says why none.
GPUS = "import types, demo_coco_resnet18 as demo\n"
GPUS += "print(demo.usable_gpus(types.SimpleNamespace(device='cuda')))"


def check_gpus(python: str) -> None:
    if not gpu_is_present():
        text = "this node has no NVIDIA GPU, or they are hidden: training uses the CPU"
        report(text, named=False)
        return
    done = subprocess.run([python, "-c", GPUS], cwd=ROOT, capture_output=True, text=True)
    says = (done.stdout or done.stderr).strip().rpartition("\n")[2].rpartition("UserError: ")[2]
    report("" if says.isdecimal() else f"{python}: {says}", f"PyTorch can use {says} GPU(s)")


def address_of(interface: str) -> str:
    asked = interface.encode().ljust(256, b"\0")
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as trial:
        return socket.inet_ntoa(fcntl.ioctl(trial, 0x8915, asked)[20:24])  # SIOCGIFADDR
    return ""


def check_port(name: str, named: bool) -> None:
    """An interface or adapter; mlx5_0 stands for all of its ports, as for NCCL."""
    states = [facts["state"] for port, facts in PORTS.items() if f"{port}:".startswith(f"{name}:")]
    address, wrong = address_of(name), ""
    if not states:
        wrong = f"there is no {name} on this node: set IFNAME to some of {[*PORTS]}"
    elif "ACTIVE" not in states and text_of(SYSFS / f"class/net/{name}/carrier") != "1":
        wrong = f"{name} is down {states}: see its cable, ibstat; ip link set {name} up"
    elif not address and not adapter(name).exists():
        wrong = f"{name} is up but has no address: ip address add ADDRESS/LENGTH dev {name}"
    report(wrong, f"{name} is up: {address or states}", named=named)


def check_verbs(named: bool) -> None:
    """What a process needs to use an adapter. Without it NCCL may take sockets, silently."""
    wrong = "libibverbs.so.1 does not load: install libibverbs1 and ibverbs-providers (rdma-core)"
    with contextlib.suppress(OSError):
        wrong = "" if ctypes.CDLL("libibverbs.so.1") else wrong
    report(wrong, "libibverbs loads", named=named)
    wrong = "there is no /dev/infiniband/uverbs*: modprobe ib_uverbs, or give it to the container"
    devices = [path.name for path in Path("/dev/infiniband").glob("uverbs*")]
    report("" if devices else wrong, f"/dev/infiniband has {devices}", named=named)
    if (limit := most_locked()) is not None and limit < 1 << 30:
        wrong = f"only {limit >> 10} KiB may be locked, InfiniBand needs more: ulimit -l unlimited"
        wrong += ", in a container --cap-add=IPC_LOCK"
        report(wrong, named=named)


def check_node() -> None:
    check_python()
    for name in IFNAME or PORTS:
        check_port(name, named=bool(IFNAME))
    if any(adapter(name).exists() for name in IFNAME or PORTS):
        check_verbs(named=bool(IFNAME))


# --- Between the nodes -------------------------------------------------------------------------


def reach(mine: dict, theirs: dict) -> list[str]:
    """Sends large packets to the other node's random port; what is wrong on the way there."""
    place = theirs["address"], theirs["port"]
    way = f"{mine['name']} cannot reach {theirs['name']} at {place[0]}, random port {place[1]}"
    try:
        with socket.create_connection(place, SECONDS) as connection:
            connection.sendall(LARGE)
    except OSError as error:
        return [f"{way} ({error}): a firewall? NCCL and Gloo need all ports from 1024 on open"]
    return []


def meet(connection: socket.socket, rank: int) -> int:
    """Both nodes do the same: tell of themselves, try the other's port, tell what is wrong."""
    own = connection.getsockname()[0]
    mine = {"rank": rank, "name": f"node {rank} ({socket.gethostname()})"}
    mine["address"] = next(filter(None, map(address_of, IFNAME)), own)
    with socket.create_server(("", 0)) as listener, connection.makefile("rb") as stream:

        def swap(value: object) -> object:
            connection.sendall(json.dumps(value).encode() + b"\n")
            return json.loads(stream.readline())

        theirs = swap(mine | {"port": listener.getsockname()[1]})
        both = f"{mine['name']} and {theirs['name']}"
        wrong = reach(mine, theirs)
        not_reached = swap(wrong)
        wrong += not_reached
        if not not_reached:
            received = b""
            with contextlib.suppress(OSError), listener.accept()[0] as other:
                received = other.makefile("rb").read()
            if received != LARGE:
                wrong.append(f"large packets from {theirs['name']} get lost: see both MTUs")
    for text in wrong or [""]:
        report(text, f"{both} reach each other in both directions")
    return theirs["rank"]


def check_between(nnodes: int, rank: int, host: str, port: int, seconds: int) -> None:
    if (address := socket.gethostbyname(host)).startswith("127."):
        report(f"MASTER_ADDR {host} is {address} here (/etc/hosts): give an address others reach")
        if rank:
            return
    socket.setdefaulttimeout(2 * SECONDS)
    listener = None if rank else socket.create_server(("", port))
    missing = {0} if rank else set(range(1, nnodes))
    end, why = time.monotonic() + seconds, ""
    while missing and time.monotonic() < end:
        try:
            if listener:
                listener.settimeout(1)
                connection, _ = listener.accept()
            else:
                connection = socket.create_connection((host, port))
            with connection:
                came = meet(connection, rank)
            if came not in missing:
                report(f"NODE_RANK={came} came twice, or is not below NNODES: give each its own")
            missing.discard(came)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error
            time.sleep(0.5)
    for other in missing:
        way = f"this node cannot reach node 0 ({why})" if rank else f"node {other} did not come"
        report(
            f"{way}, {host} port {port}, in {seconds} s: was this command started on both, each "
            "with its own NODE_RANK? Is there a firewall, or another program at that port?"
        )


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    check_node()
    try:
        if any(map(os.environ.get, ("NNODES", "WORLD_SIZE", "SLURM_STEP_ID"))):
            names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"
            found = job({**os.environ, "GPUS_PER_NODE": "1"})
            nnodes, rank, host, port = (found[name] for name in names)
            port = whole("MASTER_PORT", port, 1, 65535)
            wait = os.environ.get("CONNECT_TIMEOUT") or "60"
            seconds = whole("CONNECT_TIMEOUT", wait, 1, 1_000_000)
            if int(nnodes) > 1:
                check_between(int(nnodes), int(rank), host, port, seconds)
    except (UserError, ValueError) as error:
        report(str(error))
    except OSError as error:
        report(f"{host}:{port}: {error}: see MASTER_ADDR, and MASTER_PORT, which must be free")
    except KeyboardInterrupt:
        return 130
    return 1 if "WRONG" in said else 0


if __name__ == "__main__":
    sys.exit(main())
