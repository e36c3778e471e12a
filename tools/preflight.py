#!/usr/bin/env python3
"""For anyone who is about to start: what would go wrong on this node, in one line each.

    python tools/preflight.py --nnodes=2 --node_rank=0 --rdzv_endpoint=10.0.0.1:29500

launch_multinode.sh calls it first, on each node. It looks at what NETWORK, IFNAME and
GLOO_SOCKET_IFNAME ask for, and with several nodes lets them meet at node 0's port, to see whether
each can reach a port of the other that was chosen at random, as Gloo's and NCCL's are, and whether
both ends have the same MTU. What a machine does not tell is left out.

Prints the interface that leads to the other nodes, where GLOO_SOCKET_IFNAME is not set: left alone
Gloo takes the address of the host name, which many machines have at 127.0.1.1. Messages go to
stderr. With --log_dir, as the launcher calls it, they go to the node's log, too, and it prints
four lines: that interface or nothing, the run's name, which node 0 has chosen, what
NCCL_SOCKET_IFNAME should be or nothing, and what this node knows of the series.
Exit code: 0, also with warnings; 1 an error on this node or another; 2 bad usage; 128 + its number
where a signal stops it (143, Ctrl-C 130).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from launcher import nccl_choice
from launcher.addresses import check_master, connect, create_server, why_no_port
from launcher.errors import Refused, Stopped
from launcher.node_checks import (
    active_adapters,
    check_host_name,
    check_node,
    interface_address,
    interface_of,
    is_loopback,
    mtu_of,
    route_to,
    usable_interfaces,
)
from launcher.output import Output
from launcher.process_tree import tied_to
from launcher.rendezvous import CONNECT_TIMEOUT, LABELS, Plan, Rendezvous
from launcher.series import Series, keep_earlier, of_this_node, to_environment
from launcher.signals import exit_code, handle_stop_signals
from launcher.wire import is_text, printable

SECONDS = 4  # to reach a port: TCP sends its first packet again after 1 s and after 3 s


# --- Between the nodes -------------------------------------------------------------------------


def is_word(value: object) -> bool:
    """An address, a number as text, or nothing."""
    return isinstance(value, str) and bool(re.fullmatch(r"[\w.:%-]{0,100}", value))


# What the nodes tell each other.
FACTS = {"port": lambda n: type(n) is int and 0 < n < 65536, "mtu": is_word, "address": is_word}
REACHED = FACTS | {"closed": is_text, "tried": is_word, "master": is_word}


class NodeZeroIsFurther(Exception):
    """Node 0's supervisor has answered: this launcher was started anew, the nodes have met."""


def why_closed(address: str, port: int, seconds: float, look: Callable[[], None]) -> str:
    """Empty if a connection to it can be made, else the reason; look() may end the wait."""
    try:
        connect(address, port, seconds, look).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or "no answer"
    return ""


class Preflight(Rendezvous):
    """The nodes' first meeting: each tells what it has found, and tries a port of the other's."""

    purpose = "preflight"
    shape: ClassVar[dict] = {"preflight": (None, REACHED), "error": (None, is_text)}
    greeting_shape: ClassVar[dict] = {"preflight": FACTS}

    def __init__(
        self,
        options: argparse.Namespace,
        errors: list[str],
        output: Output,
        series: Series | None = None,
    ) -> None:
        # Of a series of runs over several networks the nodes agree before, of none they do here.
        settings = {"NNODES": options.nnodes, LABELS: None}
        node = {"node_rank": options.node_rank, "host": socket.gethostname(), "settings": settings}
        host, last = options.host.strip("[]"), options.starts - 1
        super().__init__(host, options.port, node, last, output.say, series)
        check_master(host, options.node_rank)
        self.seconds = min(SECONDS, options.connect_timeout / 3)
        self.listener = create_server(0)  # that the kernel answers is enough
        address, self.master = route_to(self.host)
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if not self.interface:
            self.interface = interface_of(address)
        address = interface_address(self.interface) or address
        self.facts = {
            "port": self.listener.getsockname()[1],
            "mtu": mtu_of(self.interface),
            "address": "" if is_loopback(address) else address,
        }
        self.error = "; ".join(errors)  # of this node alone
        self.warnings: list[str] = []

    def greeting(self) -> dict:
        return {"purpose": self.purpose, "preflight": self.facts}

    def introduction(self, greeting: dict) -> dict:
        if greeting["purpose"] == "full":  # which says so
            return self.node
        if greeting["purpose"] != self.purpose:
            self.series.run = greeting.get("run") or self.series.run
            raise NodeZeroIsFurther
        theirs = greeting["preflight"]
        self.compare_mtu("node 0", theirs)
        # On SLURM's node 0 its own name may be loopback: there only the others know its address.
        address = theirs["address"] or self.master
        closed = why_closed(address, theirs["port"], self.seconds, self._check)
        reached = {"closed": closed, "tried": address, "master": self.master}
        error = printable(self.error)
        return self.node | {"preflight": self.facts | reached, "error": error}

    def compare_mtu(self, node: str, theirs: dict) -> None:
        mine = self.facts["mtu"]
        if mine and theirs["mtu"] and mine != theirs["mtu"]:
            self.warnings.append(
                f"the MTU of {self.interface} is {mine} on this node and {theirs['mtu']} on {node}"
                ": large packets may get lost without an error; give both ends, and the switch "
                f"between them, the same (ip link set {self.interface} mtu ...)"
            )

    def objection(self, nodes: list[dict]) -> str:
        """What is wrong with any node, or the way between it and node 0."""
        if self.error:
            return f"node 0 ({self.node['host']}): {self.error}"
        # A supervisor that has come here says nothing of this: its node was looked at before.
        found = (self.fault(node) for node in nodes if node.get("preflight"))
        return next(filter(None, found), "")

    def fault(self, node: dict) -> str:
        theirs, name = node["preflight"], f"node {node['node_rank']} ({node['host']})"
        if node["error"]:
            return f"{name}: {node['error']}"
        if not self.interface:
            self.interface = interface_of(theirs["master"])
        self.compare_mtu(name, theirs)
        own = f"node 0 ({self.node['host']})"
        if theirs["closed"]:
            return closed_port(name, own, theirs["tried"], self.facts["port"], theirs["closed"])
        closed = why_closed(theirs["address"], theirs["port"], self.seconds, self._check)
        if closed:
            return closed_port(own, name, theirs["address"], theirs["port"], closed)
        return ""


def closed_port(here: str, there: str, address: str, port: int, why: str) -> str:
    return (
        f"{here} cannot reach {there} at {address}, port {port}, which was chosen at random ({why}"
        "): a firewall that opens MASTER_PORT alone is not enough, Gloo and NCCL take any port "
        "from 1024 on; open them between the nodes, or name in IFNAME the interfaces of a network "
        "that joins them"
    )


def look_at_nccls_choice(options: argparse.Namespace, leads: str, output: Output) -> list[str]:
    """Where nobody has named a network: what NCCL should leave out; a warning."""
    if nccl_choice.has_chosen(os.environ):
        return []
    interfaces, adapters = usable_interfaces(), active_adapters()
    options.nccl, out = nccl_choice.to_leave_out(leads, interfaces, adapters)
    if options.nccl:
        output.say(
            f"NCCL_SOCKET_IFNAME={options.nccl}: so that NCCL leaves out {', '.join(out)}, "
            "virtual interfaces of this node; set it yourself, or IFNAME, to choose"
        )
    return nccl_choice.several(interfaces, adapters, out)


# --- The command line --------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    add = parser.add_argument
    add("--nnodes", type=int, required=True, metavar="N", help="as torchrun's, like the next")
    add("--node_rank", type=int, default=0, metavar="K", help="0 on the endpoint's node; 0")
    add("--rdzv_endpoint", default="", metavar="ADDRESS:PORT", help="of node 0")
    add("--rdzv_backend", choices=["static"], default="static", help="no other can be checked")
    add("--standalone", action="store_true", help="changes nothing")
    add("--starts", type=int, default=1, metavar="N", help="a port each: probe, restarts; 1")
    add("--connect_timeout", type=int, default=CONNECT_TIMEOUT, metavar="S", help="%(default)s s")
    add("--log_dir", default="", metavar="DIR", help="gets messages, in RUN_NAME/nodeK.log; none")
    add("--run_name", default="", metavar="NAME", help="the run's; as node 0 has chosen it")
    add("--goes_on", action="store_true", help="after what an earlier start left in the log")
    add("--parent", type=int, default=0, metavar="PID", help="of the launcher, to end with it")
    add("--name", default="preflight.py", help="before each message; preflight.py")
    options = parser.parse_args(argv)
    options.host, _, port = options.rdzv_endpoint.rpartition(":")
    if options.nnodes > 1 and not (options.host and port.isdigit()):
        parser.error(f"--rdzv_endpoint is '{options.rdzv_endpoint}': give node 0's ADDRESS:PORT")
    options.port = int(port or 0)
    if options.nnodes > 1 and (why := why_no_port(options.port, options.starts)):
        parser.error(why)
    options.interface = options.nccl = ""
    return options


class EarlyOutput(Output):
    """Without a log, as long as the run's name is not known; then that gets what was said."""

    def __init__(self, name: str) -> None:
        super().__init__(name, os.devnull)
        self.said: list[str] = []

    def line(self, text: str) -> None:
        self.said.append(text)
        super().line(text)

    def go_on_in(self, log: str) -> None:
        self.log = Output(self.name, log).log
        self._write(self.log, "".join(f"{text}\n" for text in self.said).encode())


def open_log(options: argparse.Namespace, output: EarlyOutput, run: str, met: bool) -> None:
    """On the other nodes of a launcher's run, when its name is known. Raises Refused.

    A node that was not admitted writes nothing where a run may have its log.
    """
    if not (options.log_dir and options.node_rank and (met or run)):
        return
    foreign = run != options.run_name and ("/.." in f"/{run}" or run.startswith("/"))
    if not run or foreign:
        raise Refused(f"node 0 calls the run '{run}', which is no folder: set RUN_NAME here too")
    folder, node = Path(f"{options.log_dir}/{run}"), options.node_rank
    log = folder / f"node{node}.log"
    if not met and log.exists():
        return
    if met and folder.exists() and not options.goes_on:
        pattern = rf"node{node}\.log|nccl\.node{node}\..*\.log"
        if kept := keep_earlier(folder, re.compile(pattern)):
            output.say(kept)
    output.go_on_in(str(log))


def meet(
    options: argparse.Namespace, errors: list[str], output: EarlyOutput, series: Series
) -> list[str]:
    """Checks between the nodes; warnings. Raises Refused, on all nodes together, and Stopped."""
    preflight = Preflight(options, errors, output, series)

    def stop(number: int, _frame: object) -> None:
        preflight.stopped = preflight.stopped or number

    handle_stop_signals(stop)
    with preflight.listener:
        try:
            preflight.agree(Plan(), options.connect_timeout)
        except NodeZeroIsFurther:
            options.goes_on = True  # what this node has in its log is of this run
    preflight.close()
    open_log(options, output, series.run, met=True)
    if "GLOO_SOCKET_IFNAME" not in os.environ and preflight.interface:
        options.interface = preflight.interface
        output.say(f"GLOO_SOCKET_IFNAME={preflight.interface}: it leads to the other nodes")
    found = [*preflight.warnings, *check_host_name(preflight.interface)]
    return found + look_at_nccls_choice(options, preflight.interface, output)


def main() -> int:
    options = parse_arguments(sys.argv[1:])
    if options.parent:
        tied_to(options.parent, signal.SIGTERM)  # a launcher that is killed leaves nothing
    several = options.nnodes > 1
    try:  # before anything is written
        series = of_this_node(options.node_rank, options.nnodes, options.port, log="")
        series.run = options.run_name or series.run
        output = EarlyOutput(options.name)
        if options.log_dir and not options.node_rank:
            output.go_on_in(f"{options.log_dir}/{options.run_name}/node0.log")
    except Refused as error:
        sys.exit(f"{options.name}: error: {error}")
    errors, warnings = check_node(several)
    for error in errors:
        output.say(f"error: {error}")
    code = 0
    try:
        warnings += meet(options, errors, output, series) if several else []
    except Stopped as stopped:
        output.say("stopped by a signal before the start")
        code = exit_code(stopped.args[0])
    except (Refused, OSError) as error:
        if not errors:
            output.say(f"error: {error}")
        code = 1
    if code:
        with contextlib.suppress(Refused):
            open_log(options, output, series.run, met=False)
        return code
    for warning in warnings:
        output.say(f"warning: {warning}")
    print_facts(options, series)
    return 1 if errors else 0


def print_facts(options: argparse.Namespace, series: Series) -> None:
    """For the launcher, or the interface for a person."""
    if options.log_dir:
        # Node 0's is what it was given: this process holds the lock no longer than it lives.
        known = os.environ.get("DEMO_SERIES") or to_environment(series)
        print(options.interface, series.run, options.nccl, known, sep="\n")
    elif options.interface:
        print(options.interface)


if __name__ == "__main__":
    sys.exit(main())
