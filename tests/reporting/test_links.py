"""Links in reports: one curve a kind, one rate for each pair of devices."""

import msgspec
import pytest
from sample_machine import make_machine

from printed import as_text
from ridgeline.machine import Link, Machine, Quantity, SizePoint
from ridgeline.machine.stairs import Stair
from ridgeline.reporting.charts.chart_places import link_matrix_figure, staircase_figure
from ridgeline.reporting.charts.chart_rates import links_figure
from ridgeline.reporting.links import link_matrix, link_rates, links_by_kind
from ridgeline.reporting.page.page_machine import machine_section
from ridgeline.reporting.terminal.text import machine_text


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


def test_links_that_were_not_measured_are_none_of_a_kind(machine: Machine) -> None:
    """The slowest is of those with a table; a kind without any has neither curve nor chart."""
    unmeasured = (link_of("device_to_device", 0, 2), link_of("device_to_host", 0, 0))
    some = msgspec.structs.replace(machine, links=(*machine.links, *unmeasured))
    assert links_by_kind(some) == links_by_kind(machine)
    none = msgspec.structs.replace(machine, links=unmeasured)
    assert 'id="figure-links"' in str(machine_section(some, None))
    assert 'id="figure-links"' not in str(machine_section(none, None))


def test_devices_stand_in_the_order_of_their_numbers(machine: Machine) -> None:
    """The tenth GPU comes behind the second."""
    links = tuple(link_of("device_to_device", index, 0, (1000, 1e-6)) for index in (10, 2, 1))
    matrix = link_matrix(msgspec.structs.replace(machine, links=links))
    assert matrix is not None
    assert matrix.names == ("cuda:0", "cuda:1", "cuda:2", "cuda:10")


def test_rates_are_those_of_the_largest_size(machine: Machine) -> None:
    """Bytes per second by the ends of the link."""
    assert link_rates(machine) == {
        ("cpu", "cuda:1"): pytest.approx(1.25e9),
        ("cuda:0", "cuda:1"): pytest.approx(2e9),
        ("cuda:1", "cuda:0"): pytest.approx(2e8),
    }


def test_the_matrix_is_drawn_where_there_are_two_gpus(machine: Machine) -> None:
    """A row for each device that copies leave from, empty where none was measured; the reading names the ends."""
    matrix = link_matrix(machine)
    assert matrix is not None
    (heat,) = link_matrix_figure(matrix)["data"]
    assert heat["x"] == heat["y"] == ["cpu", "cuda:0", "cuda:1"]
    assert heat["z"] == [
        [None, None, pytest.approx(1.25e9)],
        [None, None, pytest.approx(2e9)],
        [None, pytest.approx(2e8), None],
    ]
    assert heat["text"][0] == ["", "", "1.25 GB/s"]
    # Every device has its name, however many there are.
    both = link_matrix_figure(matrix)["layout"]
    assert (both["xaxis"]["dtick"], both["yaxis"]["dtick"]) == (1, 1)
    page = str(machine_section(machine, None)).replace("\xa0", " ")
    assert 'id="figure-link-matrix"' in page
    assert (
        "cuda:0 to cuda:1 copies 2.00 GB/s, cuda:1 to cuda:0 200 MB/s, at the largest size measured"
        in page
    )
    alone = msgspec.structs.replace(machine, links=machine.links[:1])
    assert 'id="figure-link-matrix"' not in str(machine_section(alone, None))


def test_the_staircase_is_drawn_with_the_ends_of_caches() -> None:
    """Three lines by size; marks for caches within them; without stairs there is no picture."""

    def of(seconds: float) -> Quantity:
        return Quantity.measured([seconds], "s")

    stairs = tuple(
        Stair(num_bytes=size, access_s=of(size * 1e-13), word_s=of(4e-10), line_s=of(8e-10))
        for size in (1 << 12, 1 << 20, 1 << 24)
    )
    caches = {"L1": 48 << 10, "L2": 2 << 20, "L3": 1 << 30}
    machine = msgspec.structs.replace(make_machine(), stairs=stairs, caches=caches)
    figure = staircase_figure(machine)
    assert [trace["x"] for trace in figure["data"]] == [[1 << 12, 1 << 20, 1 << 24]] * 3
    assert figure["data"][0]["y"] == [
        pytest.approx(size * 1e-13) for size in (4096, 1 << 20, 1 << 24)
    ]
    marks = [shape["x0"] for shape in figure["layout"]["shapes"]]
    assert marks == [48 << 10, 2 << 20]
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["L1 ends", "L2 ends"]
    # The words stand at the bottom, where no curve is.
    least = 10 ** figure["layout"]["yaxis"]["range"][0]
    assert 0.3 < least / min(min(trace["y"]) for trace in figure["data"]) < 0.5
    page = str(machine_section(machine, None)).replace("\xa0", " ")
    assert (
        "A load that waits for another takes 0.410 ns in 4.00 KiB and 1.68 us in 16.0 MiB; read in order, one core "
        "gets 20.0 GB/s of the latter, at random 4.77 MB/s." in page
    )
    assert 'id="figure-staircase"' not in str(machine_section(make_machine(), None))


def test_the_matrix_is_printed_where_there_are_two_gpus(machine: Machine) -> None:
    """A row for each device that copies leave from; a single GPU has no matrix."""
    text = as_text(machine_text(machine))
    rows = [line.split() for line in text[text.index("Links") :].splitlines()]
    assert ["cuda:0", "2.00", "GB/s"] in rows
    alone = msgspec.structs.replace(machine, links=machine.links[:1])
    assert "Links" not in as_text(machine_text(alone))
