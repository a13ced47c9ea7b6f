"""Every way to exchange gradients is held against the machine, whether it is taken or not."""

import io

import pytest
from toy_entries import MIB, MS, planned

from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.planner.exchange_table import UNKNOWN_LOSS, ExchangeRow, exchange_table
from ridgeline.reporting.text import console
from ridgeline.reporting.text_exchanges import exchanges_text
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS
from strategies import make_machine, make_workload

pytestmark = pytest.mark.usefixtures("toys")


def rows_of(bandwidth: float, allow: tuple[str, ...] = ()) -> dict[str, ExchangeRow]:
    machine = make_machine(latency_s=1e-4, bandwidth=bandwidth)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    rows = exchange_table(machine, {2: workload}, planned(), allow=allow, error=0.02)
    return {row.compression if row.compression != "none" else row.algorithm: row for row in rows}


def test_all_words_have_a_row() -> None:
    """In the order of the tables; those that do not run say so and have no figures."""
    rows = rows_of(1e9)
    assert list(rows) == [*ALGORITHMS, *(name for name in COMPRESSIONS if name != "none")]
    for name, row in rows.items():
        entry = COMPRESSIONS.get(name) or ALGORITHMS[name]
        takes_two = getattr(entry, "least_workers", 2) <= 2
        assert (row.step_s is not None) == (entry.runs and takes_two and "cpu" in entry.devices), (
            name
        )
        assert entry.runs or row.verdict == "this release does not run it"


def test_a_slow_link_pays_for_a_codec_and_a_fast_one_does_not() -> None:
    """The same codec gains on one machine and loses on another; permission is asked for in either."""
    slow, fast = rows_of(1e8)["half"], rows_of(1e12, allow=("compression",))["half"]
    assert slow.sent_bytes == fast.sent_bytes == 2 * MIB
    assert "faster than the default; wants allow='compression'" in slow.verdict
    assert fast.verdict.startswith("loses: ")
    assert fast.verdict.endswith(f"; {UNKNOWN_LOSS}")
    assert not slow.is_exact


def test_a_divided_update_says_what_it_saves() -> None:
    """It hands over the gradients and its part of the parameters, in no less time than all-reduces."""
    row = rows_of(1e9)["sharded"]
    assert row.sent_bytes == 4 * MIB + 2 * MIB
    assert row.exchange_s is not None
    assert row.verdict.endswith("; a worker keeps 1/2 of the optimizer's state")
    assert row.is_exact


def test_the_chosen_way_is_marked() -> None:
    """And is the default here; a gain within the uncertainty is told as that."""
    rows = rows_of(1e9)
    assert rows["all_reduce"].verdict == "chosen; the default"
    assert rows["all_reduce"].sent_bytes == 4 * MIB


def test_a_worker_alone_has_no_ways() -> None:
    """It says what to give."""
    workload = make_workload()
    with pytest.raises(PlanError) as caught:
        exchange_table(make_machine(), {1: workload}, Plan())
    assert str(caught.value) == (
        "wanted a plan of several workers, got workers=1 in the plan: a worker alone exchanges nothing; give "
        "--devices of 2 or more"
    )


def test_the_terminal_shows_them() -> None:
    """By their labels."""
    buffer = io.StringIO()
    console(buffer).print(exchanges_text([*rows_of(1e8).values()], "2 workers"))
    text = buffer.getvalue()
    assert "gossip protocol" in text
    assert "halved" in text
    assert "this release does not run it" in text
