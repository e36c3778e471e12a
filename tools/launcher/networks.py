"""One run over each of several networks, on all nodes together, then the comparison.

    NETWORKS="ethernet=eth0 infiniband=mlx5_0" NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 \\
        ./launch_multinode.sh --coco_image_path ...

launch_multinode.sh calls this with LOG_DIR as an argument and its settings in the environment, and
is called by it in turn, for one network after the other. A network is NAME=INTERFACE, where NAME
is a label and becomes the folder of its run; INTERFACE is what IFNAME takes, eth0 or mlx5_0,ib0.
Labels and their order are the same on all nodes; each node names its own interfaces.
A network that fails does not end the series. On node 0 the comparison comes at the end, after what
DEMO_NOTE says: it is printed, and stands as compare.md and compare.png beside the logs.
Exit code: 0 all done; 75 stopped by a signal, before a checkpoint 128 + its number (143, Ctrl-C
130); else that of the first network that failed, or of the comparison.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the launcher starts this file

from launcher.addresses import check_master
from launcher.ending import STOPPED
from launcher.errors import Refused, Stopped
from launcher.process_tree import tied_to
from launcher.rendezvous import LABELS, Plan, Rendezvous
from launcher.series import Series, keep_earlier, of_this_node, to_environment
from launcher.signals import exit_code, handle_stop_signals
from launcher.torchrun_command import timeout_of

TOOLS = Path(__file__).resolve().parents[1]
LAUNCHER = TOOLS.parent / "launch_multinode.sh"


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal may be gone, a disk full
        print(f"networks.py: {text}", file=sys.stderr, flush=True)


def read_networks(text: str) -> dict[str, str]:
    """{label: interfaces} of NETWORKS. Raises Refused."""
    networks: dict[str, str] = {}
    for word in text.split():
        match = re.fullmatch(r"(\w[\w.-]*)=([\w.:@,-]+)", word)
        if not match:
            raise Refused(
                f"NETWORKS has '{word}': write NAME=INTERFACE, of letters, digits, _ . and -, as "
                'in "ethernet=eth0 infiniband=mlx5_0"'
            )
        if match[1] in networks:
            raise Refused(f"NETWORKS has two networks named {match[1]}: give each its own name")
        networks[match[1]] = match[2]
    if len(networks) < 2:
        raise Refused(f"NETWORKS is '{text}': name two networks or more to compare")
    return networks


def check(arguments: list[str]) -> None:
    """Settings that a comparison cannot have. Raises Refused."""
    if "MASTER_PORT" not in os.environ:
        raise Refused("launch_multinode.sh starts this, where NETWORKS is set: call that")
    if os.environ["NNODES"] == "1":
        raise Refused("NETWORKS compares networks between nodes, and NNODES is 1: unset it")
    for name in ("NETWORK", "IFNAME"):
        if os.environ.get(name):
            raise Refused(f"NETWORKS and {name} are both set: unset one of them")
    if "--resume" in arguments:
        raise Refused("--resume would go on from the network before: leave it out with NETWORKS")


class Comparison:
    """This node's part: the launcher, for each network in turn."""

    def __init__(self, networks: dict[str, str], log_dir: str, arguments: list[str]) -> None:
        self.networks, self.arguments = networks, arguments
        self.rank, self.port = int(os.environ["NODE_RANK"]), int(os.environ["MASTER_PORT"])
        self.patience = int(os.environ["CONNECT_TIMEOUT"])
        # Ports of one network: each of its starts has its own.
        self.ports = 1 + int(os.environ["PROBE"]) + int(os.environ["RESTARTS"])
        # Labels alone have to match: an interface may be eno1 on one node and enp5s0 on another.
        settings = {"NNODES": int(os.environ["NNODES"]), LABELS: " ".join(networks)}
        node = {"node_rank": self.rank, "host": socket.gethostname(), "settings": settings}
        self.series = of_this_node(self.rank, settings["NNODES"], self.port, "")
        host = os.environ["MASTER_ADDR"].strip("[]")
        self.rendezvous = Rendezvous(host, self.port, node, 0, say, self.series)
        self.folder = Path(log_dir)  # the series' own, when its name is known
        self.child: subprocess.Popen | None = None
        self.stopped = 0  # the first signal

    def run(self) -> int:
        """All networks, then the comparison; returns the exit code."""
        check_master(self.rendezvous.host, self.rank)
        self.rendezvous.agree(Plan(), self.patience)
        self.rendezvous.close()
        self.rendezvous.guard(Plan())
        self.folder = self.folder / self.series.run
        codes = []
        for n, label in enumerate(self.networks):
            codes.append(self.train(n, label))
            if self.stopped or codes[-1] == STOPPED:
                say(f"stopped in network {label}: what comes after is left out")
                return codes[-1] or exit_code(self.stopped)
            if codes[-1]:
                say(f"network {label} failed with code {codes[-1]}")
        codes.append(self.compare() if self.rank == 0 else 0)
        return next(filter(None, codes), 0)

    def train(self, n: int, label: str) -> int:
        """One network's run; its exit code as a shell has it."""
        say(f"network {n + 1} of {len(self.networks)}: {label}, over {self.networks[label]}")
        # Each network's run has its own name, and begins anew where the job was put back.
        own = ("NETWORKS", "DEMO_RUN", "SLURM_RESTART_COUNT")
        env = {name: value for name, value in os.environ.items() if name not in own}
        known = Series(self.series.token, label, self.series.about)
        env |= {"DEMO_SERIES": to_environment(known)}
        env |= {"IFNAME": self.networks[label], "RUN_NAME": label, "LOG_DIR": str(self.folder)}
        env["MASTER_PORT"] = str(self.port + n * self.ports)
        if n:  # another node may need --timeout to notice that the run before has failed
            env["CONNECT_TIMEOUT"] = str(self.patience + timeout_of(self.arguments))
        own = os.getpid()
        self.child = subprocess.Popen(
            ["bash", LAUNCHER, *self.arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches it once, through this process
            preexec_fn=lambda: tied_to(own, signal.SIGTERM),
        )
        if self.stopped:
            self.child.send_signal(self.stopped)
        code = self.child.wait()
        self.child = None
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, _frame: object) -> None:
        self.stopped = self.stopped or number
        self.rendezvous.stopped = True
        if self.child:
            self.child.send_signal(number)

    def compare(self) -> int:
        """Prints compare_logs.py's report and keeps it with its picture; its exit code."""
        command = [sys.executable, TOOLS / "compare_logs.py"]
        command += [f"{label}={self.folder / label}" for label in self.networks]
        picture = self.folder / "compare.png"
        with contextlib.suppress(OSError):  # that of an earlier series is none of this one's
            keep_earlier(self.folder, re.compile(r"compare\.png"))
        if importlib.util.find_spec("matplotlib"):
            command += ["--plot", picture]
        else:
            say("no picture: pip install matplotlib, then compare_logs.py --plot draws one")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        text = os.environ.get("DEMO_NOTE", "") + done.stdout
        with contextlib.suppress(OSError):
            print(text, end="", flush=True)
        report = self.folder / "compare.md"
        drawn = done.returncode in (0, 1) and picture.exists()  # 2: it says why there is none
        if drawn:
            text += f"\n![Parts of a step, throughput and loss]({picture.name})\n"
        try:
            report.write_text(text)
        except OSError as error:
            why = f"{report} cannot be written ({error.strerror})"
            say(f"error: {why}: make room there, and call compare_logs.py for it again")
            return done.returncode or 1
        say(f"this is {report}" + (f"; its picture: {picture}" if drawn else ""))
        return done.returncode


def main() -> int:
    arguments = sys.argv[2:]
    try:
        check(arguments)
        comparison = Comparison(read_networks(os.environ["NETWORKS"]), sys.argv[1], arguments)
        handle_stop_signals(comparison.on_signal)
        return comparison.run()
    except Stopped:
        say("stopped by a signal before the start")
        return exit_code(comparison.stopped)
    except (Refused, OSError) as error:
        say(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
