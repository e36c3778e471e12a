#!/usr/bin/env python3
"""Checks this node and the way to the other nodes, before a job: what is wrong, and what to do.

    python tools/preflight.py                                              # this node alone
    NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 python tools/preflight.py    # on node 0, and at the
    NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 python tools/preflight.py    # same time on node 1
    srun --nodes=2 --ntasks-per-node=1 python tools/preflight.py           # the same under SLURM

IFNAME=eth0,mlx5_0 names what the job will use. What is wrong with an interface or adapter that
nobody named is a note. The nodes meet at MASTER_PORT (29500), within CONNECT_TIMEOUT (60) seconds.
Node 0 and each other node then try every interface of IFNAME that has an address: the first on
one node with the first on the other, and so on. Linux and IPv4 only.
Not tried: RDMA (an adapter is only looked at on its node), NCCL, the speed, and pairs of nodes
without node 0.
Exit code: 1 if a line begins with WRONG.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

if sys.version_info < (3, 10):
    sys.exit("preflight.py: error: needs Python 3.10 or newer: activate an environment with one")

from analysis.kernel import SYSFS, most_locked, read_node, text_of
from run import UserError, adapter, gpu_is_present, job, names_in, own_addresses, whole

ROOT = Path(__file__).resolve().parents[1]
PORTS = {name: facts for name, facts in read_node()["ports"].items() if name != "lo"}
IFNAME = ["adapters"]
with contextlib.suppress(UserError):  # none is up
    IFNAME = names_in(os.environ.get("IFNAME", ""))
LARGE = b"large packets" * 2000
SECONDS = 3  # to reach a port: TCP sends a lost packet again after 1 s
said = set()  # WRONG, note, ok


def report(wrong: str, fine: str = "", *, named: bool = True) -> None:
    """One line: what is wrong and what to do, or what is fine."""
    word = "ok" if not wrong else "WRONG" if named else "note"
    said.add(word)
    print(f"{word}: {wrong or fine}", flush=True)


# --- This node ---------------------------------------------------------------------------------


# Without an import of torch. The NCCL of a system or a container is no package, and not found.
VERSIONS = """
from importlib.metadata import distributions
for name in "torch", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13":
    for found in distributions(name=name):
        print(name, found.version)
        break
"""


def check_python() -> str:
    """That of the launchers, if there is one that they take. Returns its torch and NCCL."""
    code = 'source "$1"; choose_python; echo "$PYTHON"'
    words = ["bash", "-c", code, "preflight.py", ROOT / "tools/environment.sh"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().rpartition("error: ")[2]
        report(why or "no Python here has PyTorch: run tools/environment.sh")
        return ""
    python = done.stdout.strip()
    report("", f"{python} has torch, torchvision, pycocotools and pillow")
    check_gpus(python)
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True)
    return ", ".join(done.stdout.splitlines())


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
    """Its IPv4 address, or nothing."""
    found = own_addresses().items()
    return next((address for address, name in found if name == interface and "." in address), "")


def check_port(name: str, named: bool) -> None:
    """An interface or adapter; mlx5_0 stands for all of its ports, as for NCCL."""
    states = [facts["state"] for port, facts in PORTS.items() if f"{port}:".startswith(f"{name}:")]
    address, wrong = address_of(name), ""
    if not states:
        wrong = f"there is no {name} on this node: set IFNAME to some of {[*PORTS]}"
    elif "INIT" in states and "ACTIVE" not in states:
        wrong = f"{name} has a cable but waits for a subnet manager {states}: does opensm run, or "
        wrong += "the switch's? See ibstat, sminfo"
    elif "ACTIVE" not in states and text_of(SYSFS / f"class/net/{name}/carrier") != "1":
        wrong = f"{name} is down {states}: see its cable, ibstat; ip link set {name} up"
    elif not address and not adapter(name).exists():
        wrong = f"{name} is up but has no IPv4 address: ip address add ADDRESS/LENGTH dev {name}"
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
    limit = most_locked()
    if limit is not None and limit < 1 << 30:
        wrong = f"only {limit >> 10} KiB may be locked, InfiniBand needs more: ulimit -l unlimited"
        wrong += ", in a container --cap-add=IPC_LOCK"
        report(wrong, named=named)


def check_node() -> str:
    """Returns the versions of torch and NCCL here."""
    versions = check_python()
    for name in IFNAME or PORTS:
        check_port(name, named=bool(IFNAME))
    if any(adapter(name).exists() for name in IFNAME or PORTS):
        check_verbs(named=bool(IFNAME))
    return versions


# --- Between the nodes -------------------------------------------------------------------------


def reach(mine: dict, theirs: dict, address: str) -> str:
    """Sends large packets to the other node's random port; what is wrong on the way there."""
    place = address, theirs["port"]
    way = f"{mine['name']} cannot reach {theirs['name']} at {place[0]}, random port {place[1]}"
    try:
        with socket.create_connection(place, SECONDS) as connection:
            connection.sendall(LARGE)
    except OSError as error:
        return f"{way} ({error}): a firewall? NCCL and Gloo need all ports from 1024 on open"
    return ""


def meet(connection: socket.socket, me: dict) -> tuple[int, str]:
    """Both nodes do the same: tell of themselves, try each network of the other, tell what is
    wrong. Returns the other's rank, and where it was reached.
    """
    networks = [(name, address_of(name)) for name in IFNAME if address_of(name)]
    networks = networks or [("the route to MASTER_ADDR", connection.getsockname()[0])]
    with socket.create_server(("", 0)) as listener, connection.makefile("rb") as stream:

        def swap(value: object) -> object:
            connection.sendall(json.dumps(value).encode() + b"\n")
            return json.loads(stream.readline())

        mine = me | {"networks": networks, "port": listener.getsockname()[1]}
        theirs = swap(mine)
        # One node's interfaces and the other's are paired by position, as by Gloo.
        pairs = min(len(networks), len(theirs["networks"]))
        connection.settimeout(2 * SECONDS * (1 + pairs))
        failed = [reach(mine, theirs, address) for _, address in theirs["networks"][:pairs]]
        not_reached = swap(failed)
        received = set()
        for _ in range(not_reached.count("")):
            with contextlib.suppress(OSError), listener.accept()[0] as other:
                other.makefile("rb").read()
                received.add(other.getsockname()[0])
        lost = []
        for (name, address), failure in zip(networks, not_reached, strict=False):
            text = f"large packets from {theirs['name']} to {mine['name']} at {address} ({name}) "
            text += "get lost: see both MTUs"
            lost.append("" if failure or address in received else text)
        not_received = swap(lost)
    report_differences(*sorted([mine, theirs], key=lambda node: node["rank"]))
    reached = []
    faults = zip(failed, not_reached, lost, not_received, strict=True)
    for (name, address), texts in zip(theirs["networks"], faults, strict=False):
        for text in filter(None, texts):
            report(text)
        if not any(texts):
            reached.append(f"{address} ({name})")
    way = f"{theirs['name']} was reached in both directions at {', '.join(reached)}"
    return theirs["rank"], way if reached else ""


def report_differences(one: dict, two: dict) -> None:
    """Of what two nodes need alike."""
    if len(one["networks"]) != len(two["networks"]):
        first, second = (", ".join(name for name, _ in node["networks"]) for node in (one, two))
        text = f"{one['name']} has {first}, {two['name']} has {second}: in IFNAME name as many "
        report(f"{text}interfaces on both, in the same order")
    if one["versions"] != two["versions"] and one["versions"] and two["versions"]:
        text = f"{one['name']} has {one['versions']}; {two['name']} has {two['versions']}"
        report(f"{text}: install the same on both")


def check_between(nnodes: int, me: dict, host: str, port: int, seconds: int) -> list[str]:
    """Returns where the other nodes were reached."""
    rank = me["rank"]
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        text = "this check needs one that every node knows"
        raise UserError(f"MASTER_ADDR {host} is no IPv4 address here ({error}): {text}") from None
    if address.startswith("127."):
        report(f"MASTER_ADDR {host} is {address} here (/etc/hosts): give an address others reach")
        if rank:
            return []
    reached = []
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
                came, way = meet(connection, me)
            if came not in missing:
                report(f"NODE_RANK={came} came twice, or is not below NNODES: give each its own")
            missing.discard(came)
            reached.append(way)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error
            time.sleep(0.5)
    for other in missing:
        way = f"this node cannot reach node 0 ({why})" if rank else f"node {other} did not come"
        report(
            f"{way}, {host} port {port}, in {seconds} s: was this command started on both, each "
            "with its own NODE_RANK? Is there a firewall, or another program at that port?"
        )
    return [way for way in reached if way]


def conclude(nnodes: int, reached: list[str]) -> None:
    """The last line claims what was tried, and no more."""
    adapters = ",".join(name for name in IFNAME if adapter(name).exists())
    untried = ["RDMA" + f" over {adapters}" * bool(adapters), "NCCL", "the speed"]
    if nnodes == 1:
        untried.insert(0, "other nodes")
    elif nnodes > 2:
        untried.insert(0, "pairs of nodes without node 0")
    text = "; ".join(["this node was looked at", *reached])
    text += f"; not tried: {', '.join(untried)}"
    report(text if "WRONG" in said else "", text, named=False)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    versions = check_node()
    nnodes, reached = "1", []
    try:
        if any(map(os.environ.get, ("NNODES", "WORLD_SIZE", "SLURM_STEP_ID"))):
            names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"
            found = job({**os.environ, "GPUS_PER_NODE": "1", "GPUS": ""})
            nnodes, rank, host, port = (found[name] for name in names)
            port = whole("MASTER_PORT", port, 1, 65535)
            wait = os.environ.get("CONNECT_TIMEOUT") or "60"
            seconds = whole("CONNECT_TIMEOUT", wait, 1, 1_000_000)
            if int(nnodes) > 1:
                me = {"rank": int(rank), "name": f"node {rank} ({socket.gethostname()})"}
                me["versions"] = versions
                reached = check_between(int(nnodes), me, host, port, seconds)
    except (UserError, ValueError) as error:
        report(str(error))
    except OSError as error:
        report(f"{host}:{port}: {error}: see MASTER_ADDR, and MASTER_PORT, which must be free")
    except KeyboardInterrupt:
        return 130
    conclude(int(nnodes), reached)
    return 1 if "WRONG" in said else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough is no error
    sys.exit(main())
