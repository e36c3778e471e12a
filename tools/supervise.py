#!/usr/bin/env python3
"""For anyone who starts torchrun by hand: a log, the other nodes, restarts, the root cause.

    python tools/supervise.py --log logs/run/node0.log --restarts 3 -- \\
        torchrun --nnodes=2 --node_rank=0 --rdzv_backend=static --rdzv_endpoint=10.0.0.1:29500 \\
        --nproc_per_node=2 demo_coco_resnet18.py --coco_image_path ...

The launchers call it; by hand it goes before any torchrun, srun or python line. With static
rendezvous the supervisors of all nodes meet for a moment before each start: start k of a series
(probe, training, restarts) uses the endpoint's port + k, and node 0 says k by listening there.
Exit code: 0 done; 75 stopped by SIGTERM, SIGINT, SIGUSR1, with --checkpoint saved; 128 + the
signal's number before the first start; else failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from launcher import process_tree
from launcher.addresses import why_no_port
from launcher.errors import Refused, Stopped
from launcher.output import Output
from launcher.rendezvous import CONNECT_TIMEOUT
from launcher.root_cause import not_to_be_read
from launcher.series import of_this_node
from launcher.signals import exit_code, handle_stop_signals
from launcher.supervisor import Supervisor
from launcher.torchrun_command import Command


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Command]:
    at = argv.index("--") if "--" in argv else len(argv)
    usage = "%(prog)s --log FILE [options] -- torchrun ..."
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.partition("\n")[0])
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    add = parser.add_argument
    add("--log", required=True, metavar="FILE", help="gets every line, after what it has")
    add("--restarts", type=int, default=0, metavar="N", help="after failures; 0")
    add("--probe", default="", metavar="FILE.py", help="run once before, in the script's place")
    add("--connect_timeout", type=int, default=CONNECT_TIMEOUT, metavar="S", help="%(default)s s")
    add("--name", default="supervise.py", help="before each message; supervise.py")
    options, words = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not words:
        parser.error("no command: give it after --")
    if options.probe and not os.path.isfile(options.probe):
        parser.error(f"--probe {options.probe}: no such file")
    command = Command(words)
    if not command.script and (options.probe or options.restarts):
        parser.error("--probe and --restarts need a command with a script that ends in .py")
    starts = 1 + options.restarts + bool(options.probe)
    if command.nnodes > 1 and (why := why_no_port(command.port, starts)):
        parser.error(why)
    return options, command


def main() -> int:
    try:
        options, command = parse_arguments(sys.argv[1:])
        # Before anything is written: the log may be that of a run that goes on.
        place = command.node_rank, command.nnodes, command.port
        series = of_this_node(*place, options.log, command.rdzv_id)
        for name in ("DEMO_SERIES", "DEMO_RUN"):  # not for a launcher that a rank may call
            os.environ.pop(name, None)
        output = Output(options.name, options.log)
    except Refused as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    supervisor = Supervisor(options, command, output, series)
    handle_stop_signals(supervisor.on_signal)
    process_tree.adopt_orphans()
    if why := not_to_be_read(os.environ.get("NCCL_DEBUG_FILE", "")):
        output.say(why)
    try:
        return supervisor.run()
    except Stopped:
        code, why = exit_code(signal.Signals[supervisor.stopped]), supervisor.stopped_by()
    except (Refused, OSError) as error:
        code, why = 1, f"error: {error}"
    if supervisor.starts:
        supervisor.report()
    output.say(why)
    return code


if __name__ == "__main__":
    sys.exit(main())
