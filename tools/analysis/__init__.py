"""What tools/compare_logs.py is made of."""

import contextlib
import os
import sys


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""


def print_text(text):
    """Returns the error, if it cannot be printed; that `| head` has read enough is none."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would make a second error at the end.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            return error
    return None
