"""Starts the workers of a test as `torchrun --standalone` does, forked from one process that imported torch once.

    python torchrun.py WORKERS SCRIPT ARGUMENT...

Each worker finds its place in the environment, and the store in the process that it was forked from. Where one
fails, the others, which may wait for it for ever, are killed.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def torchrun(
    workers: int, script: Path, *arguments: object, check: bool = True, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script in so many workers of one thread each, to its end; on the GPUs that the test sees."""
    done = subprocess.run(
        **_started(workers, script, arguments, environment), capture_output=True, check=False
    )
    assert done.returncode == 0 or not check, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done


def talking(workers: int, script: Path, *arguments: object) -> "subprocess.Popen[str]":
    """Workers that run while a test writes to the standard input of rank 0 and reads its output."""
    return subprocess.Popen(
        **_started(workers, script, arguments, {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _started(
    workers: int, script: Path, arguments: tuple[object, ...], environment: dict[str, str]
) -> dict[str, Any]:
    words = (workers, script, *arguments)
    return {
        "args": [sys.executable, __file__, *map(str, words)],
        "env": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
        "text": True,
    }


def main() -> int:
    """Be the workers, or the process that waits for them."""
    import torch.distributed as dist

    import ridgeline.runtime.training.loop  # noqa: F401 - what all of them import

    workers = int(sys.argv[1])
    gc.freeze()  # what was imported is garbage of none of them
    read, write = os.pipe()
    running = set()
    for rank in range(workers):
        child = os.fork()
        if not child:
            os.close(write)
            _work(rank, workers, port=os.read(read, 5).decode())
            return 0
        running.add(child)
    # Made after the forks, since no thread comes along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, b"%05d" % store.port * workers)
    return _wait(running)


def _work(rank: int, workers: int, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    os.environ |= {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _wait(running: set[int]) -> int:
    """0, or the status of the first worker that failed."""
    failed = 0
    while running:
        child, status = os.wait()
        running.remove(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
