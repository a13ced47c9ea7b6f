"""The training loop: parity with the plain loop, resuming, and stopping on bad losses."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import loop_tasks
import msgspec
import pytest
import torch
from loop_tasks import Ask, Told
from torch import nn

from ridgeline.errors import PlanError, TaskError
from ridgeline.history import History
from ridgeline.plan import Plan
from ridgeline.probe.groups.group import run_in_group
from ridgeline.recording.progress import Progress
from ridgeline.runtime.checkpoints import checkpoint, checkpoint_directory
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


WHOLE = Ask(run_dir="whole", epochs=3)
BROKEN = Ask(run_dir="broken", epochs=3, checkpoint_every=4, stop_at=11)
RESUMED = msgspec.structs.replace(BROKEN, stop_at=None, resume=True)
BAD = Ask(run_dir="bad", epochs=2, bad_sample=17, checkpoint_every=1)
ODD = Ask(run_dir="odd", epochs=2, odd_state=True, checkpoint_every=2)
ODD_ALONE = msgspec.structs.replace(ODD, run_dir="odd alone", every=4)
UNREADABLE = Ask(run_dir="unreadable", epochs=2, unreadable=True, checkpoint_every=2, every=4)
OBSERVING = Ask(run_dir="observing", epochs=2, observing=True)
SLOW = Ask(run_dir="slow", epochs=2, slow=True, every=4)
SPENT = msgspec.structs.replace(BAD, run_dir="spent", spent=True)


def stopped(ask: Ask, at: int) -> dict[str, Ask]:
    """An undisturbed run, one that is stopped in a step, and the same resumed."""
    name = ask.run_dir
    parts = msgspec.structs.replace(ask, run_dir=f"{name} stopped", checkpoint_every=4)
    return {
        name: ask,
        f"{name} stopped": msgspec.structs.replace(parts, stop_at=at),
        f"{name} resumed": msgspec.structs.replace(parts, resume=True),
    }


def trained(ask: Ask, directory: Path) -> Told:
    """What one worker tells of a run below `directory`."""
    here = msgspec.structs.replace(ask, run_dir=str(directory / ask.run_dir))
    return loop_tasks.run_here(here, ALONE)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What two workers tell of the four runs, made by one group of processes."""
    directory = tmp_path_factory.mktemp("two")
    asks = {"whole": WHOLE, "broken": BROKEN, "resumed": RESUMED, "bad": BAD}
    asks |= {"odd": ODD, "odd alone": ODD_ALONE, "unreadable": UNREADABLE, "spent": SPENT}
    asks |= stopped(OBSERVING, 8) | stopped(SLOW, 11)
    request = msgspec.json.encode(
        [msgspec.structs.replace(a, run_dir=str(directory / a.run_dir)) for a in asks.values()]
    )
    reply = run_in_group("loop_tasks:run", request, workers=2, threads=1, device="cpu")
    return dict(zip(asks, msgspec.json.decode(reply, type=list[Told]), strict=True))


def test_losses_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    """One worker gives bitwise the losses of the loop that anybody would write."""
    task = loop_tasks.task()
    torch.manual_seed(5)
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, 12)
    sampler = Sampler(task.train_data, task.batch_size, ALONE, seed=5)
    plain = []
    for epoch in range(2):
        model.train()
        for batch in sampler.epoch(epoch):
            optimizer.zero_grad()
            loss = task.loss_fn(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            plain.append(loss.item())
    told = trained(Ask(run_dir="run", epochs=2), tmp_path)
    assert told.losses == plain
    model.eval()
    images, labels = task.test_data.tensors
    accuracy = (model(images).argmax(1) == labels).double().mean().item()
    assert told.metrics[-1] == accuracy


def test_resumed_run_has_the_same_losses_bitwise(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch and resumed, every loss is that of the run never stopped."""
    whole = trained(WHOLE, tmp_path)
    assert trained(BROKEN, tmp_path).errors == ["stopped"]
    newest = checkpoint_directory.latest(tmp_path / "broken" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-0000008"
    resumed = trained(RESUMED, tmp_path)
    assert resumed.said == [f"going on from {newest}"]
    assert msgspec.structs.replace(resumed, said=[]) == whole
    assert len(whole.losses) == 18


def test_two_workers_resume_bitwise(of_two: dict[str, Told]) -> None:
    """The same on two workers, each of which has random numbers of its own."""
    assert of_two["broken"].errors == ["stopped"]
    assert msgspec.structs.replace(of_two["resumed"], said=[]) == of_two["whole"]
    assert len(of_two["whole"].losses) == 18


@pytest.mark.parametrize("name", ["observing", "slow"])
def test_what_is_written_beside_steps_is_resumed(of_two: dict[str, Told], name: str) -> None:
    """Buffers that an evaluation writes, and an optimizer that saves itself in a form of its own, apart too."""
    assert of_two[f"{name} stopped"].errors == ["stopped"]
    assert msgspec.structs.replace(of_two[f"{name} resumed"], said=[]) == of_two[name]


def test_an_optimizer_in_a_form_of_its_own_is_resumed(tmp_path: Path) -> None:
    """Where it saves no entries `state` and `param_groups`, as one around another does."""
    whole, _, resumed = (
        trained(ask, tmp_path)
        for ask in stopped(Ask(run_dir="slow", epochs=2, slow=True), 8).values()
    )
    assert len(whole.losses) == 12
    assert msgspec.structs.replace(resumed, said=[]) == whole


def test_workers_draw_their_own_dropout(of_two: dict[str, Told], tmp_path: Path) -> None:
    """Two workers do not lose the same units: the first loss is another than one worker's."""
    assert trained(WHOLE, tmp_path).losses[0] != of_two["whole"].losses[0]


def test_bad_loss_stops_all_workers_with_one_message(of_two: dict[str, Told]) -> None:
    """A NaN on one worker ends all of them alike; the message names step, rank, cause and checkpoint."""
    first, second = of_two["bad"].errors
    assert first == second
    wanted = (
        r"NonFiniteError: wanted finite loss, got NaN or infinity at step \d \(epoch 0\) on rank [01]: "
        r"the batch itself: tensor \[0\] float32\[4, 6\] in \[\S+, \S+\] with 1 of 24 values not "
        r"finite\. Last good checkpoint: \S+; clip the gradients \(clip_norm\) or fix what is named here, and "
        r"continue with --resume, or lower the learning rate, for which a run has to begin anew in another "
        r"directory"
    )
    assert re.fullmatch(wanted, first), first


def test_a_search_that_fails_on_one_worker_ends_all_with_the_loss(of_two: dict[str, Told]) -> None:
    """The bad loss stays the news; what ended the search for its cause stands where the cause would."""
    first, second = of_two["spent"].errors
    assert first == second
    wanted = (
        r"NonFiniteError: wanted finite loss, got NaN or infinity at step \d \(epoch 0\) on rank [01]: "
        r"no cause was found, for the search ended with OutOfMemoryError: tried to allocate 2 GiB\. "
        r"Last good checkpoint: \S+; clip .*"
    )
    assert re.fullmatch(wanted, first), first


@pytest.mark.parametrize(
    ("name", "place"), [("odd", "optimizer"), ("odd alone", "state.optimizer")]
)
def test_a_state_that_is_not_plain_stops_all_workers(
    of_two: dict[str, Told], name: str, place: str
) -> None:
    """Also those that hold nothing of it, or whose state the checkpoint does not take."""
    first, second = of_two[name].errors
    assert first == second
    assert first.startswith(
        "CheckpointError: wanted state of dense or COO tensors, numbers, text, lists and dicts, got object at "
        f"{place}."
    ), first


def test_a_state_that_cannot_be_read_stops_all_workers(of_two: dict[str, Told]) -> None:
    """Who has it raises the error as it is; the others, who would wait for that state, learn of it."""
    first, second = of_two["unreadable"].errors
    assert second == "OSError: the file is gone"
    assert first == (
        "CheckpointError: wanted to save the state of the run, got OSError: the file is gone on rank 1; the "
        "previous checkpoint is untouched: continue with --resume"
    )


def test_bad_state_is_never_saved(tmp_path: Path) -> None:
    """No checkpoint holds a weight that is not finite, even if saving is due right after a bad step."""
    (error,) = trained(BAD, tmp_path).errors
    saved = checkpoint_directory.complete(tmp_path / "bad" / "checkpoints")
    for path in saved:
        _, model, _, _ = checkpoint.read(path)
        assert all(torch.isfinite(tensor).all() for tensor in model.values())
    assert f"Last good checkpoint: {saved[-1] if saved else 'none'};" in error


def test_bad_gradient_is_found_before_saving(tmp_path: Path) -> None:
    """A finite loss with a gradient that is not: the spoilt weights are not saved, the operator is named."""
    ask = Ask(run_dir="slope", epochs=1, bad_gradient=True, checkpoint_every=1)
    (error,) = trained(ask, tmp_path).errors
    assert error.startswith(
        "NonFiniteError: wanted finite parameters, got NaN or infinity at step 1 (epoch 0) on rank 0: with "
        "the initial weights already, operator div in the loss or the outermost module (backward) makes inf"
    ), error
    assert checkpoint_directory.complete(tmp_path / "slope" / "checkpoints") == []


def test_runaway_weights_are_told_from_bad_batches(tmp_path: Path) -> None:
    """When the batch is finite with the last good weights, the message says that the weights ran away."""
    (error,) = trained(Ask(run_dir="fast", epochs=3, lr=1e30), tmp_path).errors
    assert "the same batch is finite, so the weights ran away since then" in error


def test_progress_is_told_at_every_reading(tmp_path: Path) -> None:
    """Progress ends at the last step with the metric of the last epoch."""
    seen: list[Progress] = []
    train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=1, on_progress=seen.append)
    assert seen[-1].step == seen[-1].total_steps == 6
    assert len(seen[-1].metrics) == 1
    assert seen[0].metrics == ()


class Quantised(loop_tasks.Net):
    """Has a table of whole numbers and a layer without inputs among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(3, 0), requires_grad=False)


def test_quantised_and_empty_parameters_are_saved(tmp_path: Path) -> None:
    """They are finite, and no reason to end a run at its first checkpoint; it can be resumed."""
    task = dataclasses.replace(loop_tasks.task(), model=Quantised, scheduler=None)
    train(task, Plan(), ALONE, run_dir=tmp_path, epochs=1)
    again = train(task, Plan(), ALONE, run_dir=tmp_path, epochs=2, resume=True).history
    assert len(again.steps) == 12


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_kept_as_none(tmp_path: Path, value: float) -> None:
    """The files of the run can be read, and the run resumed from its checkpoint."""
    task = dataclasses.replace(
        loop_tasks.task(),
        scheduler=None,
        metric=lambda model, batch: model(batch[0]).sum() * value,
    )
    first = train(task, Plan(), ALONE, run_dir=tmp_path, epochs=1).history
    assert [point.metric for point in first.epochs] == [None]
    assert History.load(first.save(tmp_path / "history.json")) == first
    again = train(task, Plan(), ALONE, run_dir=tmp_path, epochs=2, resume=True).history
    assert [point.metric for point in again.epochs] == [None, None]


def test_resume_refuses_other_arguments(tmp_path: Path) -> None:
    """A checkpoint of another seed is not continued silently."""
    train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=1, seed=1)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"wanted to continue with seed 2, got a checkpoint of seed 1 in ",
    ):
        train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=2, seed=2, resume=True)


def test_finished_run_resumes_to_its_history(tmp_path: Path) -> None:
    """Resuming a run that is complete trains nothing and gives the same history."""
    first = train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=1)
    again = train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=1, resume=True)
    assert again.history == first.history


def test_plan_for_another_world_is_refused(tmp_path: Path) -> None:
    """A plan of two workers does not start on one."""
    with pytest.raises(
        PlanError, match="wanted a world of workers=2 as in the plan, got 1 processes"
    ):
        train(loop_tasks.task(), Plan(workers=2), ALONE, run_dir=tmp_path, epochs=1)


def with_scheduler(make: Any) -> Task:
    made = loop_tasks.task()
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return Task(**{**fields, "scheduler": make})


def one_cycle(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def warm_up(optimizer: Any, steps: int) -> Any:
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize(
    ("make", "named"),
    [(None, "T_max"), (one_cycle, "_schedule_phases, total_steps"), (warm_up, "_schedulers")],
)
def test_a_schedule_is_not_stretched(make: Any, named: str, tmp_path: Path) -> None:
    """A schedule planned for one length does not go on silently in a run of another."""
    task = loop_tasks.task() if make is None else with_scheduler(make)
    train(task, Plan(), ALONE, run_dir=tmp_path, epochs=1)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(task, Plan(), ALONE, run_dir=tmp_path, epochs=3, resume=True)
    assert str(caught.value) == (
        "wanted a run of 6 steps, for which its schedule was planned, got one of 18 "
        f"({named} would differ) in {tmp_path}/checkpoints/step-0000006; continue with the epochs of that run, "
        "or train into another run directory"
    )


def test_a_schedule_without_a_length_goes_on(tmp_path: Path) -> None:
    """Steps of equal factors do not depend on how long the run is."""
    task = with_scheduler(lambda optimizer, steps: torch.optim.lr_scheduler.StepLR(optimizer, 4))
    whole = train(task, Plan(), ALONE, run_dir=tmp_path / "whole", epochs=2).history
    train(task, Plan(), ALONE, run_dir=tmp_path / "parts", epochs=1)
    parts = train(task, Plan(), ALONE, run_dir=tmp_path / "parts", epochs=2, resume=True).history
    assert [point.loss for point in parts.steps] == [point.loss for point in whole.steps]


def test_a_scheduler_does_not_come_or_go(tmp_path: Path) -> None:
    """A task that got a scheduler since, or lost it, is another one."""
    train(loop_tasks.task(), Plan(), ALONE, run_dir=tmp_path, epochs=1)
    with pytest.raises(
        checkpoint.CheckpointError, match="got no scheduler where the run had one in"
    ):
        train(with_scheduler(None), Plan(), ALONE, run_dir=tmp_path, epochs=2, resume=True)


def test_a_scheduler_that_needs_metrics_is_refused(tmp_path: Path) -> None:
    """It is stepped after every training step, when there is none."""
    task = with_scheduler(
        lambda optimizer, _: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    )
    with pytest.raises(
        TaskError, match=r"got ReduceLROnPlateau in task tiny, whose step\(\) needs metrics"
    ):
        train(task, Plan(), ALONE, run_dir=tmp_path, epochs=1)
