"""The search of `mode="auto"`: make, check and time the modes, cheapest first, inside a budget."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ridgeline.callables.calls.entry import Entry
from ridgeline.callables.calls.forms import CallableForm, compiled_with_guards
from ridgeline.callables.calls.front import front_of
from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.calls.repeated import repeats_of
from ridgeline.callables.calls.report import ModeRow, Status
from ridgeline.callables.calls.selection import (
    ModeDecision,
    ModeTiming,
    break_even_calls,
    decide,
    why_not_worth,
)
from ridgeline.errors import CaptureError, PackageError
from ridgeline.execution import MODES, Form, offered
from ridgeline.guards.settled import tensors_of
from ridgeline.plan import Execution
from ridgeline.recording.turns import call_s, calls_in, turns_of, wait_for
from ridgeline.state.saved_state import preserved

ORDER: tuple[Execution, ...] = (
    "eager", "graph", "script", "compiled", "compiled+graph", "regional", "regional+graph", "packaged",
)  # fmt: skip
"""Cheap and simple first; a form that exists already costs its graph only a capture."""
EXPECTED_COMPILE_S: dict[Form, float] = {
    "script": 1.0,
    "compiled": 20.0,
    "regional": 20.0,
    "packaged": 30.0,
}
"""Seconds assumed before a form was ever made. Source: measured on two cores with torch 2.13; a small
network took 1 to 17 s compiled (the first one loads the compiler) and 11 to 25 s as a package."""
EXPECTED_CAPTURE_S = 1.0
TURNS = 15
MOST_ROUNDS = 4
STEADY = 0.2
"""Turns are repeated until the quartiles of every mode lie within this share of its median, or often enough:
on a machine that does other things as well, a few turns say nothing."""
BLOCK_S = 1e-3
"""One turn calls a mode for about this long."""


class Search(NamedTuple):
    """What a search found; `entry` is None where the program as written is the best."""

    rows: tuple[ModeRow, ...]
    decision: ModeDecision
    entry: Entry | None


def search(
    fn: Callable[..., Any],
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    reads: CallReads | None,
    device: torch.device,
    *,
    refusal: str = "",
    is_left_to_compiler: bool = False,
    calls: int | None,
    budget_s: float,
    static_io: bool,
) -> Search:
    """Try the modes offered on the device, and keep the fastest that is equivalent.

    Args:
        fn: The callable as written.
        eager: The same without gradients, as it would be called in eager mode.
        args: Example arguments.
        reads: What `fn` reads and takes for granted; its tensors are afterwards as they were. None: see
            `refusal`.
        device: Where it runs.
        refusal: Why nothing can be captured.
        is_left_to_compiler: `torch.compile` may be tried nevertheless, with guards of its own.
        calls: Number of calls, if known.
        budget_s: No compilation starts that is expected to end after this many seconds.
        static_io: See `rl.hybridize`.

    Cost: Up to the budget; more if a compilation takes longer than expected, since it is not broken off.
    """
    if reads is None and not is_left_to_compiler:
        return _none_tried(refusal, device)
    end = time.perf_counter() + budget_s
    rows: dict[Execution, ModeRow] = {"eager": ModeRow(mode="eager", status="measured")}
    runs: dict[Execution, Callable[[], Any]] = {"eager": lambda: eager(*args)}
    entries: dict[Execution, Entry] = {}
    forms: dict[Form, CallableForm] = {}
    why = refusal if reads is None else None
    tensors = tensors_of(fn) if reads is None else reads.tensors
    # Eager first: what all calls take as written bounds what compiling may cost.
    best_s = _time(runs, tensors, device)["eager"].call_s
    for mode in ORDER:
        if mode == "eager" or mode not in offered("callable", device.type):
            continue
        if reads is None and mode != "compiled":
            rows[mode] = ModeRow(mode=mode, status="refused", reason=refusal)
            continue
        reason = why_not_worth(_expected_s(mode, forms), end - time.perf_counter(), best_s, calls)
        if reason:
            rows[mode] = ModeRow(mode=mode, status="skipped", reason=reason)
            continue
        rows[mode], entry = _try(mode, fn, args, tensors, device, static_io, forms, why)
        if entry is not None:
            entries[mode] = entry
            runs[mode] = entry.replay if static_io else _as_called(fn, entry, args, reads)
            best_s = min(best_s, _time({mode: runs[mode]}, tensors, device)[mode].call_s)
    timings = _time(runs, tensors, device)
    decision = decide([*timings.values()])
    kept = entries.pop(decision.mode, None)
    # Graphs only: forms are shared, and the one that is kept may hold the form of one that is not.
    for entry in entries.values():
        entry.close_graph()
    for form in forms.values():
        if kept is None or form is not kept.form:
            form.close()
    return Search(_timed(rows, timings), decision, kept)


def _none_tried(refusal: str, device: torch.device) -> Search:
    """Nothing can be captured, so nothing needs to be called: a call may change what it likes."""
    eager = ModeRow(mode="eager", status="measured", reason="not timed")
    others = [mode for mode in ORDER if mode in offered("callable", device.type)]
    refused = [
        ModeRow(mode=mode, status="refused", reason=refusal) for mode in others if mode != "eager"
    ]
    return Search((eager, *refused), ModeDecision("eager", "nothing else can run it"), None)


def _try(
    mode: Execution,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    tensors: list[Tensor],
    device: torch.device,
    static_io: bool,
    forms: dict[Form, CallableForm],
    unread: str | None,
) -> tuple[ModeRow, Entry | None]:
    """Make and check one mode; where the callable could not be read, with guards of the compiler's."""
    begin = time.perf_counter()
    try:
        if unread is not None:
            forms["compiled"] = compiled_with_guards(fn, args, unread)
        # What the compiler guards itself asks for that, too.
        repeats = repeats_of(args) if unread is None else None
        entry = Entry(
            mode, fn, args, tensors, device, static_io=static_io, forms=forms, repeats=repeats
        )
    except (CaptureError, PackageError) as error:
        spent_s = time.perf_counter() - begin
        return ModeRow(mode=mode, status="refused", compile_s=spent_s, reason=str(error)), None
    found, reason = entry.comparison, "; ".join(entry.notes)
    status: Status = "measured"
    if not found.is_equal:
        entry.close_graph()
        status = "different"
        reason = (
            f"not equivalent: differs from eager by {found.difference:.3g} in {found.where}, accepted are "
            f"{found.tolerance:.0e}"
        )
    row = ModeRow(
        mode=mode,
        status=status,
        compile_s=entry.compile_s,
        difference=found.difference,
        reason=reason,
    )
    return row, entry if found.is_equal else None


def _expected_s(mode: Execution, forms: Mapping[Form, CallableForm]) -> float:
    form = MODES[mode].form
    compiling = 0.0 if form in forms else EXPECTED_COMPILE_S.get(form, 0.0)
    return compiling + (EXPECTED_CAPTURE_S if MODES[mode].is_replayed else 0.0)


def _time(
    runs: Mapping[Execution, Callable[[], Any]], tensors: list[Tensor], device: torch.device
) -> dict[Execution, ModeTiming]:
    """Time calls of several modes in turns, so that a change of the machine's speed meets all alike.

    Cost: `TURNS` to `MOST_ROUNDS * TURNS` blocks a mode, each of `BLOCK_S` or one call; waits for the device
    after every block.
    """
    with preserved(tensors):
        wait, blocks = partial(wait_for, device), dict[Execution, Callable[[], float]]()
        for mode, run in runs.items():
            # Warms caches and clocks up; only the calls behind these count.
            call_s(run, 3, wait)
            blocks[mode] = partial(call_s, run, calls_in(BLOCK_S, call_s(run, 3, wait)), wait)
        samples: dict[Execution, list[float]] = {mode: [] for mode in runs}
        timings: dict[Execution, ModeTiming] = {}
        for _ in range(MOST_ROUNDS):
            for turn in itertools.islice(turns_of(blocks), TURNS):
                for mode, seconds in turn.items():
                    samples[mode].append(seconds)
            for mode, taken in samples.items():
                low, median, high = statistics.quantiles(taken, n=4)
                timings[mode] = ModeTiming(mode, median, low, high)
            if all(t.high_s - t.low_s <= STEADY * t.call_s for t in timings.values()):
                break
    return timings


def _timed(
    rows: Mapping[Execution, ModeRow], timings: Mapping[Execution, ModeTiming]
) -> tuple[ModeRow, ...]:
    """The rows with their times, and after how many calls each mode has earned its compilation back."""
    eager_s = timings["eager"].call_s
    return tuple(
        msgspec.structs.replace(
            row,
            call_s=timing.call_s,
            low_s=timing.low_s,
            high_s=timing.high_s,
            break_even=break_even_calls(eager_s, timing.call_s, row.compile_s),
        )
        if (timing := timings.get(mode)) is not None
        else row
        for mode, row in rows.items()
    )


def _as_called(
    fn: Callable[..., Any], entry: Entry, args: tuple[Any, ...], reads: CallReads | None
) -> Callable[[], Any]:
    """A call of the entry with the guards that go before it, which are part of what a call costs."""
    if reads is None:
        return lambda: entry.run(*args)
    call = front_of(fn, [(reads.guards.holds, entry.fast)], entry.run)
    return lambda: call(*args)
