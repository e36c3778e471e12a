"""What tools/compare_logs.py is made of."""


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""
