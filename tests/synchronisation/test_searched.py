"""The search over ways to exchange gradients: what is compared, what the user fixes, and what it asks for."""

import msgspec
import pytest
from toy_entries import GOSSIP, MIB, MS, planned

from ridgeline.errors import PlanError
from ridgeline.machine import Setting
from ridgeline.plan import Plan, Sync, cut_buckets
from ridgeline.planner import Ranking, choose
from ridgeline.planner.exchanges.buckets import searched_bucket_bytes
from ridgeline.planner.knobs import num_changes, value_of
from ridgeline.planner.labels import label
from ridgeline.planner.trials.trials import differences
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, CollectiveTraffic, offered
from ridgeline.timeline import Timeline
from strategies import make_machine, make_workload

pytestmark = pytest.mark.usefixtures("toys")


def test_buckets_are_cut_by_the_price_of_the_entry() -> None:
    """On a slow link, where a bucket pays twice, there are fewer of them, and one where none pays anything."""
    machine = make_machine(latency_s=3e-3, bandwidth=3e8)
    workload = make_workload(backward=[20 * MS] * 8, gradient_bytes=[4 * MIB] * 8)

    def num_buckets(algorithm: str) -> int:
        limits = searched_bucket_bytes(machine, workload, planned(algorithm=algorithm))
        assert limits is not None
        return len(cut_buckets([(4 * MIB, "float32")] * 8, limits))

    counts = [num_buckets(name) for name in ("all_reduce", "gossip")]
    ALGORITHMS["gossip"] = GOSSIP._replace(traffic=lambda payload, workers: ())
    counts.append(num_buckets("gossip"))
    assert counts[0] > counts[1] > counts[2] == 1, counts


def test_an_exact_algorithm_is_compared_with_the_default() -> None:
    """It is ranked beside it with its own prices, chosen where it is faster, and explained."""
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    ranking = choose(make_machine(latency_s=1e-3), workload, world_size=2)
    seen = {c.plan.sync.algorithm for c in ranking.candidates}
    assert seen == {"all_reduce", "gossip"}
    assert ranking.best.plan.sync.algorithm == "all_reduce"
    assert "gossip: " in ranking.explain("algorithm")
    cheap = GOSSIP._replace(
        traffic=lambda payload, workers: (CollectiveTraffic("broadcast", payload // 8),)
    )
    ALGORITHMS["gossip"] = cheap  # the fixture puts it back
    best = choose(make_machine(latency_s=1e-3, bandwidth=1e8), workload, world_size=2).best.plan
    assert best.sync.algorithm == "gossip"


@pytest.mark.parametrize(("workers", "compared"), [(2, set()), (4, {"tree"})])
def test_what_cannot_be_faster_is_told_and_not_simulated(workers: int, compared: set[str]) -> None:
    """A search is not flooded: a note has the reasons, and who fixes such an algorithm gets it."""
    machine, workload = make_machine(latency_s=1e-3, cores=8), make_workload(samples=64)
    ranking = choose(machine, workload, world_size=workers)
    seen = {c.plan.sync.algorithm for c in ranking.candidates}
    assert seen == {"all_reduce", "gossip", *compared}
    (note,) = [note for note in ranking.notes if note.startswith("ways to reduce that were not")]
    assert "ring (the backend's all-reduce sends the same bytes in as many messages)" in note
    assert ("tree" in note) != ("tree" in compared)
    fixed = choose(machine, workload, world_size=workers, fixed={"algorithm": "ring"})
    assert {c.plan.sync.algorithm for c in fixed.candidates} == {"ring"}
    assert not any(note.startswith("ways to reduce") for note in fixed.notes)
    alone = choose(machine, workload, world_size=1)
    assert not any(note.startswith("ways to reduce") for note in alone.notes)


def test_another_algorithm_is_tried_for_itself() -> None:
    """Predicted alike, two cuts of one algorithm need one trial, and two algorithms one each."""
    ALGORITHMS["gossip"] = GOSSIP._replace(
        traffic=lambda payload, workers: (CollectiveTraffic("all_reduce", payload),)
    )
    tried: list[Plan] = []

    def trial(plan: Plan) -> Timeline:
        tried.append(plan)
        predicted = simulate(machine, workload, plan, details=False)
        return msgspec.structs.replace(predicted, origin="measured")

    machine = make_machine(latency_s=1e-6, bandwidth=1e12)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[3 * MIB] * 4)
    fixed = {"execution": "eager"}
    ranking = choose(machine, workload, world_size=2, fixed=fixed, trial=trial, tries=99)
    assert sorted(plan.sync.algorithm for plan in tried) == ["all_reduce", "gossip"]
    assert len(ranking.candidates) > 2


def losses(**arguments: object) -> set[str]:
    machine = make_machine(latency_s=1e-3, bandwidth=1e7)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    found = choose(machine, workload, world_size=2, **arguments)  # type: ignore[arg-type]
    return {c.plan.sync.compression for c in found.candidates}


def test_losses_are_compared_only_where_they_are_allowed() -> None:
    """Nobody's gradients are changed unasked: `allow` or a fixed word asks."""
    assert losses() == {"none"}
    assert losses(allow=("compression",)) == {"none", "half"}
    assert losses(fixed={"compression": "half"}) == {"half"}
    assert losses(allow=("compression",), fixed={"compression": "none"}) == {"none"}


def test_what_is_not_offered_on_a_device_is_not_compared() -> None:
    """On GPUs the permission finds nothing, and the word is refused."""
    machine = make_machine(device="cuda", bandwidth=1e7)
    workload = make_workload(device="cuda")
    ranking = choose(machine, workload, world_size=2, allow=("compression",))
    assert {c.plan.sync.compression for c in ranking.candidates} == {"none"}
    with pytest.raises(PlanError) as error:
        choose(machine, workload, world_size=2, fixed={"compression": "half"})
    assert str(error.value) == (
        "wanted sync.compression to be one of 'none' on cuda, got 'half' in the plan; this release runs no "
        "other there"
    )


def fixed_ranking(**fixed: object) -> Ranking:
    return choose(make_machine(), make_workload(), world_size=2, fixed=fixed)


def test_fixed_fields_stay() -> None:
    """Algorithm, compression, options and interval are as the user says, and the record says who did."""
    ranking = fixed_ranking(
        algorithm="gossip", compression="half", options={"hops": 2}, every=1, bucket_bytes=MIB
    )
    wanted = Sync(algorithm="gossip", compression="half", options={"hops": 2}, bucket_bytes=(MIB,))
    assert {repr(c.plan.sync) for c in ranking.candidates} == {repr(wanted)}
    values = {c.knob: (c.value, c.origin) for c in ranking.best.plan.choices}
    assert values["algorithm"] == ("gossip", "user")
    assert values["compression"] == ("half", "user")
    assert values["options"] == ("hops=2", "user")
    assert values["every"] == ("1", "user")


def test_an_interval_is_never_searched() -> None:
    """Workers train alone only where the user says so, whatever is allowed, and then in every plan of several."""
    loads = {n: make_workload(samples=64 // n) for n in (1, 2)}
    free = choose(make_machine(), loads, allow=("compression",))
    assert {c.plan.sync.every for c in free.candidates} == {1}
    fixed = choose(make_machine(), loads, fixed={"every": 10})
    assert {(c.plan.workers, c.plan.sync.every) for c in fixed.candidates} == {(2, 10)}
    assert not fixed.best.plan.exact
    assert any("has fewer workers than the exchange that is fixed takes" in n for n in fixed.notes)


def test_an_interval_leaves_out_what_a_gpu_replays() -> None:
    """A captured step is the same in every replay; where the user fixes both, the refusal names the mode."""
    machine, workload = make_machine(device="cuda"), make_workload(device="cuda")
    ranking = choose(machine, workload, world_size=2, fixed={"every": 10})
    assert {c.plan.execution for c in ranking.candidates} == {"eager", "compiled"}
    with pytest.raises(PlanError) as error:
        choose(machine, workload, world_size=2, fixed={"every": 10, "execution": "graph"})
    assert str(error.value) == (
        "wanted sync.every=1 for execution='graph', got 10 in the plan; a captured step is the same in every "
        "replay: exchange in every step, or use another mode"
    )


def test_options_choose_what_has_them() -> None:
    """Where the algorithm is left open, only those are compared that have the option."""
    ranking = fixed_ranking(options={"hops": 2})
    assert {c.plan.sync.algorithm for c in ranking.candidates} == {"gossip"}


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (
            {"algorithm": "two_shot"},
            (
                f"wanted sync.algorithm to be one of {', '.join(map(repr, offered('cpu')))}, 'gossip' on cpu, "
                "got 'two_shot' in the plan; this release runs no other there"
            ),
        ),
        (
            {"every": 4, "options": {"fragments": 5}},
            (
                "wanted sync.options['fragments'] <= sync.every=4, got 5 in the plan; a step exchanges one "
                "fragment at most: use fewer"
            ),
        ),
        ({"every": 0}, "wanted every as a whole number >= 1, got 0; correct it"),
        (
            {"options": {"hop": 2}},
            (
                "wanted sync.options to be one of 'held' with algorithm='all_reduce' and compression='none', got 'hop' in "
                "the plan; leave it out"
            ),
        ),
    ],
)
def test_fixed_fields_that_nothing_honours_are_refused(
    fixed: dict[str, object], message: str
) -> None:
    """The refusal is that of a plan written by hand."""
    with pytest.raises(PlanError) as error:
        fixed_ranking(**fixed)
    assert str(error.value) == message


def test_a_divided_update_is_compared_in_modes_that_run_it() -> None:
    """On GPUs in none that is captured; one worker divides nothing. Unless it is fixed, it is not compared."""
    settings = [Setting(device="cuda", workers=n, threads=0) for n in (1, 2)]
    machine = make_machine(device="cuda", settings=settings)
    loads = {n: make_workload(device="cuda", samples=64 // n) for n in (1, 2)}
    plans = [c.plan for c in choose(machine, loads, fixed={"algorithm": "sharded"}).candidates]
    assert {plan.execution for plan in plans if plan.workers == 2} == {"eager", "compiled"}
    assert "graph" in {plan.execution for plan in plans if plan.workers == 1}
    assert "sharded" not in {c.plan.sync.algorithm for c in choose(machine, loads).candidates}


def test_numbers_of_workers_that_are_too_few_are_left_out() -> None:
    """An algorithm of four or more is compared with one worker and not with two; two alone are refused."""
    ALGORITHMS["gossip"] = GOSSIP._replace(least_workers=4)
    loads = {n: make_workload(samples=64 // n) for n in (1, 2, 4)}
    ranking = choose(make_machine(cores=4), loads, fixed={"algorithm": "gossip"})
    assert {c.plan.workers for c in ranking.candidates} == {1, 4}
    assert any(
        "has fewer workers than the exchange that is fixed takes" in note for note in ranking.notes
    )
    with pytest.raises(
        PlanError, match=r"^wanted workers >= 4 for sync.algorithm='gossip', got workers=2"
    ):
        choose(make_machine(), make_workload(), world_size=2, fixed={"algorithm": "gossip"})


def test_another_exchange_is_another_plan() -> None:
    """It counts as a change, tells trials apart, and has values and words of its own."""
    plain, other = planned(), planned(algorithm="gossip", compression="half", options={"hops": 2})
    assert num_changes(other) == num_changes(plain) + 3
    assert differences(plain, other) == {"sync", "exchange"}
    cut = msgspec.structs.replace(plain, sync=Sync(bucket_bytes=(2 * MIB,)))
    assert differences(plain, cut) == {"sync"}
    assert (value_of(other, "algorithm"), value_of(other, "compression")) == ("gossip", "half")
    assert label(other) == (
        "2 workers x 1 thread, eager, gossip protocol (hops 2), halved gradients, buckets 1.00 MiB"
    )


def test_compressions_that_send_no_less_are_left_out_with_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By arithmetic, before anything is simulated; whoever names one gets it."""
    half = COMPRESSIONS["half"]
    monkeypatch.setitem(
        COMPRESSIONS, "half", half._replace(wire_bytes=lambda n, size, *_: n * size)
    )
    machine = make_machine(latency_s=1e-3, bandwidth=1e7)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    ranking = choose(machine, workload, world_size=2, allow=("compression",))
    assert {c.plan.sync.compression for c in ranking.candidates} == {"none"}
    (note,) = [note for note in ranking.notes if "halved" in note]
    assert note.endswith(
        "moves 4.00 MiB through each worker's link as halved gradients, and no more than 4.00 MiB uncompressed"
    )
    assert losses(fixed={"compression": "half"}) == {"half"}
