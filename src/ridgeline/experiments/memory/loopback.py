"""A packet to another process of this host, and back."""

import socket
import subprocess
import sys
import time

from ridgeline.experiments.memory.result import Latency
from ridgeline.machine import Quantity

MESSAGE_BYTES = 4096
NAME = "4 KiB to another process, over loopback"
TEXTBOOK_S = 10e-6
"""Of 4 KiB over 10 Gbit/s Ethernet. Source: Dive into Deep Learning, 12.4."""
LIMIT_S = 30.0
_ECHO = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(1 << 16):
        peer.sendall(data)
"""


def loopback_latency(num_messages: int) -> Latency:
    """Half of a round trip over TCP, to a process that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        port = str(server.getsockname()[1])
        # Without site-packages it starts in milliseconds.
        other = subprocess.Popen([sys.executable, "-S", "-c", _ECHO, port])
        try:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(LIMIT_S)
                # Or TCP may keep the end of a message back until the one before is confirmed.
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # First ones find the other process asleep, and pay for its buffers.
                _round_trips(peer, num_messages // 10 + 1)
                measured = Quantity.measured(_round_trips(peer, num_messages), "s")
        finally:
            try:
                # It ends by itself when the connection does.
                other.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
    how = "half of a round trip over TCP, two processes of Python"
    return Latency(name=NAME, textbook_s=TEXTBOOK_S, measured=measured, how=how)


def _round_trips(peer: socket.socket, num_messages: int) -> list[float]:
    message, back = bytes(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)
    samples = []
    for _ in range(num_messages):
        begun = time.perf_counter()
        peer.sendall(message)
        left = memoryview(back)
        while left:
            got = peer.recv_into(left)
            if not got:
                raise ConnectionError("wanted the message back, got the end of the connection")
            left = left[got:]
        # One way, as the textbook has it.
        samples.append((time.perf_counter() - begun) / 2.0)
    return samples
