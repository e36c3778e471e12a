#!/usr/bin/env python3
"""Tells in NCCL's own words which network it used, over which devices, and what it warned of.

    python tools/nccl_log.py logs/run/      # every file of a folder, of the newest start
    python tools/nccl_log.py job.log

The text is what NCCL writes with NCCL_DEBUG=INFO, to NCCL_DEBUG_FILE or into a job's log, of any
program, NCCL 2.18 to 2.31. Lines may carry any prefix and be interleaved. Of a log without it, the
messages of PyTorch's watchdog are read: which collective timed out, on which ranks.

Exit code: 0: decided; 1: NCCL's text decides nothing; 2: no such file, or nothing of NCCL's on
networks in it.
"""

from __future__ import annotations

import argparse
import signal
import sys

from analysis.logs import UserError
from analysis.nccl import HOW_TO_ASK, describe, find_in_files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"To get that text, {HOW_TO_ASK}."
    )
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    args = parser.parse_args(arguments)
    try:
        found = find_in_files(args.paths)
    except UserError as error:
        print(f"nccl_log.py: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(describe(found)))
    if not found.decided:
        print(f"nccl_log.py: nothing decided: {HOW_TO_ASK}", file=sys.stderr)
    return 0 if found.decided else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough is no error
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a log's characters
    sys.exit(main())
