"""What a copy between two devices takes: from a saved profile, or measured where the program runs."""

import pytest
import torch

from ridgeline.autoparallel.scheduling.links import link_seconds
from ridgeline.errors import MachineError
from ridgeline.machine import Device, Host, Link, Machine, Quantity, SizePoint

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def seconds(value: float) -> Quantity:
    return Quantity.measured([value], "s")


def link(direction: str, slow: float, **ends: int) -> Link:
    """Two sizes, ten times apart in time."""
    table = tuple(
        SizePoint(num_bytes=size, seconds=seconds(slow * size)) for size in (1000, 10_000)
    )
    return Link(direction=direction, table=table, **ends)  # type: ignore[arg-type]


MACHINE = Machine(
    fingerprint="0123456789abcdef",
    measured_at="2026-11-21T00:00:00+00:00",
    host=Host(
        name="host", processor="one", cores=2, memory_bytes=1, cache_bytes=0,
        system="Linux", python="3.11", torch="2.13",
    ),
    devices=(Device(kind="cuda", index=0, name="GPU", memory_bytes=1),),
    links=(
        link("host_to_device", 1e-9, target=0),
        link("device_to_host", 2e-9, source=0),
        link("device_to_device", 1e-10, source=0, target=1),
    ),
)  # fmt: skip


def test_a_machines_links_are_used_as_they_were_measured() -> None:
    """Each direction has its own table; devices are meant by their place in the list."""
    copy = link_seconds([GPU, CPU, OTHER], MACHINE)
    assert copy(1, 0, 1000) == pytest.approx(1e-6)
    assert copy(0, 1, 1000) == pytest.approx(2e-6)
    assert copy(0, 2, 10_000) == pytest.approx(1e-6)
    assert copy(2, 2, 1 << 30) == 0.0


def test_a_link_that_the_profile_lacks_is_named() -> None:
    """No rate is made up for it."""
    with pytest.raises(MachineError, match="wanted the link cuda:1 -> cuda:0, got a profile that"):
        link_seconds([GPU, OTHER], MACHINE)(1, 0, 8)


def test_without_a_machine_a_copy_to_itself_takes_no_time() -> None:
    """And nothing is measured for a single device."""
    assert link_seconds([CPU], None)(0, 0, 1 << 20) == 0.0
