"""Training through a store by a plan: it is that of one process, and what it does not do is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import training_worker

from asked_workers import Workers
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.sync.joining import NO_GRADIENTS
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import handed_bytes

SIZES = (2, 3, 4)
TRAINED: dict[str, dict[str, Any]] = {
    "SGD": {"settings": {"momentum": 0.9, "nesterov": True}, "own": {"weight_decay": 0.1}},
    "AdamW": {},
    "Adam": {"settings": {"amsgrad": True}},
    "Adagrad": {},  # has its state before the first step
    "NAdam": {},
    "RMSprop": {"settings": {"momentum": 0.9, "centered": True}},
    "Adafactor": {},  # looks at whole parameters
}
SERVERS = {"kind": "dist_async", "servers": 1}
OF_STORE = (
    "WorkloadError: wanted the state of SGD, got that of an optimizer whose updates a store makes; call "
    "step.optimizer_state() on all workers before the step is closed: the first one gets all of it, for "
    "load_state_dict"
)
WHOLE = (
    "WorkloadError: wanted an optimizer of the parameters that it had when the step was made, got one more, "
    "of shape (), of which the store has no value; make the step again after adding parameters"
)
IN_STORE = (
    "WorkloadError: wanted what SGD remembers of its parameters, got an optimizer whose state is in a store: "
    "read it by step.optimizer_state(), write it by load_state_dict() on all workers, and train by one step "
    "with this optimizer, which may add up losses"
)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "class": (
        {},
        (
            "PlanError: wanted an optimizer of torch.optim for sync.algorithm='kvstore', which makes it "
            "again by its name, got __main__.Wrapped; use one of those, or another algorithm"
        ),
    ),
    "clip": (
        {},
        (
            "PlanError: wanted clip_norm=None for sync.algorithm='kvstore', got 1.0: parameters are updated "
            "while gradients still come, whose total norm is not known yet; leave it out, or use another "
            "algorithm"
        ),
    ),
    "hook": (
        {},
        (
            "WorkloadError: wanted an optimizer without hooks before its step for sync.algorithm='kvstore', "
            "whose updates are made while gradients come, got SGD with some; remove them, or use another "
            "algorithm"
        ),
    ),
    "hook later": (
        {},
        (
            "WorkloadError: wanted an optimizer without hooks before its step for sync.algorithm='kvstore', "
            "whose updates are made while gradients come, got SGD with some; remove them, or use another "
            "algorithm"
        ),
    ),
    "replaced": (
        {},
        (
            "WorkloadError: wanted an optimizer with the step of its class for sync.algorithm='kvstore', whose "
            "updates are made while gradients come, got SGD with another method in its place; leave it as it "
            "is, or use another algorithm"
        ),
    ),
    "replaced later": (
        {},
        (
            "WorkloadError: wanted an optimizer with the step of its class for sync.algorithm='kvstore', whose "
            "updates are made while gradients come, got SGD with another method in its place; leave it as it "
            "is, or use another algorithm"
        ),
    ),
    "of another": (
        {},
        (
            "WorkloadError: wanted an optimizer of the model's parameters as they were when the step was made, "
            "got another one of shape (3,) in group 2, which the workers would not exchange; make it part of "
            "the model, and the step again"
        ),
    ),
    "added": ({"left_out": "scale"}, WHOLE),
    "removed": (
        {},
        (
            "WorkloadError: wanted an optimizer of the parameters that it had when the step was made, got one "
            "without scale, which the store would still update; make the step again after removing "
            "parameters, or freeze them"
        ),
    ),
    **{name: ({}, IN_STORE) for name in ("two steps", "looked into", "cleared", "set")},
    "beside another step": ({"settings": {"momentum": 0.9}}, IN_STORE),
    "unfrozen": (
        {},
        (
            "WorkloadError: wanted the parameters to require gradients as when the step was made, got "
            "frozen.weight that does now; make the step again after unfreezing"
        ),
    ),
    "some of the job": (
        {"store": SERVERS},
        (
            "PlanError: wanted all 4 workers of the job for sync.options['kind']='dist_async', got 2 of "
            "them; train over all, or use another kind"
        ),
    ),
    **{
        name: ({}, OF_STORE)
        for name in ("state_dict", "state_dict, closed", "step, closed", "another step")
    },
}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(training_worker.__file__)) as started:
        yield started


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("optimizer", TRAINED)
def test_training_is_that_of_one_process(workers: Workers, optimizer: str, size: int) -> None:
    """To the bit, parameters and whole state, with groups, a schedule, tied, frozen and unused weights.

    A hook behind the optimizer's step finds all of it. So it is to the all-reduce, where this adds up in the same order; else rounding is apart, which optimizers that
    divide by the gradient's size make larger.
    """
    told = workers.ask("trained", size, optimizer=optimizer, **TRAINED[optimizer])
    assert all(one["by one"] for one in told)
    assert all(one["hooked"] for one in told)
    assert told[0]["state"]
    assert all(one["peer"] for one in told) or size > 2
    assert all(one["gap"] < 1e-6 for one in told) or optimizer != "SGD"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("skips", ["last", "all"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_what_nobody_uses_stays(workers: Workers, optimizer: str, skips: str, size: int) -> None:
    """A layer that some workers skip is updated by the others' gradients; one that all skip does not decay."""
    settings = {"weight_decay": 0.1}
    told = workers.ask("trained", size, optimizer=optimizer, skips=skips, settings=settings)
    assert all(one["by one"] for one in told)
    assert told[0]["state"]


@pytest.mark.parametrize(
    "case",
    [
        {"knobs": {"accumulate": 2}},
        {"knobs": {"optimizer": "fused"}},
        {"knobs": {"accumulate": 4}, "skips": "last"},
        {"left_out": "scale"},
    ],
    ids=str,
)
def test_so_is_training_in_any_way(workers: Workers, case: dict[str, Any]) -> None:
    """Micro-batches, fused kernels, and a parameter that the optimizer does not hold: as by an all-reduce."""
    told = workers.ask("trained", 2, optimizer="AdamW", has_reference=False, **case)
    assert all(one["peer"] for one in told)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("optimizer", "model"),
    [("SGD", "words"), ("Adagrad", "words"), ("SGD", "only words"), ("SparseAdam", "only words")],
)
def test_sparse_rows_are_those_of_one_process(
    workers: Workers, optimizer: str, model: str, size: int
) -> None:
    """To the bit, beside dense parameters or alone, and what is remembered of them."""
    case = {"optimizer": optimizer, "model": model, "grouped": False, "has_peer": False}
    told = workers.ask("trained", size, **case)
    assert all(one["by one"] for one in told)
    assert told[0]["state"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [
        {"optimizer": "AdamW"},
        {"optimizer": "SGD", "settings": {"momentum": 0.9}},
        {"optimizer": "SparseAdam", "model": "only words", "grouped": False},  # counts in integers
    ],
    ids=lambda case: case["optimizer"],
)
def test_what_is_undone_is_undone(workers: Workers, case: dict[str, Any], size: int) -> None:
    """By a snapshot at first or between steps, and by the whole state, loaded between two steps."""
    told = workers.ask("put back", size, **case)
    wanted = {"from the first": True, "repeated": True, "loaded": True}
    assert told == [wanted] * size


def test_a_run_that_was_stopped_goes_on(workers: Workers, tmp_path: Path) -> None:
    """To the bits of a whole one, through the same store or from and to updates by every worker."""
    wanted = {"stopped": True, "taken up by all": True, "taken up by a store": True}
    assert workers.ask("resumed", 2, folder=str(tmp_path)) == [wanted] * 2


@pytest.mark.parametrize("what", ["parameters", "data", "settings"])
def test_what_a_script_writes_on_all_workers_holds(workers: Workers, what: str) -> None:
    """The next step goes on from it, with what the optimizer remembers; `.data` shows in no counter."""
    told = workers.ask("written", 2, optimizer="AdamW", who="all", what=what)
    assert told == [{"message": "", "same": True, "gap": 0.0}] * 2


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("parameters", "another parameter first.weight on rank 3 than on rank 1"),
        ("settings", "the setting lr of group 0 as 0.01 on rank 1, 0.5 on rank 3"),
    ],
)
def test_what_a_script_writes_on_one_worker_is_refused(
    workers: Workers, what: str, found: str
) -> None:
    """On all of them, before the parameters of the step are taken."""
    told = workers.ask("written", 2, optimizer="AdamW", who="last", what=what)
    message = (
        "WorkloadError: wanted the same state on all 2 workers after step 4, before which it was written, "
        f"got {found} (1 of 35 tensors and settings differ); load a checkpoint on every worker, model and "
        "optimizer alike, or set on all what was set on one"
    )
    assert told == [{"message": message}] * 2


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_store_does_not_do_is_refused(workers: Workers, what: str) -> None:
    """Before a step where that can be known, and with what to do instead."""
    case, message = REFUSALS[what]
    assert workers.ask("refused", 2, what=what, **case) == [{"message": message}] * 2


def test_what_is_sent_and_shown_is_what_is_predicted(workers: Workers) -> None:
    """Bytes of each bucket, and frames."""
    sync = Sync(algorithm=training_worker.STORE, bucket_bytes=(400, 2000))
    for told in workers.ask("trained", 2, optimizer="AdamW", has_peer=False):
        sent = [handed_bytes(sync, numel, 4, 2) for numel in told["payloads"]]
        assert told["sent_bytes"] == training_worker.STEPS * sum(sent)
        expected = step_frames(workers=2, num_buckets=len(sent), sync=sync)
        assert len(sent) > 1
        assert sorted(told["frames"]) == sorted(frame.name for frame in expected)


def test_servers_that_add_up_train_as_one_process(workers: Workers) -> None:
    """Updates by the gradients of all workers, some of which have none for a layer."""
    store = {**SERVERS, "staleness": 0}
    told = workers.ask("trained", 4, optimizer="AdamW", skips="last", store=store)
    assert all(one["by one"] for one in told)
    assert told[0]["state"]
    no_gradients, told_of_pace, told_of_address = told[0]["notes"]
    assert no_gradients == NO_GRADIENTS
    assert told_of_pace == (
        "a worker waits for others that are more than 0 pushes behind, and each has parameters and buffers "
        "of its own between steps; updates are by the mean of their gradients"
    )
    assert re.fullmatch(
        r"other processes join by RIDGELINE_KVSTORE_JOIN=tcp://127.0.0.1:\d+/\d+ and this plan",
        told_of_address,
    )


def test_training_survives_servers_that_are_killed(workers: Workers, tmp_path: Path) -> None:
    """To the bit it is the training of one process, and nothing of it is left in the folder that the plan names.

    A worker tells of each server that took another's place once, whether or not it waited for one or sent
    pushes again; on a host that is busy servers may be silent for seconds besides.
    """
    store = {"kind": "dist_async", "servers": 2, "staleness": 0, "snapshots": str(tmp_path)}
    told = workers.ask("trained", 4, optimizer="AdamW", store=store, kills=[3], has_peer=False)
    assert all(one["by one"] for one in told)
    assert told[0]["state"]
    assert [*tmp_path.iterdir()] == []
    for rank, one in enumerate(told):
        found = [
            re.fullmatch(
                rf"worker {rank} got no answer from server ([01]) from .* s; (another took its place|it came back) "
                r"at tcp://127.0.0.1:\d+, \d+ push(?:es)? sent again",
                outage,
            )
            for outage in one["outages"]
        ]
        assert all(found)
        servers = [one[1] for one in found if one[2] == "another took its place"]
        assert sorted(servers) == ["0", "1"]


def test_a_run_tells_of_outages_that_it_went_through(workers: Workers, tmp_path: Path) -> None:
    """Those of all workers, on all; what is taken up again from a checkpoint still knows of them.

    On a host that is busy servers may be silent for seconds besides, also after the run was taken up again.
    """
    store = {**SERVERS, "staleness": 0, "snapshots": str(tmp_path / "servers")}
    folder = str(tmp_path / "run")
    told = [one["told"] for one in workers.ask("reported", 4, store=store, folder=folder, kills=2)]
    assert told == [told[0]] * 4
    first, second = told[0]
    assert [outage for outage in second if outage in first] == first
    assert all("it came back" in outage for outage in second if outage not in first)
    replaced = [outage for outage in first if "another took its place" in outage]
    assert sorted(re.findall(r"worker (\d) got no answer from server 0", " ".join(replaced))) == [
        *"0123"
    ]


@pytest.mark.parametrize(("staleness", "is_unequal"), [(-1, True), (2, False)])
def test_workers_that_need_not_wait_meet_for_their_state(
    workers: Workers, staleness: int, *, is_unequal: bool
) -> None:
    """Each push is an update; some workers may take fewer steps; the loss falls, and in the end all have the same."""
    case = {"steps": 20, "unequal": is_unequal, "store": {**SERVERS, "staleness": staleness}}
    told = workers.ask("without waiting", 4, optimizer="AdamW", **case)
    assert all(one["alike"] for one in told)
    assert all(one["losses"][-1] < one["losses"][0] for one in told)
    assert told[0]["steps"] == (20 + 3 * 10 if is_unequal else 4 * 20)


def test_a_plan_names_what_it_needs() -> None:
    """Its options are held to the kind of store."""
    assert Plan(workers=2, sync=Sync(algorithm=training_worker.STORE)).exact
    sync = Sync(algorithm=training_worker.STORE, options={"kind": "dist_async"})
    assert not Plan(workers=2, sync=sync).exact
