"""`choose`: what is enumerated, how it is ranked, and what is claimed."""

import msgspec
import pytest
from planned_loads import make_loads

from ridgeline.errors import MachineError, PlanError
from ridgeline.machine import Setting
from ridgeline.machine.cluster import Level
from ridgeline.plan import Plan
from ridgeline.planner import Candidate, Ranking, choose
from ridgeline.planner.exchanges.pruning import losing
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES
from ridgeline.workload import Workload
from strategies import make_machine, make_workload

MS = 1_000_000


def test_two_workers_win_when_communication_is_cheap() -> None:
    """The number of workers is chosen from the workloads of one global batch."""
    ranking = choose(make_machine(latency_s=1e-5), make_loads())
    assert ranking.best.plan.workers == 2
    assert ranking.best.plan.threads == 1
    assert ranking.candidates[-1].plan.workers == 1
    assert ranking.candidates[-1].plan.threads == 2


def test_one_worker_wins_when_communication_is_dear() -> None:
    """A second worker that costs more than it brings is not taken."""
    ranking = choose(make_machine(latency_s=1.0), make_loads())
    assert ranking.best.plan.workers == 1
    assert ranking.choice("workers").reason.startswith("predicted ")


def test_shared_cores_are_not_free() -> None:
    """Rates are those of the setting: two workers that halve each other's speed gain nothing."""
    machine = make_machine(latency_s=1e-5, worker_rates={1: 1e9, 2: 0.5e9})
    ranking = choose(machine, make_loads())
    assert ranking.best.plan.workers == 1


def test_candidates_are_ranked_by_time_per_sample() -> None:
    """The order of what was predicted is that of the predicted times, the chosen plan aside."""
    ranking = choose(make_machine(), make_loads())
    times = [c.sample_s for c in ranking.candidates[1:]]
    assert times == sorted(times)
    assert all(c.samples == 64 for c in ranking.candidates)


def test_a_gain_within_the_error_is_not_claimed() -> None:
    """Two workers that win by less than the uncertainty leave the simpler plan in place, and say so."""
    machine = make_machine(latency_s=1e-6, bandwidth=1e12, worker_rates={1: 1e9, 2: 0.52e9})
    ranking = choose(machine, make_loads(gradient_bytes=1024))
    assert ranking.best.plan.workers == 1
    assert "within the uncertainty of 5.0 %, so the simpler plan is kept" in ranking.best.why
    assert ranking.choice("workers").reason.endswith("the simpler plan is kept")
    assert ranking.candidates[1].sample_s < ranking.best.sample_s


def test_every_knob_has_a_choice() -> None:
    """The winning plan records value, origin, reason and alternatives of every knob."""
    ranking = choose(make_machine(latency_s=1e-5), make_loads(), fixed={"depth": 4})
    choices = {choice.knob: choice for choice in ranking.best.plan.choices}
    assert tuple(choices) == (
        "workers", "threads", "execution", "precision", "memory_format", "optimizer", "kernels", "random",
        "accumulate", "algorithm", "compression", "every", "bucket_bytes", "depth",
    )  # fmt: skip
    origins = {knob: choice.origin for knob, choice in choices.items()}
    assert origins["workers"] == "search"
    assert origins["depth"] == "user"
    assert origins["execution"] == "search"
    assert origins["precision"] == "default"
    assert all(choice.reason for choice in choices.values())
    assert [a.value for a in choices["workers"].alternatives] == ["1"]
    assert choices["workers"].alternatives[0].step_s > ranking.best.step_s


def test_buckets_of_other_worlds_are_no_alternatives() -> None:
    """A worker alone exchanges nothing, so what other numbers of workers cut is not held against it."""
    ranking = choose(make_machine(latency_s=1.0), make_loads(gradient_bytes=3 << 20))
    assert ranking.best.plan.workers == 1
    assert any(c.plan.sync.bucket_bytes != DEFAULT_BUCKET_BYTES for c in ranking.candidates)
    choice = ranking.choice("bucket_bytes")
    assert (choice.origin, choice.reason) == ("default", "no gradients are exchanged")
    assert choice.alternatives == ()


def test_bucket_sizes_are_searched() -> None:
    """Default cuts, one bucket and the searched cuts are compared."""
    machine = make_machine(latency_s=1e-4, bandwidth=2e8)
    ranking = choose(
        machine, make_workload(backward=[20 * MS] * 8, gradient_bytes=[3 << 20] * 8), world_size=2
    )
    limits = {c.plan.sync.bucket_bytes for c in ranking.candidates}
    assert DEFAULT_BUCKET_BYTES in limits
    assert (24 << 20,) in limits
    assert len(limits) == 3
    assert len(ranking.choice("bucket_bytes").alternatives) == 2


def test_one_workload_runs_on_the_world() -> None:
    """A single workload is what each of `world_size` workers does."""
    ranking = choose(make_machine(), make_workload(), world_size=2)
    assert {c.plan.workers for c in ranking.candidates} == {2}
    assert ranking.best.samples == 16
    assert choose(make_machine(), make_workload()).best.plan.workers == 1


def test_world_size_limits_a_mapping() -> None:
    """Workloads for more workers than there are do not count."""
    assert {
        c.plan.workers for c in choose(make_machine(), make_loads(), world_size=1).candidates
    } == {1}


def test_workers_that_do_not_fit_the_cores_are_left_out_unless_fixed() -> None:
    """Two workers on one core are tried only for a user who insists."""
    machine = make_machine(cores=1)
    assert {c.plan.workers for c in choose(machine, make_loads()).candidates} == {1}
    assert choose(machine, make_loads(), fixed={"workers": 2}).best.plan.threads == 1


def test_workers_of_a_cluster_share_the_cores_of_their_host() -> None:
    """Eight workers on hosts of two have two cores each of four; a host has no room for eight."""
    hosts = (Level(size=2, rate_bytes_per_s=1e9),)
    machine = msgspec.structs.replace(make_machine(cores=4), cluster=hosts)
    loads = {2: make_workload(), 8: make_workload()}
    threads = {c.plan.workers: c.plan.threads for c in choose(machine, loads).candidates}
    assert threads == {2: 2, 8: 2}


def test_fixed_knobs_are_honoured() -> None:
    """What the user sets is not searched, and is recorded as theirs."""
    fixed = {
        "workers": 2,
        "threads": 1,
        "execution": "eager",
        "bucket_bytes": 1 << 20,
        "accumulate": 2,
    }
    ranking = choose(make_machine(), make_loads(), fixed=fixed)
    assert len(ranking.candidates) == 1
    plan = ranking.best.plan
    assert (plan.workers, plan.threads, plan.accumulate) == (2, 1, 2)
    assert plan.sync.bucket_bytes == (1 << 20,)
    origins = {c.knob: c.origin for c in plan.choices}
    assert {knob for knob, origin in origins.items() if origin == "user"} == set(fixed)


def test_gpus_get_graphs() -> None:
    """On a GPU whole-step graphs are compared with eager and win when launches bind."""
    machine = make_machine(device="cuda", dispatch_s=5e-3, replay_s=1e-5)
    ranking = choose(machine, make_workload(device="cuda"))
    assert [(c.plan.execution, c.plan.kernels) for c in ranking.candidates] == [
        ("graph", "default"), ("compiled+graph", "default"), ("step-graph", "default"),
        ("compiled+graph", "combined"), ("eager", "default"), ("compiled", "default"),
    ]  # fmt: skip
    assert ranking.best.plan.threads == 0
    busy = make_machine(device="cuda", dispatch_s=1e-9, replay_s=1e-9)
    assert choose(busy, make_workload(device="cuda")).best.plan.execution == "eager"


def test_inexact_plans_need_permission() -> None:
    """Lower precision is compared only when it is allowed."""
    machine = make_machine(device="cuda")
    workload = make_workload(device="cuda")
    assert all(c.plan.exact for c in choose(machine, workload).candidates)
    allowed = choose(machine, workload, allow=("bf16",))
    assert {c.plan.precision for c in allowed.candidates} == {"as-is", "bf16"}
    fixed = choose(machine, workload, fixed={"precision": "tf32"})
    assert {c.plan.precision for c in fixed.candidates} == {"tf32"}


def test_memory_decides_on_micro_batches() -> None:
    """When the batch does not fit, the fewest micro-batches that do are used."""
    machine = make_machine(memory_bytes=10_000_000)
    workload = make_workload(gradient_bytes=[1_000_000] * 2, activation_bytes=12_000_000)
    ranking = choose(machine, workload)
    assert ranking.best.plan.accumulate == 4
    assert ranking.choice("accumulate").reason == (
        "the whole batch does not fit in memory; 4 micro-batches do"
    )
    assert ranking.choice("accumulate").origin == "search"


def _with_state(state_bytes: int) -> Workload:
    """A step of 17 MB in two workers, of which the optimizer's state is a part."""
    workload = make_workload(gradient_bytes=[1_000_000] * 4, activation_bytes=1000)
    points = (msgspec.structs.replace(p, state_bytes=state_bytes) for p in workload.memory)
    return msgspec.structs.replace(workload, memory=tuple(points))


def test_memory_is_judged_by_the_exchange_that_is_fixed() -> None:
    """Each worker keeps a part of the optimizer's state where the update is divided."""
    machine, fixed = make_machine(memory_bytes=2 * 16_000_000), {"accumulate": 1}
    with pytest.raises(PlanError, match="of memory per worker"):
        choose(machine, _with_state(8_000_000), world_size=2, fixed=fixed)
    found = choose(
        machine, _with_state(8_000_000), world_size=2, fixed=fixed | {"algorithm": "sharded"}
    )
    assert found.best.plan.sync.algorithm == "sharded"


def test_a_compression_is_judged_with_the_options_that_are_fixed() -> None:
    """Over 128 workers the usual density sends more than nothing compressed does, a tenth of it less."""
    workload, plan, allow = make_workload(), Plan(workers=128), ("compression",)
    assert "topk" in losing(workload, plan, {}, allow)
    assert "topk" not in losing(workload, plan, {"options": {"density": 1e-3}}, allow)


def test_what_a_compression_remembers_must_fit_in_memory() -> None:
    """A plan whose residual does not is left out, once for each compression."""
    machine = make_machine(memory_bytes=2 * 20_000_000)
    found = choose(
        machine,
        _with_state(8_000_000),
        world_size=2,
        allow=("compression",),
        fixed={"accumulate": 1},
    )
    assert {c.plan.sync.compression for c in found.candidates} == {"none"}
    told = [n for n in found.notes if "int8" in n and "of memory per worker" in n]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("device", "workers", "message"),
    [
        (
            "cpu",
            1,
            (
                "1 worker x 2 threads, eager, 8 micro-batches needs 9.12 MiB of memory per worker, of which "
                "900 B are usable; reduce the batch size"
            ),
        ),
        (
            "cpu",
            4,
            (
                "4 workers x 1 thread, eager, 8 micro-batches, buckets 4.00 MiB, 25.0 MiB needs 9.12 MiB of "
                "memory per worker, of which 225 B are usable; reduce the batch size, or the number of "
                "workers, which share the host's memory"
            ),
        ),
        (
            "cuda",
            2,
            (
                "2 workers, eager, 8 micro-batches, buckets 4.00 MiB, 25.0 MiB needs 9.12 MiB of memory per "
                "worker, of which 900 B are usable; reduce the batch size or use more devices"
            ),
        ),
    ],
)
def test_nothing_fits(device: str, workers: int, message: str) -> None:
    """No plan is an error that says how much is missing, and who shares what there is."""
    machine = make_machine(device=device, memory_bytes=1000)
    with pytest.raises(PlanError) as error:
        choose(machine, make_workload(device=device), world_size=workers)
    assert str(error.value) == f"wanted a plan that can run, got none: {message}"


def test_micro_batches_need_samples() -> None:
    """A fixed number of micro-batches rules out the workers whose batch it cannot divide."""
    loads = make_loads()
    ranking = choose(make_machine(), loads, fixed={"accumulate": 64})
    assert {c.plan.workers for c in ranking.candidates} == {1}
    assert (
        "left out: 2 workers x 1 thread, eager, 64 micro-batches, buckets 4.00 MiB, 25.0 MiB: has "
        "accumulate=64, more than the 32 samples of a worker's batch"
    ) in ranking.notes
    with pytest.raises(PlanError) as error:
        choose(make_machine(), loads[2], fixed={"accumulate": 64})
    assert str(error.value) == (
        "wanted a plan that can run, got none: 1 worker x 2 threads, eager, 64 micro-batches has "
        "accumulate=64, more than the 32 samples of a worker's batch; lower accumulate"
    )


def test_plans_that_cannot_be_predicted_are_noted() -> None:
    """Two workers without measured collectives are left out, with the reason; one worker stays."""
    machine = msgspec.structs.replace(make_machine(), collectives=())
    ranking = choose(machine, make_loads())
    assert {c.plan.workers for c in ranking.candidates} == {1}
    assert ranking.notes[0].startswith(
        "left out: 2 workers x 1 thread, eager, buckets 4.00 MiB, 25.0 MiB: wanted"
    )
    with pytest.raises(MachineError):
        choose(machine, make_loads(), fixed={"workers": 2})


def test_assumptions_are_in_the_notes() -> None:
    """What a ranking assumed is read beside it."""
    machine = make_machine(settings=[Setting(device="cpu", workers=2, threads=1)])
    notes = choose(machine, make_loads()).notes
    assert notes == (
        (
            "ways to reduce that were not compared: ring (the backend's all-reduce sends the same bytes in "
            "as many messages); rings (workers share one network, which one ring fills); tree (over 2 "
            "workers a tree waits for no fewer messages than a ring, larger ones); sharded (it saves "
            "memory, not time: the updated parameters travel where no backward pass hides it); key-value "
            "store (its servers are the workers, so that it sends the bytes of a ring: it gains where some "
            "need not wait for others, and by sparse rows)"
        ),
        "ceilings at 1 x 2 cpu threads were not measured: assumed as at 2 x 1 cpu threads",
        (
            "what compiling does is assumed (kernels as fast as their bytes): untried modes that compile are "
            "assumed to be right within 25.0 % only"
        ),
        (
            "17 of 17 operators of toy, 100.0 % of its predicted step, were not timed on this machine: "
            "predictions before a trial are assumed to be right within 75.0 % only"
        ),
    )


def test_the_best_candidate_shows_its_operators() -> None:
    """Only the chosen plan carries operator spans; the others would fill the file."""
    ranking = choose(make_machine(), make_loads())
    assert any(span.detail for span in ranking.best.timeline.spans)
    assert not any(span.detail for c in ranking.candidates[1:] for span in c.timeline.spans)


def test_a_ranking_survives_its_file(tmp_path) -> None:
    """load(save(r)) is r, candidates and reasons included."""
    ranking = choose(make_machine(), make_loads())
    assert Ranking.load(ranking.save(tmp_path / "ranking.json")) == ranking
    assert isinstance(ranking.best, Candidate)


def test_explain() -> None:
    """A knob is explained with value, origin, reason and what others cost."""
    ranking = choose(make_machine(latency_s=1e-5), make_loads())
    lines = ranking.explain("workers").splitlines()
    assert lines[0] == "workers = 2 (set by search)"
    assert lines[1].startswith("  predicted ")
    assert lines[2].startswith("  1: ")
    assert lines[2].endswith(" a step, predicted")
    with pytest.raises(PlanError) as error:
        ranking.explain("colour")
    assert str(error.value) == (
        "wanted a knob out of workers, threads, execution, precision, memory_format, optimizer, kernels, "
        "random, accumulate, algorithm, compression, every, bucket_bytes, depth, got 'colour'; name one of "
        "them"
    )
