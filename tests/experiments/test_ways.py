"""What the three experiments share: ways checked, timed in turns, set against a limit, and shown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from rows import row_of

from made_host import HOST
from printed import as_text
from ridgeline.errors import EngineError, TaskError
from ridgeline.experiments.ways.case import (
    Bound,
    Case,
    Contest,
    Way,
    WayRemarks,
    WayRunner,
    longest,
    simply,
)
from ridgeline.experiments.ways.contest import (
    CHECKED_ELEMENTS,
    NO_NUMBER,
    _Hold,
    difference,
    hold,
    observed,
)
from ridgeline.experiments.ways.experiment import run_cases
from ridgeline.experiments.ways.result import (
    LowerBound,
    WayCase,
    WayExperiment,
    WayRow,
    hidden_share,
)
from ridgeline.experiments.ways.text import case_text, conclusions, experiment_text
from ridgeline.machine import Quantity
from ridgeline.probe.groups.peers import Peers

ALONE = Peers(0, 1, torch.device("cpu"))


def fail(error: BaseException) -> Any:
    raise error


def ones() -> torch.Tensor:
    return torch.ones(4)


@dataclass(frozen=True)
class Noted(Peers):
    """A worker alone that notes when it waits for others, and when it tells them something."""

    events: list[str] = field(default_factory=list)

    def barrier(self) -> None:
        self.events.append("come")

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        self.events.append("told")
        return super().gather(values)


def case(*ways: Way, name: str = "tiny", **more: Any) -> Case:
    contest = {key: more.pop(key) for key in ("bound", "explain", "close") if key in more}
    return Case(name=name, title="4 values", prepare=lambda: Contest(ways=ways, **contest), **more)


def held(*ways: Way, **more: Any) -> WayCase:
    return hold(case(*ways, **{"calls": 2, **more}), limit_s=1.0, progress=lambda line: None)


def way(name: str, run: Callable[[], Any] = ones, kind: Any = "peer", **more: Any) -> Way:
    return Way(name, kind, lambda: WayRunner(run=run, **more))


def test_ways_are_compared() -> None:
    """Every way has its time, its ratio to the first and its difference from it; the limit follows from parts."""
    bound = Bound(parts={"a": ones, "b": ones}, seconds=longest("a", "b"), reason="the longer")
    result = held(way("first"), way("other", lambda: 2 * ones()), bound=bound, hides=True, units=10)
    assert [row.name for row in result.rows] == ["first", "other", "a", "b"]
    assert [row.kind for row in result.rows] == ["peer", "peer", "part", "part"]
    assert row_of(result, "first").times_faster.value == 1.0
    assert (row_of(result, "first").difference, row_of(result, "other").difference) == (0.0, 1.0)
    assert 0.0 <= row_of(result, "other").hidden <= 1.0
    assert row_of(result, "a").hidden is None
    assert result.turns >= 3


def test_without_the_first_nothing_is_compared() -> None:
    """Where the first way fails the others have their times, and no ratio."""
    bound = Bound(parts={"a": ones}, seconds=longest("first", "a"), reason="the longer")
    result = held(way("first", lambda: fail(RuntimeError("no"))), way("other"), bound=bound)
    assert row_of(result, "other").seconds is not None
    assert row_of(result, "other").times_faster is None
    assert (result.limit, result.notes) == (None, ())


def test_figures_are_taken_turn_by_turn() -> None:
    """A change of the machine's speed meets ways and parts alike: ratios, limit and hidden share stay."""
    speeds = [1.0, 10.0, 2.0]
    taken = {"first": 4.0, "ours": 3.0, "compute": 2.5, "copy": 1.5}
    samples = {name: [s * speed for speed in speeds] for name, s in taken.items()}
    parts = {"compute": ones, "copy": ones}
    bound = Bound(parts=parts, seconds=longest("compute", "copy"), reason="the longer")
    made = case(way("first"), way("ours"), bound=bound, hides=True, units=2)
    contest = _Hold(made, made.prepare(), lambda line: None, ALONE)
    contest._rows = {name: WayRow(name=name, kind="part") for name in taken}
    result = contest._completed(samples, calls=1, begin=0.0)
    ours = row_of(result, "ours")
    assert (ours.times_faster.low, ours.times_faster.high) == pytest.approx((4 / 3, 4 / 3))
    assert ours.of_limit == pytest.approx(2.5 / 3.0)
    assert ours.hidden == pytest.approx(1.0 / 1.5)
    assert row_of(result, "first").hidden == pytest.approx(0.0)
    assert (ours.seconds.value, result.limit.seconds) == (3.0, 2.5)
    assert row_of(result, "copy").of_limit is None


def test_failures_are_rows() -> None:
    """A way that cannot be made, or fails in the first run or in a turn, is a row; the others stand."""
    runs = iter(range(100))

    def late() -> torch.Tensor:
        return ones() if next(runs) < 2 else fail(RuntimeError("too late"))

    closed: list[str] = []
    result = held(
        way("first"),
        Way("unmade", "peer", lambda: fail(EngineError("no lane"))),
        way("broken", lambda: fail(ValueError("x" * 400)), close=lambda: closed.append("broken")),
        way("late", late, close=lambda: closed.append("late")),
        Way("lacking", "peer", simply(ones), "needs a CUDA device"),
        way("more results", lambda: [ones(), ones()]),
    )
    reasons = {row.name: (row.status, row.reason[:40]) for row in result.rows}
    assert reasons == {
        "first": ("measured", ""),
        "unmade": ("failed", "EngineError: no lane"),
        "broken": ("failed", "ValueError: " + "x" * 28),
        "late": ("failed", "RuntimeError: too late"),
        "lacking": ("skipped", "needs a CUDA device"),
        "more results": ("failed", "ValueError: zip() argument 2 is shorter "),
    }
    assert row_of(result, "first").seconds is not None
    assert row_of(result, "late").seconds is None
    assert sorted(closed) == ["broken", "late"]
    assert len(row_of(result, "broken").reason) < 330


def test_without_a_part_there_is_no_limit() -> None:
    """A part that fails is a row, and leaves the figures of the ways; inputs that fail leave the case out."""
    bound = Bound(parts={"a": lambda: fail(RuntimeError("no"))}, seconds=longest("a"), reason="")
    result = held(way("first"), bound=bound, explain=lambda seconds: fail(AssertionError("asked")))
    assert (result.limit, result.notes) == (None, ())
    assert row_of(result, "first").seconds is not None
    assert (row_of(result, "a").status, row_of(result, "a").reason) == (
        "failed",
        "RuntimeError: no",
    )
    assert "RuntimeError: no" in as_text(case_text(result))
    unmade = Case(name="big", title="huge", prepare=lambda: fail(RuntimeError("out of memory")))
    left_out = hold(unmade, limit_s=1.0, progress=lambda line: None)
    assert (left_out.rows, left_out.skipped) == ((), "RuntimeError: out of memory")


def test_everything_is_closed() -> None:
    """Ways are released also when the user interrupts."""
    closed: list[str] = []
    turns = iter(range(100))

    def interrupted() -> torch.Tensor:
        return ones() if next(turns) < 3 else fail(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        held(way("first", interrupted, close=lambda: closed.append("way")))
    assert closed == ["way"]


def test_threads_are_those_of_the_way() -> None:
    """A way runs with its own threads, the others with the case's; afterwards they are as before."""
    before = torch.get_num_threads()
    seen: dict[str, set[int]] = {"first": set(), "own": set()}

    def run(name: str) -> torch.Tensor:
        seen[name].add(torch.get_num_threads())
        return ones()

    held(way("first", lambda: run("first")), way("own", lambda: run("own"), threads=2), threads=1)
    assert seen == {"first": {1}, "own": {2}}
    assert torch.get_num_threads() == before


def test_remarks_are_asked_after_running() -> None:
    """Notes and the peak are those after the last turn."""
    runs: list[int] = []
    result = held(
        way(
            "first",
            lambda: runs.append(1),
            remarks=lambda: WayRemarks(notes=(f"{len(runs)} runs",), peak_bytes=7),
        )
    )
    assert row_of(result, "first").notes == (f"{2 + 2 * result.turns} runs",)
    assert row_of(result, "first").peak_bytes == 7


def test_a_turn_ends_when_all_workers_have_said_so() -> None:
    """What counts the bytes of a link begins after all came, and ends after all have told their seconds."""
    peers = Noted(0, 1, torch.device("cpu"))
    events = peers.events
    counted = way(
        "first",
        lambda: events.append("run"),
        before_turn=lambda: events.append("before"),
        after_turn=lambda: events.append("after"),
    )
    hold(case(counted, calls=1), limit_s=0.2, progress=lambda line: None, peers=peers)
    turn = ["come", "before", "run", "told", "after"]
    begin = events.index("before") - 1
    assert events[begin : begin + len(turn)] == turn


def test_large_results_are_compared_by_samples() -> None:
    """Of a large result evenly spaced elements are kept; of nothing nothing; numbers count, too."""
    (seen,) = observed(torch.arange(float(3 * CHECKED_ELEMENTS)))
    assert seen.numel() <= CHECKED_ELEMENTS
    assert seen[1] - seen[0] == 3.0
    assert [leaf.tolist() for leaf in observed({"a": 2, "b": [torch.ones(1), "text"]})] == [
        [2.0],
        [1.0],
    ]
    assert difference(observed([2.0, torch.empty(0)]), observed([4.0, torch.empty(0)])) == 0.5


def test_results_that_are_no_numbers_differ() -> None:
    """Wherever they stand among the results, and for infinity as for NaN."""
    wanted = observed([1.0, 2.0])
    for seen in ([1.0, math.nan], [math.nan, 2.0], [1.0, math.inf]):
        assert difference(observed(seen), wanted) == NO_NUMBER


@pytest.mark.parametrize(
    ("seconds", "share"), [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (4.0, -1.0), (1.0, 2.0)]
)
def test_hidden_share(seconds: float, share: float) -> None:
    """Of 2 s and 1 s together: 3 s hide nothing, 2 s all; noise can go beyond."""
    assert hidden_share({"compute": 2.0, "copy": 1.0}, seconds) == share
    assert hidden_share({"compute": 2.0}, seconds) is None
    assert hidden_share({"compute": 2.0, "copy": 0.0}, seconds) is None


def test_experiment(tmp_path) -> None:
    """Cases are held in order, or left out with their reason; saved, the experiment reads back equal."""
    lines: list[str] = []

    def cases(device: str, quick: bool) -> list[Case]:
        assert (device, quick) == ("cpu", True)
        return [
            case(way("a"), calls=1),
            case(name="elsewhere", lacking="needs a CUDA device"),
            case(way("b"), name="last", calls=1, weight=2.0),
        ]

    experiment = run_cases(
        "overlap", cases, quick=True, limit_s=0.1, device="cpu", progress=lines.append
    )
    assert [one.name for one in experiment.cases] == ["tiny", "elsewhere", "last"]
    assert experiment.cases[1].skipped == "needs a CUDA device"
    assert lines == ["tiny: a", "tiny: taking turns", "last: b", "last: taking turns"]
    assert WayExperiment.load(experiment.save(tmp_path / "ways.json")) == experiment
    only = run_cases("overlap", cases, quick=True, only=("last",), limit_s=0.1, device="cpu")
    assert [one.name for one in only.cases] == ["last"]
    with pytest.raises(TaskError) as caught:
        run_cases("overlap", cases, quick=True, only=("last", "first"), device="cpu")
    assert str(caught.value) == (
        "wanted cases out of tiny, elsewhere, last, got first for the experiment overlap; name some of those"
    )


def row(name: str, kind: Any, seconds: float, **more: Any) -> WayRow:
    faster = Quantity.measured([4e-3 / seconds], "x")
    timed = (
        {}
        if kind == "part"
        else {"times_faster": faster, "of_limit": 1.9e-3 / seconds, "difference": 0.0}
    )
    return WayRow(name=name, kind=kind, seconds=Quantity.measured([seconds], "s"), **(timed | more))


FULL = WayCase(
    name="batches",
    title="20 batches",
    unit="batch",
    calls=1,
    turns=15,
    rows=(
        row("load, then compute", "sequential", 4e-3, hidden=0.0, peak_bytes=1 << 20),
        row("DataLoader", "peer", 3e-3, hidden=0.5, difference=1e-7, peak_bytes=64 << 20),
        row(
            "ridgeline feed", "ridgeline", 2e-3, hidden=1.0, peak_bytes=2 << 20, notes=("hid 99 %",)
        ),
        WayRow(name="ridgeline other", kind="ridgeline", status="failed", reason="no lane"),
        WayRow(name="by hand", kind="peer", status="skipped", reason="needs a CUDA device"),
        row("loading alone", "part", 1.6e-3),
    ),
    limit=LowerBound(seconds=1.9e-3, reason="the longer"),
    notes=("the law says so",),
)


def test_text() -> None:
    """The table: ways by kind, parts, the limit; then what it means, notes, and what was not run."""
    experiment = WayExperiment(
        name="overlap",
        host=HOST,
        devices=(),
        versions={"torch": "2.13.0"},
        is_quick=True,
        limit_s=60.0,
        cases=(FULL, WayCase(name="results", title="10 products", skipped="needs a CUDA device")),
    )
    text = as_text(experiment_text(experiment))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    assert [line for line in lines if "──" not in line] == [
        "Overlapped copies Processor, 2 cores; torch 2.13.0",
        "batches 20 batches; per batch, 15 turns of 1 run",
        "Time Quartiles x first Of limit Hidden Peak Difference",
        "load, then compute 4.00 ms 4.00 ms .. 4.00 ms 1.00 47.5 % 0.0 % 1.00 MiB 0",
        "DataLoader 3.00 ms 3.00 ms .. 3.00 ms 1.33 63.3 % 50.0 % 64.0 MiB 1.0e-07",
        "ridgeline feed 2.00 ms 2.00 ms .. 2.00 ms 2.00 95.0 % 100.0 % 2.00 MiB 0",
        "ridgeline other failed no lane",
        "loading alone 1.60 ms 1.60 ms .. 1.60 ms",
        "limit 1.90 ms",
        "ridgeline feed: 2.00 times load, then compute, 1.50 times DataLoader, 95.0 % of the limit (the longer), at most 2.00 MiB alive instead of 64.0 MiB",
        "the law says so",
        "ridgeline feed: hid 99 %",
        "! needs a CUDA device: by hand",
        "results 10 products",
        "! not held here: needs a CUDA device",
    ]


def test_text_without_figures() -> None:
    """Without a way of ours, or without any, there is a table and no conclusion."""
    nothing = WayCase(name="a", title="b", rows=(row("one", "sequential", 1.0),))
    assert conclusions(nothing) == conclusions(WayCase(name="a", title="b")) == []
    assert "one" in as_text(case_text(nothing))
    assert FULL.fastest("sequential") is FULL.rows[0]
