"""Runs of the script that share one start of Python, which takes seconds to load PyTorch."""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import re
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARKS = re.compile(r"^BEGIN\n(.*?)^END ([-\d ]+)\n", re.MULTILINE | re.DOTALL)

# Ranks, arguments (or a list of those of each rank) and, where they are given, variables of all,
# and a program of its own, which each rank loads.
ForkedRun = (
    tuple[int, Iterable[object]]
    | tuple[int, Iterable[object], Mapping[str, str]]
    | tuple[int, Iterable[object], Mapping[str, str], object]
)


def run_forked(runs: Sequence[ForkedRun], **options: Any) -> list:
    """Runs the script once for each (ranks, arguments), one after another, to their ends.

    Each rank is a process with the variables that torchrun would give it; 0 ranks: one process
    without them. Variables that a run states itself win over these. `program` is another module
    with `main` and `run_and_exit`, `trains` says whether any run comes to train, `enter` has words
    before the command, `expect` the exit code of each rank (None: any), or a list of those of each
    run, `timeout` seconds for all runs; the rest are options of `Started`.
    """
    from support.processes import SCRIPT, Run, start

    runs = [(run[0], [*run[1]], *run[2:]) for run in runs]
    program, expect = options.pop("program", SCRIPT), options.pop("expect", 0)
    timeout, enter = options.pop("timeout", None), options.pop("enter", [])
    command = forked_command(runs, program, options.pop("trains", True))
    with start([*enter, *command], **options) as started:
        whole = started.finish(timeout or 60 + 30 * len(runs))
    found = MARKS.findall(whole.out)
    assert len(found) == len(runs) and whole.out.startswith("BEGIN\n"), whole.tail()
    ended = []
    expected = expect if isinstance(expect, list) else [expect] * len(runs)
    for run, wanted, (output, numbers) in zip(runs, expected, found, strict=True):
        codes = [int(number) for number in numbers.split()]
        code = next((code for code in codes if code), 0)
        command = [str(run[3] if run[3:] else program), *words_of(run)[0]]
        ended.append(Run(command, code, output, whole.seconds))
        assert wanted is None or {*codes} == {wanted}, ended[-1].tail()
    return ended


def forked_command(
    runs: Sequence[ForkedRun], program: object = None, trains: bool = True
) -> list[str]:
    """The command of `run_forked`. It prints BEGIN before each run, END and the codes after it."""
    from support.processes import SCRIPT

    texts = [
        (run[0], words_of(run), run[2] if run[2:] else {}, str(run[3]) if run[3:] else "")
        for run in runs
    ]
    # Otherwise each rank would import it for its optimizer, in 3 s.
    imports = ["torch._dynamo"] if trains else []
    return [sys.executable, "-u", __file__, str(program or SCRIPT), json.dumps(texts), *imports]


def words_of(run: ForkedRun) -> list[list[str]]:
    """The arguments of each rank."""
    arguments = [*run[1]]
    if arguments and isinstance(arguments[0], list):
        return [[*map(str, own)] for own in arguments]
    return [[*map(str, arguments)]] * max(1, run[0])


def load(program: str) -> Any:
    """The module in this file, under the name `demo`."""
    spec = importlib.util.spec_from_file_location("demo", program)
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_rank(module: Any, other: str, words: list[str], variables: dict[str, str]) -> None:
    """In a process of its own: the module, or another program, with these arguments. It does not
    return.
    """
    sys.argv[1:] = words
    os.environ.update(variables)
    code: Any = 1
    try:
        if other:
            module, sys.argv[0] = load(other), other
        module.run_and_exit(module.main)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception:  # of the program itself
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # Python's own end takes a second after a fork


def main() -> None:
    program, runs, *imports = sys.argv[1:]
    multiprocessing.set_start_method("fork")  # loader workers find the module in no other way
    module, sys.argv[0] = load(program), program
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy all that is imported, page by page
    for ranks, words, own, other in json.loads(runs):
        print("BEGIN")
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(max(1, ranks)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {name: str(value) for name, value in place.items()} if ranks else {}
            if os.fork() == 0:
                run_rank(module, other, words[rank], variables | own)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(max(1, ranks))]
        print(f"END {' '.join(map(str, codes))}\n", end="")  # in one piece


if __name__ == "__main__":
    main()
