"""Runs of the script that share one start of Python, which takes seconds to load PyTorch."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import socket
import sys
from typing import Any

MARKS = re.compile(r"^BEGIN\n(.*?)^END (-?\d+)\n", re.MULTILINE | re.DOTALL)


def run_forked(runs: list[tuple], **options: Any) -> list:
    """Runs the script once for each (ranks, arguments), one after another, to their ends.

    Each rank is a process with the variables that torchrun would give it; 0 ranks: one process
    without them. A third item has variables of this run alone, which win. `program` is another
    module with `main` and `run_and_exit`, `enter` words before the command, `expect` an exit code
    (None: any), `timeout` seconds for all runs; the rest are options of `Started`.
    """
    from support.processes import SCRIPT, Run, start

    program, expect = options.pop("program", SCRIPT), options.pop("expect", 0)
    timeout, enter = options.pop("timeout", None), options.pop("enter", [])
    with start([*enter, *forked_command(runs, program)], **options) as started:
        whole = started.finish(timeout or 60 + 30 * len(runs))
    found = MARKS.findall(whole.out)
    assert len(found) == len(runs), whole.tail()
    ended = []
    for (_, words, *_), (output, code) in zip(runs, found, strict=True):
        command = [str(program), *map(str, words)]
        ended.append(Run(command, int(code), output, whole.seconds))
        assert expect in (None, int(code)), ended[-1].tail()
    return ended


def forked_command(runs: list[tuple], program: object = None) -> list[str]:
    """The command of `run_forked`. It prints BEGIN before each run, END and the code after it."""
    from support.processes import SCRIPT

    texts = [(ranks, [*map(str, words)], *variables) for ranks, words, *variables in runs]
    return [sys.executable, "-u", __file__, str(program or SCRIPT), json.dumps(texts)]


def run_rank(module: Any, words: list[str], variables: dict[str, str]) -> None:
    """In a process of its own: the program with these arguments. It does not return."""
    sys.argv[:] = words
    os.environ.update(variables)
    code: Any = 1
    try:
        module.run_and_exit(module.main)
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # Python's own end takes a second after a fork


def main() -> None:
    program, runs = sys.argv[1:]
    multiprocessing.set_start_method("fork")  # loader workers find the module in no other way
    spec = importlib.util.spec_from_file_location("demo", program)
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for ranks, arguments, *own in json.loads(runs):
        print("BEGIN")
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(max(1, ranks)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {name: str(value) for name, value in place.items()} if ranks else {}
            if os.fork() == 0:
                run_rank(module, [program, *arguments], variables | dict(*own))
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(max(1, ranks))]
        print(f"END {next((code for code in codes if code), 0)}\n", end="")  # in one piece


if __name__ == "__main__":
    main()
