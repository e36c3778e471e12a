"""What tools/compare_logs.py is made of, one floor above the other."""


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""
