#!/usr/bin/env python3
"""Tells from NCCL's own debug text which network it used, and why not another.

    python tools/nccl_log.py logs/run/           # every file of a folder
    python tools/nccl_log.py --json node0.log    # one JSON object

The text is what NCCL writes with NCCL_DEBUG=INFO, to NCCL_DEBUG_FILE or into a job's log, of any
program, NCCL 2.2 to 2.31. Lines may carry any prefix and be interleaved. Of a log without it, the
messages of PyTorch's watchdog are read: which collective timed out, on which ranks.

Exit code: 0: decided; 1: NCCL's text decides nothing; 2: no such file, or no text of NCCL in it.
"""

from __future__ import annotations

import argparse
import json
import sys

from analysis.logs import UserError
from analysis.nccl import HOW_TO_ASK, Finding, describe, find_in_files
from analysis.report import print_text


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"nccl_log.py: error: {message}; see --help\n")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.partition("\n")[0],
        epilog=f"To get that text, {HOW_TO_ASK}. "
        "Exit code: 0 decided, 1 nothing decided, 2 no such file or no text of NCCL.",
    )
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        found = find_in_files(args.paths)
    except UserError as error:
        print(f"nccl_log.py: error: {error}", file=sys.stderr)
        return 2
    if error := tell(found, args.json):
        print(f"nccl_log.py: error: its output cannot be written: {error}", file=sys.stderr)
        return 2
    if not found.decided:
        print(f"nccl_log.py: nothing decided: {HOW_TO_ASK}", file=sys.stderr)
        return 1
    return 0


def tell(found: Finding, as_json: bool) -> OSError | None:
    if as_json:
        return print_text(json.dumps(found.to_dict()))
    if found.decided or found.problems:
        return print_text("\n".join(describe(found)))
    return None


if __name__ == "__main__":
    sys.exit(main())
