"""Signals by name, for messages about processes that one of them has ended."""

import signal


def signal_name(number: int) -> str:
    """The name of a signal, `SIGKILL`, or what the system calls it where Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has names for the first and the last of the real-time signals alone
        return signal.strsignal(number) or "unknown"
