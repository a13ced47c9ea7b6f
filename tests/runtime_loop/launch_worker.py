"""A worker program for the tests of launching: does what its request says."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from ridgeline.workers import worker_process


def main() -> None:
    path, parent = Path(sys.argv[1]), int(sys.argv[2])
    worker_process.end_with_parent(parent)
    run_dir, rank = path.parent, int(os.environ["RANK"])
    worker_process.redirect_output(worker_process.log_path(run_dir, rank))
    request = json.loads(path.read_text())
    with worker_process.last_words(run_dir, rank):
        act(request.get(str(rank), request["else"]), run_dir, rank)


def act(what: str, run_dir: Path, rank: int) -> None:
    from ridgeline.errors import NonFiniteError
    from ridgeline.workers.blackbox import BlackBox

    box = BlackBox(run_dir / "blackbox" / f"rank-{rank}.bin")
    os.write(1, f"hello from {rank}, threads {os.environ.get('OMP_NUM_THREADS')}\n".encode())
    (run_dir / f"pid.{rank}").write_text(str(os.getpid()))
    if what == "tell":
        with (run_dir / "logs" / "progress.jsonl").open("ab", buffering=0) as file:
            file.write(b"one\ntwo\n")
    if what == "say no":
        raise NonFiniteError("wanted finite loss, got NaN")
    if what == "fail":
        raise ValueError("the batch is odd")
    if what == "segfault":
        box.step(4)
        box.frame("forward")
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "train":
        import torch
        import torch.distributed as dist

        from ridgeline.workers.world import World

        World.join(threads=1, device="cpu")
        box.step(5)
        box.frame("all_reduce/0")  # where it is from now on, whenever it is killed
        (run_dir / f"running.{rank}").touch()
        while True:
            dist.all_reduce(torch.zeros(4))
    if what == "load":  # as while modules are imported, ahead of all else
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (run_dir / f"running.{rank}").touch()
        threading.Event().wait()
    if what == "wait":
        (run_dir / f"running.{rank}").touch()
        threading.Event().wait()


if __name__ == "__main__":
    main()
