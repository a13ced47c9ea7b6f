"""Ports for processes that listen later than a test chooses them."""

import random
import socket

RANGE = (20_000, 32_000)
"""Below those that Linux gives to connections (32768 and above): one of them may come and take the port
between its choice and its use, and what should have listened there fails or waits for ever."""


def free_port() -> int:
    """A port that nobody listens on; not drawn from the generator that tests seed."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(*RANGE)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
