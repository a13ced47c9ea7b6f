"""Links in reports: one curve a kind, one rate for each pair of devices."""

import msgspec
import pytest
from sample_machine import make_machine

from ridgeline.machine import Link, Machine, Quantity, SizePoint
from ridgeline.reporting.chart_rates import links_figure
from ridgeline.reporting.links import link_rates, links_by_kind
from ridgeline.reporting.text import as_text, machine_text


def link_of(direction: str, source: int, target: int, *points: tuple[int, float]) -> Link:
    table = tuple(
        SizePoint(num_bytes=size, seconds=Quantity.measured([seconds], "s"))
        for size, seconds in points
    )
    return msgspec.convert(
        {"direction": direction, "source": source, "target": target, "table": table}, Link
    )


@pytest.fixture
def machine() -> Machine:
    links = (
        link_of("host_to_device", 0, 1, (1000, 2e-6), (5000, 4e-6)),
        link_of("device_to_device", 0, 1, (1000, 1e-6), (4000, 2e-6)),
        link_of("device_to_device", 1, 0, (1000, 5e-6)),
    )
    return msgspec.structs.replace(make_machine(), links=links)


def test_several_links_of_a_kind_are_shown_by_their_slowest(machine: Machine) -> None:
    """One curve a kind, in the table and in the figure."""
    kinds = links_by_kind(machine)
    assert kinds == {
        "host to device": {1000: 2e-6, 5000: 4e-6},
        "device to device, slowest of 2": {1000: 5e-6, 4000: 2e-6},
    }
    assert [trace["name"] for trace in links_figure(machine)["data"]] == list(kinds)


def test_rates_are_those_of_the_largest_size(machine: Machine) -> None:
    """Bytes per second by the ends of the link."""
    assert link_rates(machine) == {
        ("cpu", "cuda:1"): pytest.approx(1.25e9),
        ("cuda:0", "cuda:1"): pytest.approx(2e9),
        ("cuda:1", "cuda:0"): pytest.approx(2e8),
    }


def test_the_matrix_is_printed_where_there_are_two_gpus(machine: Machine) -> None:
    """A row for each device that copies leave from; a single GPU has no matrix."""
    text = as_text(machine_text(machine))
    rows = [line.split() for line in text[text.index("Links") :].splitlines()]
    assert ["cuda:0", "2.00", "GB/s"] in rows
    alone = msgspec.structs.replace(machine, links=machine.links[:1])
    assert "Links" not in as_text(machine_text(alone))
