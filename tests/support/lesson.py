"""Runs of the lesson's programs."""

from __future__ import annotations

from pathlib import Path

from support.forks import run_forked
from support.processes import Run

# Runs a program in its folder, and says if that has not ended Python itself. A second argument is
# the number of ranks on each node, if that is not the number of all ranks.
ANY_PROGRAM = """
import os, runpy, sys

def main():
    if sys.argv[2:]:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % int(sys.argv[2]))
    os.chdir(os.path.dirname(sys.argv[1]))
    runpy.run_path(sys.argv[1])
    print("Python goes on\\n", end="")

def run_and_exit(main):
    main()
    sys.exit()
"""


def run_programs(folder: Path, runs: dict[str, tuple], expect: int | None = 0) -> dict[str, Run]:
    """{program in the folder: its run} of {program: (ranks, further arguments ...)}: 0 ranks are
    one process alone. `expect`: the exit code of all, None: any.
    """
    (folder / "any_program.py").write_text(ANY_PROGRAM)
    listed = [(ranks, [folder / name, *more]) for name, (ranks, *more) in runs.items()]
    ended = run_forked(listed, program=folder / "any_program.py", expect=expect)
    return dict(zip(runs, ended, strict=True))
