"""What tools/compare_logs.py and tools/nccl_log.py are made of."""

import contextlib
import os
import sys


class UserError(Exception):
    """Something that the user can fix: one line, exit code 2."""


def print_text(text):
    """Print it. Returns the OSError if that fails; a reader that has seen enough is no error."""
    with contextlib.suppress(AttributeError):  # a terminal may lack a log's characters
        sys.stdout.reconfigure(errors="replace")
    try:
        print(text, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # what is left in the buffer would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return error
    return None
