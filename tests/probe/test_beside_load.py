"""What others take of the host is kept with what is measured meanwhile, and so is what trials say of it."""

from pathlib import Path

import msgspec
import pytest
from answered_requests import ONE, QUIET, TWO, cache_file

from ridgeline.machine import Machine, Setting
from ridgeline.probe import measure as probe
from ridgeline.probe.findings import Request
from ridgeline.probe.host.load import Counters, Processors

FOUR = Setting(device="cpu", workers=4, threads=1)


@pytest.mark.parametrize(("own", "told"), [(0.0, "80.0 %"), (0.5, "30.0 %"), (0.7, "")])
def test_busy_host_is_told(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch, own: float, told: str
) -> None:
    """Numbers taken beside other programs carry a warning, and what others took; our own are none."""
    moments = iter((QUIET, Counters(10.0 + own, Processors(0.8, 0.0, 1.0), None)))
    monkeypatch.setattr(probe, "counters", lambda: next(moments))
    machine = probe.measure(settings=[ONE])
    assert machine.host_load is not None
    assert machine.host_load.others == pytest.approx(0.8 - own)
    said = f"other programs used {told} of the processors when {machine.host.name} was measured: "
    said += "rates are too low and times too long; measure again when it is idle"
    assert machine.warnings == ((said,) if told else ())


def test_the_worst_of_all_parts_is_kept(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is measured in quiet makes up for no other one; measured again, the profile starts anew."""
    busy = Counters(10.0, Processors(0.6, 0.0, 1.0), None)
    moments = iter((QUIET, busy, QUIET, QUIET, QUIET, QUIET))
    monkeypatch.setattr(probe, "counters", lambda: next(moments))
    loads = [
        probe.measure(settings=settings, refresh=refresh).host_load
        for settings, refresh in (([ONE], False), ([ONE, TWO], False), ([ONE], True))
    ]
    assert [load and load.others for load in loads] == [0.6, 0.6, None]


def test_a_busy_host_is_told_once(asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worst of all parts, and not by one line for each."""
    busy = [Counters(10.0, Processors(share, 0.0, 1.0), None) for share in (0.4, 0.8, 0.6)]
    moments = iter([moment for one in busy for moment in (QUIET, one)])
    monkeypatch.setattr(probe, "counters", lambda: next(moments))
    for settings in ([ONE], [ONE, TWO], [ONE, TWO, FOUR]):
        machine = probe.measure(settings=settings)
    assert [line.partition(" when ")[0] for line in machine.warnings] == [
        "other programs used 80.0 % of the processors"
    ]


def test_marks_are_kept_with_the_profile(asked: list[Request], tmp_path: Path) -> None:
    """And nothing else of the machine that they were given with; none where the profile is another by now."""
    machine = probe.measure(settings=[ONE])
    held = msgspec.structs.replace(machine, timings=(), warnings=("held",))
    marked = probe.marked(held, "too slow", 1)
    assert marked == msgspec.structs.replace(held, suspect="too slow", retakes=1)
    kept = Machine.load(cache_file(tmp_path))
    assert kept == msgspec.structs.replace(machine, suspect="too slow", retakes=1)
    other = msgspec.structs.replace(machine, measured_at="2020-01-01T00:00:00+00:00")
    assert probe.marked(other, "no", 2).retakes == 2
    assert Machine.load(cache_file(tmp_path)) == kept
