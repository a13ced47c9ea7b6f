"""Stands for a script that a warm process runs in a fork of itself (`warm.py`): has its streams, and ends as it does.

    python -I -S relay.py SOCKET SCRIPT ARGUMENT...

It imports nothing that takes time.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Hand over what this process has, and end as the other one did."""
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(sys.argv[1])
        socket.send_fds(warm, [b"\0"], [0, 1, 2])
        asked = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
        warm.sendall(json.dumps(asked).encode())
        warm.shutdown(socket.SHUT_WR)
        status = int(warm.makefile().read())
    if status < 0:
        if -status != signal.SIGKILL:  # which has no other meaning
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
