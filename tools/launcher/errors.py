"""What ends a start before its command runs."""

from __future__ import annotations


class Refused(Exception):
    """Ends everything with one line: a setting that is wrong, a node that does not come."""


class Stopped(Exception):
    """A signal has come while the nodes wait for each other; of which `stopped` tells."""
