"""The signals that stop a run: which they are, and what may handle them."""

from __future__ import annotations

import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def handle_stop_signals(handler: Callable[[int, object], None]) -> None:
    """Has each of them call it, but for those that this process was started to ignore.

    nohup has SIGHUP ignored, and so it stays: a run goes on when its terminal is gone.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """Of a process that has ended on a signal, as a shell has it: 130 for SIGINT, 143 SIGTERM."""
    return 128 + number


def exit_on_stop_signals() -> None:
    """Has the first of them raise SystemExit; another must not cut short what then tidies up."""

    def stop(number: int, _frame: object) -> None:
        for name in STOP_SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        raise SystemExit(exit_code(number))

    handle_stop_signals(stop)
