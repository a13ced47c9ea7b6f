"""Servers and workers that are killed with messages of some type, while others train.

    python tests/kvstore/kills.py [SEEDS] [FIRST]

kills a server, and then a worker, at every type of message, by so many seeds (100) from FIRST (0) on, and says which
failed; ends with status 1 where some did. `test_deaths.py` runs two seeds.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import dying
import torch
from dying import Death

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.epochs import Found, Notice
from ridgeline.runtime.kvstore.serving.remote import RemoteShelf
from ridgeline.runtime.kvstore.serving.segment import SHARED_FILES

MOST_AT_SERVER = {"Push": 12, "PushRows": 8, "Pull": 12, "Init": 3, "Know": 6, "Beat": 2}
MOST_OF_WORKER = {
    "Push": 10,
    "PushRows": 5,
    "Pull": 12,
    "Know": 3,
    "Beat": 2,
    "Barrier": 2,
    "Init": 3,
}
"""So many messages of a type there are at least; of others there is one."""
OF_FIRST = ("Init", "States", "LoadStates")
"""Types that the first worker alone sends."""
NO_FIRST_VALUE = "from worker 0, got none, and that worker is gone"


def made_processes() -> Any:
    """Processes that are made from one that has imported all there is, so that each starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dying"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where it finds that module
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= {} if before is None else {"PYTHONPATH": before}
    return context


class Supervisor:
    """Starts a server, and another one in its place each time that it is killed."""

    def __init__(self, processes: Any, folder: Path, deaths: list[Death]) -> None:
        self._processes, self._folder, self._deaths = processes, str(folder), [*deaths]
        self.notice = Notice(torch.distributed.HashStore())
        self.num_started = 0
        self._ends = threading.Event()
        self._server, self._told, self.first = self._start()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _start(self) -> tuple[Any, Any, Found]:
        mine, its = self._processes.Pipe()
        death = self._deaths.pop(0) if self._deaths else None
        server = self._processes.Process(target=dying.serve, args=(self._folder, 2, death, its))
        server.start()
        its.close()
        self.num_started += 1
        return server, mine, Found(*mine.recv())

    def _watch(self) -> None:
        while True:
            self._server.join()
            if self._server.exitcode != -signal.SIGKILL:
                return
            self._server, told, found = self._start()
            if self._ends.is_set():
                told.send(None)
            self._told = told
            self.notice.publish(0, found)

    def close(self, *, kills: bool) -> None:
        self._ends.set()
        self._told.send(None)
        while kills and self._thread.is_alive():
            self._server.terminate()
            self._thread.join(0.1)
        self._thread.join()


@contextmanager
def supervised(processes: Any, folder: Path, deaths: list[Death]) -> Iterator[Supervisor]:
    supervisor = Supervisor(processes, folder, deaths)
    try:
        yield supervisor
    except BaseException:
        supervisor.close(kills=True)
        raise
    supervisor.close(kills=False)


class Told:
    """What a worker says of its pushes."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = defaultdict(int)

    def send(self, told: tuple[str, int]) -> None:
        self.acknowledged[told[0]] = told[1]


def opened(supervisor: Supervisor, rank: int) -> RemoteShelf:
    """A worker of this process, whose connections are quick from then on."""
    dying.be_quick()
    address = supervisor.first.address
    return RemoteShelf([address], rank, 2, lease_s=dying.LEASE_S, notice=supervisor.notice)


def kill_server(kind: str, seed: int, processes: Any, folder: Path) -> None:
    """Kill servers at a type of message: two workers go on, and all that they pushed is in the values once."""
    chance = random.Random(f"{kind} {seed}")
    # Those that a worker says to a new server come with the second one.
    first = [Death("Push", 3, is_after=True)] if kind in ("Again", "Whole") else []
    count = chance.randint(1, MOST_AT_SERVER.get(kind, 1))
    deaths = [*first, Death(kind, count, is_after=chance.random() < 0.5)]
    deaths.append(Death("Push", chance.randint(1, 9), is_after=chance.random() < 0.5))
    with supervised(processes, folder, deaths) as supervisor:
        shelves = [opened(supervisor, rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            function = kind == "SetUpdater"
            begun = [
                threads.submit(dying.steps, shelf, Told(), has_function=function)
                for shelf in shelves
            ]
            for done in begun:
                done.result()
        out, rows, number = torch.empty(dying.SIZE), torch.empty(4, 3), torch.empty(())
        for key, place in (("w", out), ("e", rows), ("n", number)):
            shelves[1].read(key, [place], None)
        for shelf in shelves:
            shelf.close()
    assert torch.equal(out, torch.full((dying.SIZE,), 6.0 * 3))
    assert torch.equal(rows, torch.tensor([6.0, 6.0, 0.0, 0.0])[:, None].expand(4, 3))
    assert number == 12
    assert supervisor.num_started >= len(deaths)


def kill_worker(kind: str, seed: int, processes: Any, folder: Path) -> None:
    """Kill a worker at a type of message: the other one goes on after a lease, or is told what it lacks.

    The values hold what was acknowledged, and one push more at most.
    """
    chance = random.Random(f"{kind} {seed}")
    count = chance.randint(1, MOST_OF_WORKER.get(kind, 1))
    death = Death(kind, count, is_after=chance.random() < 0.5)
    killed = 0 if kind in OF_FIRST else 1
    shared = {*SHARED_FILES.glob("ridgeline-*")}
    told, out, versions, refused = Told(), torch.empty(()), None, ""
    with supervised(processes, folder, []) as supervisor:
        mine, its = processes.Pipe()
        args = (killed, supervisor.first.address, death, its)
        worker = processes.Process(target=dying.work, args=args)
        worker.start()
        its.close()
        shelf = opened(supervisor, 1 - killed)
        try:
            dying.steps(shelf, Told(), has_function=kind == "SetUpdater")
            versions = shelf.read("n", [out], None)
        except KVStoreError as error:
            refused = str(error)
        worker.join()
        while mine.poll():
            try:
                told.send(mine.recv())
            except EOFError:
                break
        shelf.close()
    # It had no time to take the name away.
    for left in {*SHARED_FILES.glob("ridgeline-*")} - shared:
        left.unlink()
    assert worker.exitcode == -signal.SIGKILL
    if versions is None:
        assert kind == "Init"
        assert NO_FIRST_VALUE in refused
    else:
        assert out == sum(versions.values())
        assert versions[1 - killed] == 6
        assert 0 <= versions.get(killed, 0) - told.acknowledged["n"] <= 1


KILLS: dict[str, Callable[[str, int, Any, Path], None]] = {
    "server": kill_server,
    "worker": kill_worker,
}


def main() -> int:
    """Kill by as many seeds as asked."""
    given = [int(word) for word in sys.argv[1:]]
    seeds, first = [*given, *(100, 0)[len(given) :]]
    processes, begun_s, failed, count = made_processes(), time.monotonic(), [], 0
    for seed in range(first, first + seeds):
        for who, kill in KILLS.items():
            for kind in dying.TYPES:
                count += 1
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        kill(kind, seed, processes, Path(folder))
                    except Exception:  # noqa: BLE001 - told of, and the others are killed all the same
                        failed.append(f"{who} {kind} {seed}")
                        sys.stdout.write(f"{failed[-1]}:\n{traceback.format_exc()}")
        passed_s = time.monotonic() - begun_s
        sys.stdout.write(f"seed {seed}: {count} kills, {len(failed)} failed, {passed_s:.0f} s\n")
        sys.stdout.flush()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
