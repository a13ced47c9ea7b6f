"""The link matrix: what is measured and asked for, read between its sizes, and kept in old files."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from ridgeline.codec import encode
from ridgeline.errors import MachineError
from ridgeline.machine import Device, Host, Link, Machine, Quantity, Setting, SizePoint
from ridgeline.probe import missing
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.rates.links import every_link

HOST = Host(
    name="h",
    processor="p",
    cores=2,
    memory_bytes=1,
    cache_bytes=1,
    system="s",
    python="3",
    torch="2",
)


def size_table(*points: tuple[int, float]) -> tuple[SizePoint, ...]:
    return tuple(
        SizePoint(num_bytes=size, seconds=Quantity.measured([seconds], "s"))
        for size, seconds in points
    )


def machine_of(num_gpus: int, *links: Link) -> Machine:
    gpus = tuple(Device(kind="cuda", index=i, name="g", memory_bytes=1) for i in range(num_gpus))
    return Machine(fingerprint="f", measured_at="t", host=HOST, devices=gpus, links=links)


UP = Link(direction="host_to_device", target=1, table=size_table((1000, 2e-6), (5000, 4e-6)))
DOWN = Link(direction="device_to_host", source=1, table=size_table((1000, 3e-6)))
ACROSS = Link(
    direction="device_to_device",
    source=0,
    target=1,
    table=size_table((1000, 1e-6), (2000, 2e-6), (4000, 3e-6)),
)
MACHINE = machine_of(2, UP, DOWN, ACROSS)


def test_every_ordered_pair_and_every_host_link_is_measured() -> None:
    """Three GPUs: three links up, three down, six across."""
    names = every_link(3)
    assert len(names) == len(set(names)) == 12
    assert [name[1:] for name in names if name.direction == "device_to_device"] == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 1),
    ]


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [
        (0, 1e-6),
        (1000, 1e-6),
        (1500, 1.5e-6),
        (2000, 2e-6),
        (3000, 2e-6 * 1.5 ** math.log2(1.5)),
        (6000, 4e-6),
    ],
)
def test_seconds_are_read_from_the_table(num_bytes: int, seconds: float) -> None:
    """Latency below the first size, power laws between the sizes, the last rate beyond."""
    assert MACHINE.link_seconds("cuda:0", "cuda:1", num_bytes) == pytest.approx(seconds)


def test_noise_between_the_last_sizes_does_not_make_large_copies_free() -> None:
    """Where the larger size was faster, the rate of the largest holds beyond it; so it does for one size."""
    noisy = Link(direction="host_to_device", table=size_table((1000, 2e-6), (2000, 1e-6)))
    assert noisy.seconds(4000) == pytest.approx(2e-6)
    assert DOWN.seconds(3000) == pytest.approx(9e-6)


def test_the_ends_of_a_link_are_device_names() -> None:
    """The host is `cpu` whatever the index says."""
    assert [link.ends for link in MACHINE.links] == [
        ("cpu", "cuda:1"),
        ("cuda:1", "cpu"),
        ("cuda:0", "cuda:1"),
    ]
    assert MACHINE.link_seconds("cuda:0", "cuda:0", 1 << 30) == 0.0


def test_a_link_that_was_not_measured_is_named() -> None:
    """The message says which pair, and which there are."""
    with pytest.raises(MachineError) as error:
        MACHINE.link_seconds("cuda:1", "cuda:0", 8)
    assert str(error.value) == (
        "wanted the link cuda:1 -> cuda:0, got a profile that has only cpu -> cuda:1, cuda:1 -> cpu, "
        "cuda:0 -> cuda:1 (f); run `ridgeline measure` where both devices are"
    )


def test_a_profile_saved_before_links_had_ends_loads(tmp_path: Path) -> None:
    """Its links are those of GPU 0."""
    content = json.loads(encode(machine_of(1, UP, DOWN)))
    del content["sha256"]
    for link in content["value"]["links"]:
        link.pop("source", None)
        link.pop("target", None)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    machine = Machine.load(path)
    assert [link.ends for link in machine.links] == [("cpu", "cuda:0"), ("cuda:0", "cpu")]
    assert Machine.load(MACHINE.save(path)) == MACHINE


def cuda_requests(machine: Machine) -> tuple[Request, ...]:
    wanted = [Setting(device="cuda")]
    return missing.requests(machine, wanted, quick=True, workload=None)


def test_links_that_are_missing_are_asked_for_even_alone() -> None:
    """A profile with the links of one GPU is completed for two, and not asked again when complete."""
    (request,) = cuda_requests(MACHINE)
    assert request.links
    full = tuple(
        Link(direction=d, source=a, target=b, table=size_table((1, 1.0)))
        for d, a, b in every_link(2)
    )
    assert not cuda_requests(machine_of(2, *full))[0].links
    assert Request(quick=True, links=True).settings == (Setting(device="cuda"),)


def test_a_link_measured_again_replaces_the_old_one() -> None:
    """One link for each pair of ends."""
    again = msgspec.structs.replace(UP, table=size_table((1000, 9e-6)))
    merged = missing.merge(MACHINE, Findings(links=(again,)))
    assert merged.links == (again, DOWN, ACROSS)
