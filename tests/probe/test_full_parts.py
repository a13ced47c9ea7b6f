"""The parts of a full measurement: announced with what is left, and counted once they are known."""

from pathlib import Path

import msgspec
import pytest
from answered_requests import ONE, cache_file

from ridgeline.machine import Machine
from ridgeline.machine.microarchitecture import Microarchitecture, Nodes
from ridgeline.machine.storage import Storage
from ridgeline.probe import attempts, full_parts
from ridgeline.probe import measure as probe
from ridgeline.probe.findings import Request
from strategies import make_machine

NAMES = (
    "with_operator_dispatch",
    "with_contention",
    "with_gpu_levels",
    "with_stairs",
    "with_microarchitecture",
    "with_storage",
)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that say their names and find nothing."""

    def made(name: str):  # a function of its own, so that each keeps its name
        def take(machine: Machine, keep: object, say) -> Machine:
            say(name)
            return machine

        return take

    for name in NAMES:
        monkeypatch.setattr(full_parts, name, made(name))


def test_each_line_says_how_long_it_still_takes(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that is begun, and all behind it; of what a machine cannot have nothing is left."""
    monkeypatch.setattr(full_parts.time, "monotonic", lambda: 0.0)
    lines: list[str] = []
    full_parts.completed(make_machine(), lambda one: one, lines.append)
    assert lines == [
        "with_operator_dispatch; about 120 s left",
        "with_contention; about 110 s left",
        "with_gpu_levels; about 120 s left",
        "with_stairs; about 90 s left",
        "with_microarchitecture; about 50 s left",
        "with_storage; about 30 s left",
    ]


def test_what_is_known_is_not_counted(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was interrupted has less left."""
    monkeypatch.setattr(full_parts.time, "monotonic", lambda: 0.0)
    blank = make_machine()
    known = msgspec.structs.replace(
        blank,
        microarchitecture=Microarchitecture(nodes=Nodes(nodes=(), reason="one node")),
        storage=(Storage(folder="here", mount="/", kind="ext4"),),
    )
    assert full_parts.full_seconds(blank) - full_parts.full_seconds(known) == 47.0
    lines: list[str] = []
    full_parts.completed(known, lambda one: one, lines.append)
    assert lines[3] == "with_stairs; about 40 s left"


def test_a_part_that_takes_longer_is_not_over(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never less than a second is left of it."""
    moments = iter(range(0, 10_000, 500))
    monkeypatch.setattr(full_parts.time, "monotonic", lambda: next(moments))
    lines: list[str] = []
    full_parts.completed(make_machine(), lambda one: one, lines.append)
    assert lines[-1] == "with_storage; about 10 s left"


def test_settings_of_a_full_measurement_come_first(asked: list[Request]) -> None:
    """Their lines count what comes behind them, too; those of a quick one say what they always said."""
    lines: list[str] = []
    probe.measure(settings=[ONE], progress=lines.append)
    probe.measure(False, settings=[ONE], progress=lines.append)
    assert " left" not in lines[0]
    assert lines[1].endswith(" s); about 3 min left")


@pytest.mark.parametrize("refresh", [False, True])
def test_an_interrupt_says_what_is_kept(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refresh: bool
) -> None:
    """Nothing within the first part; later the file that the next measurement begins with."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    answer = attempts.run_in_group
    monkeypatch.setattr(attempts, "run_in_group", interrupt)
    with pytest.raises(KeyboardInterrupt) as told:
        probe.measure(False, settings=[ONE], refresh=refresh)
    assert str(told.value) == (
        "no part of the profile was measured whole: the next measurement begins anew"
    )
    monkeypatch.setattr(attempts, "run_in_group", answer)
    monkeypatch.setattr(probe, "completed", interrupt)
    with pytest.raises(KeyboardInterrupt) as told:
        probe.measure(False, settings=[ONE], refresh=refresh)
    condition = ", unless it is to refresh it" if refresh else ""
    assert str(told.value) == (
        "the part that was being measured is lost, what was known by then is kept in "
        f"{cache_file(tmp_path)}, and the next measurement goes on there{condition}"
    )
    assert len(asked) == 1
