"""Attendance: every worker says how far it is, so that a missing one is named and not only missed.

What a step does for it is to count, in this process alone. A thread writes the count into the store of the
process group (see `Attendance`), twice a second. A worker that waits in vain reads what the others wrote,
names those that did not come, and says what they do instead. Meanwhile that is printed on stderr, too (see
`telling`): collectives on GPUs never fail where Python could catch it.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch.distributed as dist

from ridgeline import units
from ridgeline.errors import (
    AbsentWorkerError,
    EngineError,
    KVStoreError,
    first_line,
    unanswered,
)
from ridgeline.host.bounded import Wait, within
from ridgeline.recording.recorder import Recorder
from ridgeline.workers import leaving, telling
from ridgeline.workers.roll_call import LEFT, Absence, Row, absence_text, absent, without_store
from ridgeline.workers.world import World

EVERY_S = 0.5
"""Seconds between two words of a worker. One takes about 10 us of another thread."""
PATIENCE_S = 5.0
"""How long an answer is waited for, once something has failed: ten times what one takes."""
_POLL_S = 0.02
_IN_STEP = "in a step"
_STORE = "the store"
_OF_GLOO = ("gloo", "Application timeout caused pair closure")
"""In its errors: the first to time out has the file where it did, what waited behind it only these words."""
_STORE_TIMEOUT = timedelta(seconds=10)

_present: "weakref.WeakKeyDictionary[dist.ProcessGroup, Attendance]" = weakref.WeakKeyDictionary()
_num_made = Counter[str]()
"""By the name of a group. A job that joins again has the same names, and may have the same store."""


class Attendance:
    """This worker's word, and the others'.

    `rank` and `ranks` are of the job; `group` is a name that these have in common, and no others of the job
    that this worker trains with. `phases` are those that it is in, the innermost last. Workers that
    `are_apart` may be at other steps than this one, and come to it all the same.

    Cost: A thread that writes some 200 bytes to the store twice a second.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Collection[int], group: str = ""
    ) -> None:
        self.store, self.group = store, group
        self._rank, self.ranks = rank, ranks
        self._rounds = self._calls = self._serial = self.num_rendezvous = 0
        self._completed: dict[str, int] = {}
        self._doing, self._step = "before its first step", ""
        self._recorder: Recorder | None = None
        self.phases: list[str] = []
        self.are_apart = False
        self._end, self._has_raised = "", False
        # What this worker did when it lost others; empty while it has lost none.
        self._lost_in = ""
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        # Before the thread's first turn: a worker that fails within half a second must not look as if it
        # never came.
        self.publish()
        self._thread = threading.Thread(target=self._run, name="ridgeline-attendance", daemon=True)
        self._thread.start()

    def enroll(self, name: str) -> str:
        """Count the steps of a new `TrainStep`; the name they are counted under, empty for one on trial."""
        if self.phases:
            return ""
        # Steps of one name would be counted together, and a worker that is behind in one would not be seen.
        taken, number = name, 1
        while taken in self._completed:
            number += 1
            taken = f"{name} ({number})"
        self._completed[taken] = 0
        return taken

    def begin_step(self, name: str, recorder: Recorder) -> None:
        """This worker is in its next step, whose frames `recorder` is notified of."""
        self._rounds += 1
        self._calls = 0
        self._step, self._recorder = name, recorder
        self._doing, self._end = _IN_STEP, ""
        self._has_raised, self._lost_in = False, ""

    def end_step(self, name: str) -> None:
        """The step is over, as far as the host is concerned."""
        self._doing = "between two steps"
        if name:
            self._completed[name] += 1

    def count_alike(self) -> None:
        """All are at one rendezvous: count alike from here on, whatever errors scripts have caught before."""
        self._rounds = self.num_rendezvous << 32

    def call(self) -> None:
        """A collective begins."""
        self._calls += 1

    def stopped(self, error: BaseException) -> None:
        """An error of this worker's own ends its step; the others are notified at once."""
        is_own = not isinstance(error, AbsentWorkerError)
        # Before it counts back, since the thread may write a word in between.
        if is_own:
            self._end, self._has_raised = _raised(error), True
        if not self._calls:
            # Its next step meets the one that others are in, since none of this one's exchanges has begun.
            self._rounds -= 1
        if is_own:
            self.publish()

    def closed(self, name: str) -> None:
        """A `TrainStep` was closed."""
        if name:
            self._doing = telling.after_closing(name)

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        """Collectives inside, torch's own too, belong to `doing`, e.g. `the choice of a plan`.

        Raises:
            AbsentWorkerError: one failed, since another worker did not come.
        """
        self._rounds += 1
        self._calls = 0
        before, self._doing = self._doing, f"in {doing}"
        self._end, self._has_raised = "", False
        self.phases.append(doing)
        try:
            with self.meeting("a collective"):
                yield
        except BaseException as error:
            self.stopped(error)
            raise
        finally:
            self.phases.pop()
            self._doing = before

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """All workers come to the collective inside.

        Raises:
            AbsentWorkerError: it failed, since another worker did not.
        """
        self._calls += 1
        try:
            yield
        except (RuntimeError, EngineError, KVStoreError) as error:
            self.explain(what, error)

    def explain(self, what: str, error: Exception) -> NoReturn:
        """Raise what an error means that may be of a collective that failed.

        Raises:
            AbsentWorkerError: other workers did not come; names them.
            Exception: `error`, where all came, or where it is of something else.

        Cost: Up to `PATIENCE_S` where a worker neither answers nor is seen to be gone.
        """
        told = unanswered(error)
        is_of_others = told is not None or _is_of_collective(error)
        if isinstance(error, AbsentWorkerError) or not is_of_others:
            raise error
        # Said before the others are read: of two that lost each other, neither must take the other for the
        # cause. Where it lost them stays its place: closing its step must not hide that.
        self._lost_in = self.row().doing
        self.publish()
        mine = self.row()
        rows, absences = self._call_roll(mine, None if told is None else told.workers)
        if not absences:
            self._lost_in = ""
            raise error
        # A store's workers may have no steps.
        where = f" of {self._where()}" if self.phases or self._completed else ""
        text = absence_text(f"{what}{where}", mine, absences, rows, len(self.ranks))
        raise AbsentWorkerError(text) from error

    def row(self) -> Row:
        """This worker's word now."""
        doing = self._lost_in or self._doing
        if doing is _IN_STEP:
            frame = self._recorder.frame if self._recorder is not None else ""
            doing = f"in {self._where()}" + (f", {frame}" if frame else "")
        return Row(
            rank=self._rank,
            rounds=self._rounds,
            calls=self._calls,
            num_rendezvous=self.num_rendezvous,  # read behind the rounds, which it is counted before
            completed=dict(self._completed),
            doing=doing,
            end=self._end,
            has_raised=self._has_raised,
            is_waiting=bool(self._lost_in),
            serial=self._serial,
            pid=self._pid,
            host=self._host,
        )

    def publish(self) -> None:
        """Write this worker's word to the store; one that cannot be written is left out.

        Cost: Up to `PATIENCE_S` where the network to the store is gone.
        """
        with contextlib.suppress(RuntimeError):
            within(PATIENCE_S, self._write, _STORE)

    def _write(self) -> None:
        # Two writers, the thread and `publish`: the word with the larger serial has to be the one that stays.
        with self._lock:
            self._serial += 1
            self.store.set(self._key(self._rank), msgspec.json.encode(self.row()).decode())

    def close(self, *, wait: bool = True) -> None:
        """Say that this worker leaves, and end the thread. Safe to call twice.

        Cost: Up to `PATIENCE_S` twice where the network to the store is gone.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        # An interpreter that ends while the thread is inside of the store ends the process with SIGABRT.
        self._thread.join(PATIENCE_S)
        last = getattr(sys, "last_value", None)
        if last is not None and not self._lost_in:
            # A collective that failed is no cause, be it of the script or of another group: others may have
            # been elsewhere.
            is_own = not (isinstance(last, AbsentWorkerError) or _is_of_collective(last))
            self._end, self._has_raised = _raised(last), is_own
        self._end = self._end or LEFT
        self.publish()

    def _where(self) -> str:
        if self.phases:
            return self.phases[-1]
        number = self._completed.get(self._step, 0) + 1
        return f"step {number}" + (f" of {self._step!r}" if len(self._completed) > 1 else "")

    def _run(self) -> None:
        looks = telling.Looks()
        while not self._is_over.wait(EVERY_S):
            with contextlib.suppress(RuntimeError):
                self._write()  # here, in a thread of its own, it may wait as long as it takes
            waited_s = looks.look((self._rounds, self._calls), time.monotonic())
            if waited_s and self._tell_of_absent(waited_s):
                looks.has_told()

    def _tell_of_absent(self, waited_s: float) -> bool:
        """Say on stderr who is behind; whether there was something to say."""
        is_early, mine = waited_s < telling.TOLD_AFTER_S, self.row()
        if is_early and not mine.is_inside:
            return False
        lower = [rank for rank in self.ranks if rank < self._rank][:1]
        with contextlib.suppress(RuntimeError):
            # Early on most workers read one row: if that one comes, or is only late, it is its to tell.
            if is_early and lower and not self._sure(self.others(lower)):
                return False
            rows = self.others()
            sure = self._sure(rows) if is_early else rows
            gone = [rank for rank, row in rows.items() if telling.is_gone(row)]
            line = telling.told_line(mine, rows, self.ranks, gone, sure, waited_s)
            sys.stderr.write(line)
            sys.stderr.flush()
            return bool(line)
        return False

    def _sure(self, rows: Mapping[int, Row]) -> list[int]:
        """Those that are sure not to come to where this worker is."""
        closed = "" if self.phases else telling.after_closing(self._step)
        return [r for r, row in rows.items() if row.doing == closed or telling.is_gone(row)]

    def _call_roll(
        self, mine: Row, named: Collection[int] | None
    ) -> tuple[dict[int, Row], list[Absence]]:
        """What all others say, each as of now if it still speaks, and who of them is absent; see `absent`."""
        wait, first = Wait(PATIENCE_S), None
        while True:
            try:
                rows = within(PATIENCE_S, self.others, _STORE)
            except RuntimeError as error:
                return {}, [without_store(_kind_and_line(error))]
            first = rows if first is None else first
            # A larger serial shows that its thread still runs, whatever its step does.
            fresh = {r for r, row in rows.items() if row.serial > first.get(r, row).serial}
            told = {r for r, row in rows.items() if row.end or row.is_waiting}
            pending = set(self.ranks) - fresh - told - {self._rank}
            # Sure at once on this host; of other hosts only silence tells.
            asked = pending | {r for r, row in rows.items() if row.is_waiting and not row.end}
            silent = {r: telling.GONE for r in asked if r in rows and telling.is_gone(rows[r])}
            is_clear = not pending.isdisjoint(silent) or any(r.has_raised for r in rows.values())
            is_over = wait.is_over()
            if is_clear or not pending:
                absences = absent(mine, rows, self.ranks, silent, named)
                # Who gave up closes its connections at once, and says only later that it leaves.
                gave_up = not asked - pending <= silent.keys()
                if absences or is_over or not gave_up:
                    return rows, absences
            elif is_over:
                silent = {r: f"no sign of life for {units.seconds(PATIENCE_S)}" for r in pending}
                return rows, absent(mine, rows, self.ranks, silent, named)
            time.sleep(_POLL_S)

    def others(self, ranks: Collection[int] | None = None) -> dict[int, Row]:
        """The last word of each other worker that ever gave one, or of some of them."""
        asked = self.ranks if ranks is None else ranks
        keys = {rank: self._key(rank) for rank in asked if rank != self._rank}
        # `get` blocks until a key exists, so keys of workers that never came are looked up first.
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {
            rank: msgspec.json.decode(self.store.get(key), type=Row) for rank, key in there.items()
        }

    def _key(self, rank: int) -> str:
        """Of a worker's word in the store; it may train in several groups, each of which has its rounds."""
        return f"ridgeline/attendance/{self.group}/{rank}"

    def end_with(self, group: dist.ProcessGroup) -> None:
        """End the thread once the group is no more: that of some workers may go long before the job's own."""
        over = self._is_over
        # The event and not `self`: the callback would otherwise keep this object, its thread and its store
        # alive.
        self._on_end = weakref.ref(group, lambda _: over.set())


def of(world: World) -> Attendance | None:
    """The attendance of this process in the group of its world; None for a worker alone."""
    group = world.process_group if world.size > 1 and leaving.is_open() else None
    if group is None or not leaving.is_open(group):
        return None
    found = _present.get(group)
    if found is None:
        store = leaving.job_store()
        # On a connection of its own no word waits for a worker that waits at the store, e.g. for a new group.
        with contextlib.suppress(AttributeError, RuntimeError):  # not every store can have one
            store = getattr(store, "clone")()  # noqa: B009 - which torch's own types do not know of
            store.set_timeout(_STORE_TIMEOUT)
        ranks = world.ranks()
        _num_made[name := group.group_name] += 1
        found = Attendance(store, ranks[world.rank], ranks, f"{name}/{_num_made[name]}")
        _present[group] = found
        leaving.close_before_leaving(found)
        found.end_with(group)
    return found


def meeting(what: str, world: World) -> contextlib.AbstractContextManager[None]:
    """See `Attendance.meeting`; nothing for a worker alone."""
    present = of(world)
    return contextlib.nullcontext() if present is None else present.meeting(what)


def phase(doing: str, world: World) -> contextlib.AbstractContextManager[None]:
    """See `Attendance.phase`; nothing for a worker alone."""
    present = of(world)
    return contextlib.nullcontext() if present is None else present.phase(doing)


def occasion(world: World) -> str:
    """The `phase` that this worker is in; empty outside of any, and for a worker alone."""
    present = of(world)
    return present.phases[-1] if present is not None and present.phases else ""


def _kind_and_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error, '')}".removesuffix(": ")


def _raised(error: BaseException) -> str:
    return f"it raised {_kind_and_line(error)}"


def _is_of_collective(error: BaseException) -> bool:
    """Whether torch's collectives raised it: gloo's errors have no type of their own."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(words in text for words in _OF_GLOO)
