"""Sparse gradients of several workers: the mean of their rows, and training as DistributedDataParallel has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sparse_worker
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_setups import BEYOND_DDP, MODELS, TRAINED, batch_of, loss_of, optimizer_of, plan_of

from asked_workers import Workers
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync.sparse.sparse_gradients import NO_DENSE
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.model import rows_beside
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import rows_bytes
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload
from strategies import make_machine

SIZES = (2, 3)
DENSE = "make its layer with sparse=False"
UNDONE: dict[str, dict[str, Any]] = {
    "SGD": {"model": "words", "optimizer": "SGD", "settings": {"momentum": 0.9}},
    "Adagrad": {"model": "bags", "optimizer": "Adagrad"},
    "SparseAdam": {"model": "only words", "optimizer": "SparseAdam"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "divided": (
        {"sync": {"algorithm": "sharded"}},
        (
            "PlanError: wanted a plan that can exchange sparse gradients, got one that divides the update among "
            "workers (sync.algorithm='sharded') by parts of dense gradients, while that of words.weight is "
            f"sparse; use another algorithm, or {DENSE}"
        ),
    ),
    "with momentum": (
        {"sync": {"compression": "topk", "options": {"momentum": 0.5}}},
        (
            "PlanError: wanted a plan that can exchange sparse gradients, got one that accumulates momentum "
            "before it sends (sync.compression='topk' with momentum=0.5), which the rows of the sparse gradient "
            f"of words.weight would not have; leave the option out, or {DENSE}"
        ),
    ),
    "other layers": (
        {"differs": True},
        (
            "WorkloadError: wanted the same model on all 2 workers, got words.weight as float32 (30, 4) on rank "
            "3, float32 (30, 4) with sparse gradients on rank 1 (1 of 3 parameters and buffers differ); build "
            "the same model on every worker"
        ),
    ),
    "written by forward passes": (
        {"model": "max norm"},
        (
            "WorkloadError: wanted forward passes that leave parameters as they are, got max_norm=1.0 in 0, by "
            "which each worker scales the rows of its own batch alone; scale them in the loss, or after the step "
            "on all workers, or train on one worker (--workers 1)"
        ),
    ),
    "sparse too late": (
        {"is_late": True},
        (
            "WorkloadError: wanted a dense gradient for words.weight, got a sparse one, which workers exchange of "
            "nn.Embedding and nn.EmbeddingBag that had sparse=True when the step was made; use one of these, "
            "make the gradient dense, or train on one worker (--workers 1)"
        ),
    ),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(sparse_worker.__file__)) as started:
        yield started


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Some parameters, and for each worker what it has of each."""
    size, count = draw(st.sampled_from(SIZES)), draw(st.integers(1, 3))
    kinds = st.sampled_from(("rows", "rows", "none", "empty", "dense"))
    return {
        "size": size,
        "seed": draw(st.integers(0, 10**6)),
        "kinds": [draw(st.lists(kinds, min_size=count, max_size=count)) for _ in range(size)],
        "widths": draw(
            st.lists(st.sampled_from([[3], [1], [2, 2], []]), min_size=count, max_size=count)
        ),
        "dtypes": draw(
            st.lists(
                st.sampled_from(("float32", "float64", "bfloat16")), min_size=count, max_size=count
            )
        ),
    }


@given(case=cases())
def test_the_exchange_is_the_dense_mean(workers: Workers, case: dict[str, Any]) -> None:
    """For rows, no rows, none and dense ones in any mixture; rows stay rows where nobody has a dense one."""
    size = case["size"]
    answers = workers.ask("law", **case)
    assert all(one["means"] == answers[0]["means"] for one in answers)
    sparse_worker.check_means(case, answers[0]["means"], size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_ddp(workers: Workers, name: str, size: int) -> None:
    """To the bit with two workers; with three DDP rounds each third, we the sum once.

    All workers hold the same, and a gradient is dense where a plain one is.
    """
    told = workers.ask("trained", size, **TRAINED[name])
    assert all(one["same"] for one in told)
    if size == 2:
        assert all(one["ddp"] and one["ddp state"] for one in told)
    assert all(one["ddp gap"] < 1e-6 for one in told)
    assert told[0]["kinds"][0] == "torch.sparse_coo"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BEYOND_DDP)
def test_what_ddp_refuses_is_training_by_one_process(
    workers: Workers, name: str, size: int
) -> None:
    """Layers that some or all workers do not use, and tables whose gradient something else makes dense."""
    case = BEYOND_DDP[name]
    told = workers.ask("trained", size, **case, has_ddp=False)
    assert all(one["same"] for one in told)
    assert all(one["gap"] <= (0.0 if size == 2 else 1e-6) for one in told)
    kind = {"tied": "torch.strided", "words": "torch.sparse_coo", "bags": "torch.sparse_coo"}
    skipped = case.get("skips") == "all"
    assert told[0]["kinds"][0] == ("none" if skipped else kind[case["model"]])


@pytest.mark.parametrize("size", SIZES)
def test_clipping_counts_rows(workers: Workers, size: int) -> None:
    """By the norm of all gradients, which torch's own clipping takes of dense ones only."""
    told = workers.ask("trained", size, model="bags", optimizer="SGD", clip=0.05, has_one=False)
    free = workers.ask("trained", size, model="bags", optimizer="SGD", has_ddp=False)
    assert all(one["same"] for one in told)
    assert all(one["ddp gap"] < 1e-7 for one in told)
    assert all(one["gap"] < 1e-6 for one in free)
    assert told[0]["moved"] < 0.5 * free[0]["moved"]


def test_clipping_of_a_worker_alone() -> None:
    """The update is the clipped gradient: a table whose rows come twice, and a linear layer."""
    torch.manual_seed(0)
    case = {"model": "bags", "optimizer": "SGD", "settings": {"lr": 1.0}}
    model = MODELS["bags"]()
    before = [p.detach().clone() for p in model.parameters()]
    plan = plan_of(1, case)
    with PlannedStep(
        model, loss_of(case, 0, 1), optimizer_of(model, case), plan, device="cpu", clip_norm=0.01
    ) as step:
        step(batch_of(0, 0))
    pairs = zip(model.parameters(), before, strict=True)
    moved = torch.cat([(p.detach() - old).double().flatten() for p, old in pairs])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_compression_leaves_rows_as_they_are(workers: Workers) -> None:
    """And says so; the others are compressed."""
    case = {"model": "bags", "optimizer": "SGD", "sync": {"compression": "int8"}}
    told = workers.ask("trained", 2, **case, has_ddp=False)
    assert 0.0 < told[0]["gap"] < 1e-2
    assert told[0]["notes"] == [
        (
            "sparse gradients (bags.weight, doubles.weight) are exchanged as they are, by an all-gather of their "
            "rows: sync.algorithm='all_reduce' and sync.compression='int8' are for the others"
        )
    ]


@pytest.mark.parametrize("name", UNDONE)
def test_workers_that_train_alone_exchange_tables(workers: Workers, name: str) -> None:
    """Every few steps, whatever their gradients are; after the last exchange all hold the same."""
    case = {**UNDONE[name], "sync": {"every": 4}}
    told = workers.ask("trained", 2, **case, has_ddp=False, has_one=False)
    assert all(one["same"] for one in told)
    assert told[0]["moved"] > 0.0


def test_a_store_takes_rows(workers: Workers) -> None:
    """Training through a key-value store is that of DDP as well."""
    case = {"model": "words", "optimizer": "SGD", "sync": {"algorithm": "kvstore"}}
    assert all(one["ddp"] for one in workers.ask("trained", 2, **case))


@pytest.mark.parametrize("name", UNDONE)
def test_what_is_undone_is_undone(workers: Workers, name: str) -> None:
    """Before the first step and later, parameters and state."""
    assert workers.ask("put back", 2, **UNDONE[name]) == [{"first": True, "later": True}] * 2


@pytest.mark.parametrize("name", UNDONE)
def test_a_run_that_was_stopped_goes_on(workers: Workers, name: str, tmp_path: Path) -> None:
    """To the bits of a whole one; momenta of sparse gradients are sparse in the checkpoint as well."""
    told = workers.ask("stopped", 2, **UNDONE[name], folder=str(tmp_path))
    assert all(one["equal"] and one["was_stopped"] for one in told)


def test_what_one_worker_writes_is_found(workers: Workers) -> None:
    """A row of a table, written by one of them between two steps."""
    told = workers.ask("written", 2, model="words", optimizer="SGD")
    wanted = (
        "wanted the same state on all 2 workers after step 3, before which it was written, got another "
        "parameter words.weight on rank 3 than on rank 1 (1 of 12 tensors and settings differ); "
    )
    assert all(one["message"].startswith(wanted) for one in told)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(workers: Workers, name: str) -> None:
    """By name, on all workers, before anything trains; a layer that is made sparse later, in its first step."""
    case, message = REFUSED[name]
    told = workers.ask("refused", 2, **{"model": "words", "optimizer": "SGD", **case})
    assert [one["message"] for one in told] == [message] * 2


def traced(case: dict[str, Any], batch: Any) -> Workload:
    model = MODELS[case["model"]]()
    return trace(model, loss_of(case, 0, 2), optimizer_of(model, case), batch)


@pytest.mark.parametrize("model", ["bags", "only words"])
def test_what_is_sent_and_shown_is_what_is_predicted(workers: Workers, model: str) -> None:
    """Frames, buckets, and bytes where no number comes twice; else less is sent than predicted."""
    kind = "SparseAdam" if model == "only words" else "SGD"
    case = {"model": model, "optimizer": kind, "is_distinct": True}
    told = workers.ask("trained", 2, **case, has_ddp=False, has_one=False)
    plan = plan_of(2, case)
    load, other = (traced(case, batch_of(0, 0, is_distinct=one)) for one in (True, False))
    rows, more = ([one.to_send for one in rows_beside(each, plan)] for each in (load, other))
    assert [one["sent_bytes"] for one in told] == [rows_bytes(rows)] * 2
    repeated = workers.ask("trained", 2, model=model, optimizer=kind, has_ddp=False, has_one=False)
    assert 0 < repeated[0]["sent_bytes"] < rows_bytes(more)
    timeline = simulate(make_machine(), load, plan)
    wanted = sorted((span.name, span.lane) for span in timeline.frames)
    assert sorted(map(tuple, told[0]["frames"])) == wanted
    buckets = told[0]["buckets"]
    frames = step_frames(
        workers=2, num_buckets=len(buckets), sync=plan.sync, has_rows=True, has_buffers=False
    )
    assert wanted == sorted((frame.name, frame.lane) for frame in frames)
    assert (buckets == [[NO_DENSE]]) == (model == "only words")
