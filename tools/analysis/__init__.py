"""What tools/compare_logs.py is made of."""

import contextlib
import os
import sys


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""


def forget_output():
    """After an error of stdout: what is left in its buffer would make a second one at the end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
