"""The staircase of a profile: each size once, kept as it comes, in a profile that reads the same again."""

from pathlib import Path

import msgspec
import pytest

from ridgeline.errors import MachineError
from ridgeline.machine import Machine, Quantity, Setting
from ridgeline.machine.microarchitecture import Microarchitecture, Nodes
from ridgeline.machine.stairs import Stair
from ridgeline.probe.host import staircase
from ridgeline.probe.host.caches import Cache
from ridgeline.probe.missing import requests
from strategies import make_machine

SIZES = [1 << power for power in range(12, 19)]


def made(num_bytes: int) -> Stair:
    seconds = Quantity.measured([num_bytes * 1e-15], "s")
    return Stair(num_bytes=num_bytes, access_s=seconds, word_s=seconds, line_s=seconds)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were walked through, by stand-ins."""
    found: list[int] = []

    def stair(num_bytes: int, say: object, which: str) -> Stair:
        found.append(num_bytes)
        return made(num_bytes)

    monkeypatch.setattr(staircase, "stair", stair)
    monkeypatch.setattr(staircase, "caches", lambda: (Cache(1, 1 << 14), Cache(2, 1 << 16)))
    monkeypatch.setattr(staircase, "room_bytes", lambda: 1 << 30)
    return found


def test_an_interrupted_walk_goes_on(
    walked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was found until then is in the file; the next one takes the rest alone."""
    path, stair = tmp_path / "machine.json", staircase.stair

    def keep(machine: Machine) -> Machine:
        machine.save(path)
        return machine

    def interrupted(num_bytes: int, say: object, which: str) -> Stair:
        if num_bytes > SIZES[3]:
            raise KeyboardInterrupt
        return stair(num_bytes, say, which)  # type: ignore[arg-type]

    monkeypatch.setattr(staircase, "stair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        staircase.with_stairs(make_machine(), keep, print)
    kept = Machine.load(path)
    assert [one.num_bytes for one in kept.stairs] == walked == SIZES[:4]
    monkeypatch.setattr(staircase, "stair", stair)
    whole = staircase.with_stairs(kept, keep, print)
    assert walked == SIZES
    assert whole == Machine.load(path)
    assert [one.num_bytes for one in whole.stairs] == SIZES
    assert whole.caches == {"L1": 1 << 14, "L2": 1 << 16}
    assert staircase.with_stairs(whole, keep, print) == whole
    assert walked == SIZES


def test_a_container_is_walked_through_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is granted, whatever the host has free."""
    monkeypatch.setattr(staircase, "memory_bytes", lambda: 1 << 20)
    assert staircase.room_bytes() == 1 << 18


def test_a_host_without_a_compiler_has_no_staircase(
    walked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says so, once; the rest of the profile stays."""

    def refused(*_: object) -> Stair:
        raise MachineError("wanted a C compiler, got none")

    monkeypatch.setattr(staircase, "stair", refused)
    machine = make_machine()
    found = staircase.with_stairs(machine, lambda one: one, print)
    assert found.warnings == (
        *machine.warnings,
        "no staircase of memory: wanted a C compiler, got none",
    )
    assert staircase.with_stairs(found, lambda one: one, print).warnings == found.warnings
    assert msgspec.structs.replace(found, warnings=machine.warnings, caches={}) == machine


def test_a_compiler_that_came_later_takes_the_warning_back(
    walked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is walked through after all is no longer said to be missing; other warnings stay."""
    machine = make_machine()
    lacking = (*machine.warnings, "no staircase of memory: wanted a C compiler, got none")
    found = staircase.with_stairs(
        msgspec.structs.replace(machine, warnings=lacking), lambda one: one, print
    )
    assert found.stairs
    assert found.warnings == machine.warnings


def test_a_full_measurement_walks_and_times_files_and_a_quick_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After everything else; nothing else is missing here."""
    from ridgeline.probe import full_parts, measure

    asked: list[Machine] = []
    timed: list[tuple[Stair, ...]] = []

    def with_stairs(machine: Machine, keep: object, say: object) -> Machine:
        asked.append(machine)
        return msgspec.structs.replace(machine, stairs=(made(4096),))

    def with_nodes(machine: Machine, keep: object, say: object) -> Machine:
        asked.append(machine)
        known = Microarchitecture(nodes=Nodes(nodes=(), reason="one node"))
        return msgspec.structs.replace(machine, microarchitecture=known)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(full_parts, "with_stairs", with_stairs)
    monkeypatch.setattr(full_parts, "with_microarchitecture", with_nodes)
    for name in ("with_operator_dispatch", "with_contention", "with_gpu_levels"):
        monkeypatch.setattr(full_parts, name, lambda one, keep, say: one)
    monkeypatch.setattr(
        full_parts, "with_storage", lambda one, keep, say: (timed.append(one.stairs), one)[1]
    )
    assert measure.measure(settings=()).stairs == ()
    assert asked == timed == []
    found = measure.measure(quick=False, settings=())
    assert found.stairs == (made(4096),)
    assert found.microarchitecture.nodes == Nodes(nodes=(), reason="one node")
    assert [machine.effort for machine in asked] == ["full", "full"]
    assert asked[1].stairs == (made(4096),)
    assert timed == [(made(4096),)]


def test_a_full_measurement_is_asked_setting_by_setting() -> None:
    """Together the requests ask for what one would; what is of no setting is asked once."""
    blank = msgspec.structs.replace(make_machine(), ceilings=(), collectives=(), dispatch=())
    wanted = [
        Setting(device="cpu", workers=workers, threads=threads)
        for workers, threads in ((1, 1), (1, 2), (2, 1))
    ]
    (whole,) = requests(blank, wanted, quick=True, workload=None)
    each = requests(blank, wanted, quick=False, workload=None)
    assert [request.settings for request in each] == [(setting,) for setting in wanted]
    assert [request.dispatch for request in each] == [True, False, False]
    for name in ("ceilings", "collectives", "codecs"):
        asked = [one for request in each for one in getattr(request, name)]
        assert tuple(asked) == getattr(whole, name)
