"""Servers and workers that are killed with messages of some type, while others train.

    [RIDGELINE_KILLS_ELEMENTS=N] python tests/kvstore/kills.py [SEEDS] [FIRST] [--jobs N] [--out FILE]

kills a server, and then a worker, at every type of message, by so many seeds (100) from FIRST (0) on, N at a time,
and says which failed; ends with status 1 where some did. FILE gets all outcomes as JSON, also where SIGTERM ends the
run early. With 3,000,000 elements the largest value is three slices. `test_deaths.py` runs two seeds of small ones.
"""

import argparse
import faulthandler
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
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import dying
import msgspec
import torch
from dying import Death
from kill_outcomes import Outcome, report, summary

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer, Notice
from ridgeline.runtime.kvstore.serving.segment import SHARED_FILES
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf

MOST_AT_SERVER = {
    "Push": 12,
    "PushRows": 8,
    "Pull": 12,
    "Init": 3,
    "Know": 6,
    "Enter": 6,
    "Beat": 2,
}
MOST_OF_WORKER = {
    "Push": 10,
    "PushRows": 5,
    "Pull": 12,
    "Know": 3,
    "Enter": 3,
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

    def _start(self) -> tuple[Any, Any, FoundServer]:
        mine, its = self._processes.Pipe()
        death = self._deaths.pop(0) if self._deaths else None
        server = self._processes.Process(target=dying.serve, args=(self._folder, 2, death, its))
        server.start()
        its.close()
        self.num_started += 1
        return server, mine, FoundServer(*mine.recv())

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
    """What a worker says of its pushes.

    Attributes:
        acknowledged: How many there were, by key.
        longest_s: The longest time from one of them, or from when this was made, to the next, or to the end.
    """

    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = defaultdict(int)
        self.longest_s = 0.0
        self._last_s = time.monotonic()

    def send(self, told: tuple[str, int]) -> None:
        self.acknowledged[told[0]] = told[1]
        now_s = time.monotonic()
        self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s


def memory_in(folder: Path) -> Path:
    """Where the processes of one kill share memory, this one included, and nobody else."""
    memory = folder / "memory"
    memory.mkdir()
    dying.share_in(str(memory))
    return memory


def opened(supervisor: Supervisor, rank: int) -> RemoteShelf:
    """A worker of this process, whose connections are quick from then on."""
    dying.be_quick()
    address = supervisor.first.address
    return RemoteShelf([address], rank, 2, lease_s=dying.LEASE_S, notice=supervisor.notice)


def step_or_leave(shelf: RemoteShelf, says: Any, *, has_function: bool) -> None:
    """What a worker does, who is waited for no longer where it fails."""
    try:
        dying.steps(shelf, says, has_function=has_function)
    except BaseException:
        shelf.close()
        raise


def kill_server(kind: str, seed: int, processes: Any, folder: Path) -> float:
    """Kill servers at a type of message: two workers go on, and all that they pushed is in the values once.

    Returns:
        The longest time in which a worker came no further, in seconds.
    """
    memory = memory_in(folder)
    chance = random.Random(f"{kind} {seed}")
    # Those that a worker says to a new server come with the second one.
    first = [Death("Push", 3, is_after=True)] if kind in ("Again", "Whole") else []
    count = chance.randint(1, MOST_AT_SERVER.get(kind, 1))
    deaths = [*first, Death(kind, count, is_after=chance.random() < 0.5)]
    deaths.append(Death("Push", chance.randint(1, 9), is_after=chance.random() < 0.5))
    with supervised(processes, folder, deaths) as supervisor:
        shelves, told = [opened(supervisor, rank) for rank in range(2)], [Told(), Told()]
        with ThreadPoolExecutor(2) as threads:
            function = kind == "SetUpdater"
            begun = [
                threads.submit(step_or_leave, shelf, says, has_function=function)
                for shelf, says in zip(shelves, told, strict=True)
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
    assert [*memory.iterdir()] == []
    return max(one.longest_s for one in told)


def kill_worker(kind: str, seed: int, processes: Any, folder: Path) -> float:
    """Kill a worker at a type of message: the other one goes on after a lease, or is told what it lacks.

    The values hold what was acknowledged, and one push more at most.

    Returns:
        The longest time in which the other one came no further, in seconds.
    """
    memory = memory_in(folder)
    chance = random.Random(f"{kind} {seed}")
    count = chance.randint(1, MOST_OF_WORKER.get(kind, 1))
    death = Death(kind, count, is_after=chance.random() < 0.5)
    killed = 0 if kind in OF_FIRST else 1
    told, out, versions, refused = Told(), torch.empty(()), None, ""
    with supervised(processes, folder, []) as supervisor:
        mine, its = processes.Pipe()
        args = (killed, supervisor.first.address, str(memory), death, its)
        worker = processes.Process(target=dying.work, args=args)
        worker.start()
        its.close()
        shelf = opened(supervisor, 1 - killed)
        waits = Told()
        try:
            dying.steps(shelf, waits, has_function=kind == "SetUpdater")
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
    assert len([*memory.iterdir()]) <= 1  # the killed one may have had no time to take a name away
    assert worker.exitcode == -signal.SIGKILL
    if versions is None:
        assert kind == "Init"
        assert NO_FIRST_VALUE in refused
    else:
        assert out == sum(versions.values())
        assert versions[1 - killed] == 6
        assert 0 <= versions.get(killed, 0) - told.acknowledged["n"] <= 1
    return waits.longest_s


KILLS: dict[str, Callable[[str, int, Any, Path], float]] = {
    "server": kill_server,
    "worker": kill_worker,
}


_processes: list[Any] = []
"""Those of a job, which makes all its servers and workers from one."""


def begin_job() -> None:
    """Have this process, and all that it starts, be ended together."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)  # says what a kill that does not end waits for
    torch.set_num_threads(1)
    _processes.append(made_processes())


def kill_once(seed: int, victim: str, kind: str, root: str) -> Outcome:
    """One kill, in a job."""
    begun_s, longest_s, error = time.monotonic(), 0.0, ""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            longest_s = KILLS[victim](kind, seed, _processes[0], Path(folder))
        except Exception:  # noqa: BLE001 - told of, and the others are killed all the same
            error = traceback.format_exc()
    return Outcome(seed, victim, kind, time.monotonic() - begun_s, longest_s, error)


class Ended(BaseException):
    """SIGTERM."""


def end(*_: Any) -> None:
    """Go on where the run is reported."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def run(wanted: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Kill by as many seeds as asked, and add what became of it; all processes have ended then."""
    kills = [
        (seed, victim, kind)
        for seed in range(wanted.first, wanted.first + wanted.seeds)
        for victim in KILLS
        for kind in dying.TYPES
    ]
    with jobs(min(wanted.jobs, len(kills))) as begin:
        for done in as_completed([begin(*one) for one in kills]):
            outcome = done.result()
            outcomes.append(outcome)
            if outcome.error:
                sys.stdout.write(
                    f"{outcome.victim} {outcome.kind} {outcome.seed}:\n{outcome.error}"
                )
            if len(outcomes) % (len(kills) // wanted.seeds) == 0:
                sys.stdout.write(f"{summary(outcomes)}\n")
            sys.stdout.flush()


@contextmanager
def jobs(number: int) -> Iterator[Callable[[int, str, str], "Future[Outcome]"]]:
    """What begins a kill by seed, victim and type in one of so many jobs; all that runs at the end is ended."""
    pool = ProcessPoolExecutor(number, made_processes(), begin_job)
    with tempfile.TemporaryDirectory(prefix="kills-", dir=SHARED_FILES) as root:
        try:
            yield lambda *one: pool.submit(kill_once, *one, root)
        finally:
            for job in [*(pool._processes or {})]:
                with suppress(ProcessLookupError):  # it has ended, or not begun
                    os.killpg(job, signal.SIGKILL)
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """Kill by as many seeds as asked."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument(
        "--jobs", type=int, default=1, help="seeds at a time; most of one is waiting"
    )
    parser.add_argument("--out", type=Path, help="for all outcomes, as JSON")
    wanted = parser.parse_args()
    begun_s, outcomes = time.monotonic(), list[Outcome]()
    signal.signal(signal.SIGTERM, end)
    try:
        run(wanted, outcomes)
    except Ended:
        sys.stdout.write("ended by SIGTERM\n")
    told = report(outcomes, time.monotonic() - begun_s, wanted)
    sys.stdout.write(f"{told['summary']}, {told['seconds']:.0f} s\n")
    if wanted.out is not None:
        wanted.out.write_bytes(msgspec.json.encode(told))
    return int(bool(told["failed"]) or told["killed"] < told["wanted"])


if __name__ == "__main__":
    sys.exit(main())
