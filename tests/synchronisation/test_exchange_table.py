"""Every way to exchange gradients is held against the machine, whether it is taken or not."""

import io

import msgspec
import pytest
from toy_entries import MIB, MS, planned

from layer_chains import chain
from ridgeline.errors import PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.exchange_table import UNKNOWN_LOSS, ExchangeRow, exchange_table
from ridgeline.planner.exchanges.rhythms import known_rhythms
from ridgeline.reporting.plan_grids import exchanges_grid
from ridgeline.reporting.terminal.text import console, grid_text
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, RHYTHMS
from strategies import make_machine, make_workload

pytestmark = pytest.mark.usefixtures("toys")


def rows_of(
    bandwidth: float, allow: tuple[str, ...] = (), plan: Plan | None = None
) -> dict[str, ExchangeRow]:
    machine = make_machine(latency_s=1e-4, bandwidth=bandwidth)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    rows = exchange_table(machine, {2: workload}, plan or planned(), allow=allow, error=0.02)
    return {word_of(row): row for row in rows}


def word_of(row: ExchangeRow) -> str:
    """The word by which a way differs from the default."""
    if row.every > 1:
        late = f" {row.options['delay']} late" if "delay" in row.options else ""
        encoded = f" {row.compression}" if row.compression != "none" else ""
        return f"every {row.every}{late}{encoded}"
    if "held" in row.options:
        return "held"
    return row.compression if row.compression != "none" else row.algorithm


def test_all_words_have_a_row() -> None:
    """In the order of the tables; those that do not run say so and have no figures."""
    rows = rows_of(1e9)
    lossy = [name for name in COMPRESSIONS if name != "none"]
    assert list(rows) == [
        *ALGORITHMS,
        *lossy,
        "held",
        "every 8",
        "every 50",
        "every 50 10 late",
        "every 50 40 late",
        "every 50 20 late int8",
        "every 100 10 late",
    ]
    assert len(rows) == len(ALGORITHMS) + len(lossy) + 1 + len(RHYTHMS)
    for name in (*ALGORITHMS, *lossy):
        row = rows[name]
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
    assert "faster than the default; needs allow='compression'" in slow.verdict
    assert fast.verdict.startswith("loses: ")
    assert fast.verdict.endswith(f"; {UNKNOWN_LOSS}")
    assert not slow.is_exact


def test_rhythms_send_their_share_and_ask_for_a_permission_of_their_own() -> None:
    """Bytes are those of an exchange, divided by the steps between two; the rhythm in force is marked."""
    rows = rows_of(1e8)
    assert rows["every 8"].sent_bytes == 4 * MIB // 8
    apart = [name for name in rows if name.startswith("every")]
    assert len(apart) == len(RHYTHMS)
    assert rows["every 50 10 late"].sent_bytes == round(4 * MIB / 50)
    assert rows["every 50 40 late"].sent_bytes == round(4 * MIB / 50)
    for name in apart:
        if rows[name].compression != "none":  # the toys took its codec away
            assert rows[name].verdict == "this release does not run it"
            continue
        assert not rows[name].is_exact
        assert rows[name].verdict.endswith(
            f"faster than the default; needs allow='local-steps': {UNKNOWN_LOSS}"
        )
    allowed = rows_of(1e8, allow=("local-steps",))["every 50"].verdict
    assert allowed.endswith(f"faster than the default; {UNKNOWN_LOSS}")
    assert "needs allow='local-steps'" in rows_of(1e8, allow=("compression",))["every 50"].verdict
    late = Plan(workers=2, threads=1, sync=Sync(every=50, options={"fragments": 4, "delay": 10}))
    marked = {name for name, row in rows_of(1e8, plan=late).items() if "chosen" in row.verdict}
    assert marked == {"every 50 10 late"}


def held_row(bandwidth: float, plan: Plan | None = None, device: str = "cpu") -> ExchangeRow:
    """The row of the step that holds buckets, and no other that is chosen or holds."""
    workload = chain([MIB] * 8, [MS] * 8, [MS] * 8, device=device)
    machine = make_machine(latency_s=1e-4, bandwidth=bandwidth, device=device)
    rows = exchange_table(machine, {2: workload}, plan or planned(), error=0.02)
    (row,) = [row for row in rows if "held" in row.options]
    assert [one for one in rows if "chosen" in one.verdict] == [row if plan else rows[0]]
    return row


def test_held_buckets_are_told_with_what_they_hide() -> None:
    """They send what the default sends; where nothing is exposed they gain nothing."""
    slow, fast = held_row(1e9), held_row(1e12)
    assert slow.is_exact
    assert slow.sent_bytes == fast.sent_bytes == 8 * MIB
    assert slow.verdict.endswith(
        "faster than the default; the next forward pass waits for the parameters that it reads; trials decide"
    )
    assert "within the uncertainty" in fast.verdict
    held = Plan(workers=2, threads=1, sync=Sync(options={"held": 2}, bucket_bytes=(MIB,)))
    assert held_row(1e9, held).verdict.startswith("chosen; ")


def test_held_buckets_over_nccl_say_that_they_were_never_run() -> None:
    """And have no figures."""
    row = held_row(1e9, device="cuda")
    assert row.verdict == "not compared: over NCCL it was never run"
    assert row.step_s is None


def test_a_gain_that_is_not_worth_another_algorithm_is_told_as_that() -> None:
    """More than the uncertainty, and less than what training alone must gain."""
    machine = make_machine(latency_s=1e-4, bandwidth=2.5e7)
    long = {"forward": [30 * MS] * 4, "backward": [60 * MS] * 4}
    workload = make_workload(**long, gradient_bytes=[MIB] * 4)  # type: ignore[arg-type]
    rows = exchange_table(machine, {2: workload}, planned(), allow=("local-steps",), error=0.02)
    (verdict,) = [row.verdict for row in rows if row.every == 8]
    assert verdict.startswith("gains ")
    assert verdict.endswith(f", less than the 20% that training alone must gain; {UNKNOWN_LOSS}")
    # A search takes it all the same where a longer interval, of which it is not far, gains enough.
    mildest = min(known_rhythms(workload), key=lambda sync: sync.every)
    taken = msgspec.structs.replace(planned(), sync=mildest)
    rows = exchange_table(machine, {2: workload}, taken, allow=("local-steps",), error=0.02)
    (verdict,) = [row.verdict for row in rows if row.every == 8]
    assert verdict.startswith("chosen; ")
    assert verdict.endswith(f"% faster than the default; {UNKNOWN_LOSS}")


def test_a_divided_update_says_what_it_saves() -> None:
    """It hands over the gradients and its part of the parameters, in no less time than all-reduces."""
    row = rows_of(1e9)["sharded"]
    assert row.sent_bytes == 4 * MIB + 2 * MIB
    assert row.exchange_s is not None
    assert row.verdict.endswith("; a worker keeps 1/2 of the optimizer's state")
    assert row.is_exact


@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e12])
def test_a_store_is_as_fast_as_its_law_at_best(bandwidth: float) -> None:
    """Servers beside the workers send what a ring does, and copy more: it says what it is for instead."""
    rows = rows_of(bandwidth)
    store, ring = rows["kvstore"], rows["all_reduce"]
    assert store.sent_bytes == ring.sent_bytes
    assert store.exchange_s is not None
    assert ring.exchange_s is not None
    assert store.exchange_s > ring.exchange_s
    assert store.verdict.startswith("loses: ")
    assert store.verdict.endswith(
        "; its servers share the workers' links and send what a ring does: it is for workers that need not "
        "wait for each other (kind='dist_async', which changes the maths) and for sparse rows"
    )
    assert store.is_exact


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
        "wanted a plan of several workers, got workers=1 in the plan: a single worker exchanges nothing; "
        "give --devices of 2 or more"
    )


def test_the_terminal_shows_them() -> None:
    """By their labels."""
    buffer = io.StringIO()
    console(buffer).print(grid_text(exchanges_grid([*rows_of(1e8).values()]), "2 workers"))
    text = buffer.getvalue()
    assert "gossip protocol" in text
    assert "halved" in text
    assert "every 50 steps" in text
    assert "delay 10" in text
    assert "all-reduce, 1 held" in text
    assert "this release does not run it" in text
