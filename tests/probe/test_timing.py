"""Timers: what they print, what they return, and the laws of their statistics."""

import io
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ridgeline as rl
from ridgeline.probe.timing import Measurement, sample


def test_block_prints_one_line_as_the_textbook_does() -> None:
    """`name: 1.2769 sec` goes to the stream that was given, and `seconds` keeps the figure."""
    stream = io.StringIO()
    with rl.benchmark("eager", stream=stream) as timer:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    assert re.fullmatch(r"eager: \d+\.\d{4} sec\n", stream.getvalue())
    assert stream.getvalue() == f"eager: {timer.seconds:.4f} sec\n"
    assert timer.seconds > 0


def test_block_prints_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is looked up when the block ends, so captured output is captured."""
    with rl.benchmark():
        pass
    assert re.fullmatch(r"Done: \d+\.\d{4} sec\n", capsys.readouterr().out)


def test_failed_block_is_not_timed() -> None:
    """An exception passes through and no figure is printed for half a block."""
    stream = io.StringIO()
    with pytest.raises(KeyError), rl.benchmark("half", stream=stream):
        raise KeyError
    assert stream.getvalue() == ""


def test_function_timer_tells_more_work_from_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio of medians is that of the work, by a clock that work alone moves; one long call is in none."""
    now, calls = [0.0], itertools.count()

    def work(times: int) -> None:
        now[0] += 1e-4 * times + (0.3 if next(calls) == 100 else 0.0)

    assert rl.benchmark("real").time(torch.mm, torch.eye(8), torch.eye(8), seconds=0.0).median_s > 0
    fake = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("ridgeline.probe.timing.time", fake)
    monkeypatch.setattr("ridgeline.recording.turns.time", fake)
    one = rl.benchmark("one").time(work, 1, seconds=0.05)
    many = rl.benchmark("many").time(work, 32, seconds=0.05)
    assert one.median_s == pytest.approx(1e-4)
    assert many.median_s == pytest.approx(32e-4)
    assert min(one.n, many.n) >= 5


def test_measurement_reads_as_median_and_quartiles() -> None:
    """The repr gives name, median, quartiles and number of samples in readable units."""
    measurement = Measurement.of("eager", [1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    assert repr(measurement) == "eager: 3.00 ms (2.00 ms .. 4.00 ms, n=5)"
    with pytest.raises(AttributeError, match="immutable"):
        measurement.n = 3


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=50))
def test_quartiles_enclose_the_median(samples: list[float]) -> None:
    """Low <= median <= high, all within the samples."""
    measurement = Measurement.of("x", samples)
    slack = 1 + 1e-9
    assert measurement.low_s <= measurement.median_s * slack
    assert measurement.median_s <= measurement.high_s * slack
    assert min(samples) <= measurement.low_s * slack
    assert measurement.high_s <= max(samples) * slack


def test_slow_call_gets_fewer_samples() -> None:
    """A call that takes far longer than the time given is sampled once, not five times."""
    calls = 0

    def slow() -> None:
        nonlocal calls
        calls += 1
        deadline = sys.maxsize
        for _ in range(200_000):
            deadline -= 1

    assert len(sample(slow, seconds=1e-5)) == 1
    assert calls == 3  # two to warm up
