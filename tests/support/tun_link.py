"""A link with a delay, and with losses if asked for, between two network namespaces.

`tc` can shape a rate everywhere, but delay needs netem, which many kernels lack. So each namespace
gets a TUN device, and a process of its own hands what one sends to the other, later:

    with NamespacePair() as nodes, TunLink(nodes.names, delay_ms=2) as link:
        ...  # link.addresses, on interface link.interface of each namespace

Python moves some 100 MB/s: for latency and losses, not for bandwidth.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # linux/if_tun.h
PACKET = 65536


class TunLink:
    """Joins the namespaces by a link; `delay_ms` one way, `loss` the part of packets that go."""

    interface = "tun0"
    addresses = ("10.78.0.1", "10.78.0.2")

    def __init__(self, names: Sequence[str], delay_ms: float = 0, loss: float = 0) -> None:
        self.options = [str(delay_ms / 1e3), str(loss), *names]

    def __enter__(self) -> TunLink:
        self._forwarder = subprocess.Popen(
            [sys.executable, __file__, *self.options],
            stdin=subprocess.PIPE,  # its end, when this process is gone, ends the forwarder too
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._forwarder.stdout.readline() != "ready\n":
            self.__exit__()
            raise RuntimeError("the forwarder of a TunLink did not start: see stderr")
        return self

    def __exit__(self, *_: object) -> None:
        self._forwarder.kill()  # its devices go with it
        self._forwarder.wait()
        self._forwarder.stdin.close()
        self._forwarder.stdout.close()


def tun_device(end: int, namespace: str) -> int:
    """A TUN device in the namespace, up and with its address; the descriptor of its far side."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"tun{os.getpid()}-{end}"  # until it is in the namespace, where it is alone
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    own = f"ip -n {namespace}"
    for command in (
        f"ip link set {name} netns {namespace} name {TunLink.interface}",
        f"{own} address add {TunLink.addresses[end]}/24 dev {TunLink.interface}",
        # Frames as large as the pair's own; a queue that holds what a sender may have under way.
        f"{own} link set {TunLink.interface} mtu 9000 txqueuelen 5000 up",
    ):
        subprocess.run(command.split(), check=True)
    return device


def forward(devices: Sequence[int], delay: float, loss: float) -> None:
    """Hands packets on, `delay` seconds after they came, until stdin ends."""
    waiting = [deque(), deque()]  # of each end, (when it is due, packet), the oldest first
    chance = random.Random(0)
    while True:
        now = time.monotonic()
        for end, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                os.write(devices[end], queue.popleft()[1])
        due = [queue[0][0] - time.monotonic() for queue in waiting if queue]
        ready, _, _ = select.select([0, *devices], [], [], max(0.0, min(due)) if due else None)
        if 0 in ready:
            return
        for device in ready:
            packet = os.read(device, PACKET)
            if chance.random() >= loss:
                other = 1 - devices.index(device)
                waiting[other].append((time.monotonic() + delay, packet))


if __name__ == "__main__":
    delay, loss, *namespaces = sys.argv[1:]
    devices = [tun_device(end, name) for end, name in enumerate(namespaces)]
    with contextlib.suppress(OSError):  # a link's delay does not depend on who else computes
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    forward(devices, float(delay), float(loss))
