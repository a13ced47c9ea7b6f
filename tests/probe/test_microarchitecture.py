"""What a host does to memory access and arithmetic, in a profile: each part once, kept as it comes."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ridgeline.codec import Value, decode, encode
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.machine.microarchitecture import (
    FalseSharing,
    Microarchitecture,
    Nodes,
    PageLoads,
    Pages,
)
from ridgeline.machine.quantity import Quantity, Sampled
from ridgeline.probe.fields import FieldProbe
from ridgeline.probe.host import microarchitecture
from ridgeline.probe.host.caches import Cache
from ridgeline.probe.host.microarchitecture import with_microarchitecture
from strategies import make_machine

LOADS = PageLoads(small=Sampled.measured([1.0, 3.0, 2.0], "s"))
FOUND: dict[str, Value] = {
    "false_sharing": FalseSharing(reason="one core"),
    "pages": Pages(num_bytes=8, small_page_bytes=4, waiting=LOADS, independent=LOADS),
    "nodes": Nodes(nodes=(), reason="one node"),
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields that were measured, by stand-ins."""
    found: list[str] = []

    def part(field: str) -> FieldProbe:
        return FieldProbe(field, f"the {field}", lambda: (found.append(field), FOUND[field])[1])

    monkeypatch.setattr(microarchitecture, "parts", lambda: tuple(map(part, FOUND)))
    return found


def stopping(monkeypatch: pytest.MonkeyPatch, field: str, error: BaseException) -> None:
    """From now on this part ends in an error."""
    given = microarchitecture.parts()

    def fails() -> Value:
        raise error

    monkeypatch.setattr(
        microarchitecture,
        "parts",
        lambda: tuple(p._replace(measure=fails) if p.field == field else p for p in given),
    )


def keeping(path: Path) -> Callable[[Machine], Machine]:
    def keep(machine: Machine) -> Machine:
        machine.save(path)
        return machine

    return keep


def test_an_interrupted_measurement_goes_on(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was found until then is in the file; the next one takes the rest alone, and a third nothing."""
    path, said = tmp_path / "machine.json", []
    with monkeypatch.context() as patch:
        stopping(patch, "nodes", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            with_microarchitecture(make_machine(), keeping(path), said.append)
    kept = Machine.load(path)
    assert measured == ["false_sharing", "pages"]
    assert kept.microarchitecture.pages == FOUND["pages"]
    assert kept.microarchitecture.nodes is None
    whole = with_microarchitecture(kept, keeping(path), said.append)
    assert measured == list(FOUND)
    assert whole == Machine.load(path)
    assert whole.microarchitecture == msgspec.convert(
        FOUND, Microarchitecture, from_attributes=True
    )
    assert with_microarchitecture(whole, keeping(path), said.append) == whole
    assert measured == list(FOUND)
    assert said == [
        "processor: the false_sharing (1 of 3)",
        "processor: the pages (2 of 3)",
        "processor: the nodes (3 of 3)",
        "processor: the nodes (1 of 1)",
    ]


def test_what_cannot_be_measured_is_told_and_the_rest_is_kept(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all parts that end alike; asked again, they are tried again."""
    for field in ("false_sharing", "nodes"):
        stopping(monkeypatch, field, MachineError("wanted a C compiler, got none"))
    machine = make_machine()
    found = with_microarchitecture(machine, lambda one: one, print)
    assert measured == ["pages"]
    assert found.microarchitecture == Microarchitecture(pages=FOUND["pages"])  # type: ignore[arg-type]
    warning = "not measured: the false_sharing, the nodes: wanted a C compiler, got none"
    assert found.warnings == (*machine.warnings, warning)
    assert with_microarchitecture(found, lambda one: one, print) == found
    assert measured == ["pages"]


def test_an_older_profile_loads() -> None:
    """One that was written before there was such a field has nothing in it."""
    machine = make_machine()
    text = encode(machine)
    field = b'"microarchitecture"'
    assert field in text
    envelope = msgspec.json.decode(text)
    del envelope["sha256"]
    del envelope["value"]["microarchitecture"]
    assert decode(Machine, msgspec.json.encode(envelope), where="older") == machine


def test_samples_are_kept_in_their_order_and_scaled_with_the_number() -> None:
    """Median and quartiles are those of the samples, also after a unit was changed."""
    seconds = Sampled.measured([3.0, 1.0, 2.0], "s")
    plain = Quantity.measured([3.0, 1.0, 2.0], "s")
    assert seconds.samples == (3.0, 1.0, 2.0)
    assert all(getattr(seconds, name) == getattr(plain, name) for name in plain.__struct_fields__)
    assert seconds.times(10.0) == Sampled.measured([30.0, 10.0, 20.0], "s")


def test_parts_fill_every_field_and_take_what_room_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of the longest walk, or what memory allows; two walks at once take no more than one."""
    monkeypatch.setattr(microarchitecture, "caches", lambda: (Cache(3, 1 << 24),))
    for room, names in (
        (1 << 30, ["64.0 MiB", "64.0 MiB"]),
        (1 << 26, ["64.0 MiB", "32.0 MiB"]),
    ):
        monkeypatch.setattr(microarchitecture, "room_bytes", lambda room=room: room)
        parts = microarchitecture.parts()
        assert sorted(part.field for part in parts) == sorted(Microarchitecture.__struct_fields__)
        assert [
            part.name.partition(" over ")[2] for part in parts if " over " in part.name
        ] == names
