"""Servers and workers that are killed with every type of message: nothing acknowledged is lost, nobody hangs."""

import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dying
import pytest
import torch
from dying import Death

from ridgeline.runtime.kvstore.serving.epochs import Found, Notice
from ridgeline.runtime.kvstore.serving.remote import RemoteShelf
from ridgeline.runtime.kvstore.serving.segment import SHARED_FILES

SEEDS = range(2)
SERVER_TYPES = [one for one in dying.TYPES if one != "SetUpdater"]
WORKER_TYPES = [one for one in SERVER_TYPES if one not in ("Init", "States", "LoadStates")]


@pytest.fixture(scope="module")
def processes() -> Any:
    """Made from a process that has imported all there is, so that each starts at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dying"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where it finds that module
        multiprocessing.forkserver.ensure_running()
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


def opened(supervisor: Supervisor, rank: int, monkeypatch: pytest.MonkeyPatch) -> RemoteShelf:
    monkeypatch.setattr(dying.connections, "Channel", dying.connections.Channel)
    dying.be_quick()
    address = supervisor.first.address
    return RemoteShelf([address], rank, 2, lease_s=dying.LEASE_S, notice=supervisor.notice)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", SERVER_TYPES)
def test_servers_that_are_killed(
    kind: str, seed: int, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers go on, and all that they pushed is in the values once."""
    chance = random.Random(f"{kind} {seed}")
    # Those that a worker says to a new server come with the second one.
    first = [Death("Push", 3, is_after=True)] if kind in ("Again", "Whole") else []
    most = {"Push": 12, "PushRows": 8, "Pull": 12, "Init": 3, "Know": 6, "Beat": 2}.get(kind, 1)
    deaths = [*first, Death(kind, chance.randint(1, most), is_after=chance.random() < 0.5)]
    deaths.append(Death("Push", chance.randint(1, 9), is_after=chance.random() < 0.5))
    with supervised(processes, tmp_path, deaths) as supervisor:
        shelves = [opened(supervisor, rank, monkeypatch) for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(dying.steps, shelf, Told()) for shelf in shelves]:
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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", WORKER_TYPES)
def test_workers_that_are_killed(
    kind: str, seed: int, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one goes on after a lease; the values hold what was acknowledged, and one push more at most."""
    chance = random.Random(f"{kind} {seed}")
    most = {"Push": 10, "PushRows": 5, "Pull": 12, "Know": 3, "Beat": 2, "Barrier": 2}.get(kind, 1)
    death = Death(kind, chance.randint(1, most), is_after=chance.random() < 0.5)
    shared = {*SHARED_FILES.glob("ridgeline-*")}
    with supervised(processes, tmp_path, []) as supervisor:
        mine, its = processes.Pipe()
        args = (1, supervisor.first.address, death, its)
        worker = processes.Process(target=dying.work, args=args)
        worker.start()
        its.close()
        shelf = opened(supervisor, 0, monkeypatch)
        dying.steps(shelf, Told())
        worker.join()
        told, out = Told(), torch.empty(())
        while mine.poll():
            try:
                told.send(mine.recv())
            except EOFError:
                break
        versions = shelf.read("n", [out], None)
        shelf.close()
    # It had no time to take the name away.
    for left in {*SHARED_FILES.glob("ridgeline-*")} - shared:
        left.unlink()
    assert worker.exitcode == -signal.SIGKILL
    assert out == sum(versions.values())
    assert versions[0] == 6
    assert 0 <= versions.get(1, 0) - told.acknowledged["n"] <= 1
