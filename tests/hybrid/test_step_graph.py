"""Steps that run as one program: which batches they take, what they watch, and that they are checked."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from step_pairs import STEP_GRAPH, Pair, batch_of, loss_fn, make, pair_of, sgd
from torch import Tensor, nn

from ridgeline.errors import CaptureError, PlanError
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step import runner
from ridgeline.runtime.steps.whole_step.runner import (
    EAGER_STEPS,
    MOST_RECOMPILES,
    ONE_FRAME,
    OTHER_SHAPES,
    StepGraphRunner,
)
from ridgeline.runtime.steps.whole_step.saved import saving
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.workers.world import World


@pytest.fixture
def pair(interpreted: None) -> Iterator[Pair]:
    with pair_of() as made:
        yield made


def test_a_shorter_batch_runs_eagerly_and_is_counted(pair: Pair) -> None:
    """The last batch of an epoch trains as it would eagerly; the notes say so; the next one goes on."""
    for index, size in enumerate((8, 8, 8, 5, 8)):
        pair.run(index, size)
    assert pair.counters()["eager_steps"] == 1
    assert OTHER_SHAPES in pair.program.notes
    assert ONE_FRAME in pair.program.notes
    assert any("equals the eager step within" in note for note in pair.program.notes)


def test_a_shorter_batch_that_comes_again_gets_a_program(pair: Pair) -> None:
    """A second shape is compiled, a third runs eagerly."""
    for index, size in enumerate((8, 8, 5, 5, 5, 4, 4, 8)):
        pair.run(index, size)
    assert pair.counters()["shapes"] == 2
    assert pair.counters()["eager_steps"] == 3


def test_any_other_batch_runs_eagerly(pair: Pair) -> None:
    """More samples, a further tensor, a number beside the tensors: counted and noted."""
    for index in range(3):
        pair.run(index)
    x, y = batch_of(0).values()
    others = (batch_of(0, 9), {"x": x, "y": y, "more": x}, {"x": x, "y": y, "number": 3})
    for other in others:
        losses = []
        for step in pair:
            torch.manual_seed(0)
            losses.append(step(other))
        torch.testing.assert_close(*losses)
    assert pair.counters()["eager_steps"] == len(others)
    assert OTHER_SHAPES in pair.program.notes


def test_a_setting_that_changes_compiles_again(pair: Pair) -> None:
    """Weight decay is a constant of the program: changed, noted, counted, and equal to eager; lr is not."""
    for index in range(8):
        pair.run(index)
        if index == 3:
            pair.both(lambda step: step.optimizer.param_groups[0].update(lr=0.2))
        if index == 5:
            pair.both(lambda step: step.optimizer.param_groups[0].update(weight_decay=0.5))
    assert pair.counters()["recaptures"] == 1
    assert "compiled again because the optimizer's weight_decay changed" in pair.program.notes


def test_flags_and_frozen_parameters_compile_again(pair: Pair) -> None:
    """Evaluation mode of one module, and a parameter frozen, are seen by the next step."""
    for index in range(7):
        pair.run(index)
        if index == 2:
            pair.both(lambda step: step.model[1].eval())
        if index == 4:
            pair.both(lambda step: step.model[4].requires_grad_(requires_grad=False))
    assert "compiled again because a training flag changed" in pair.program.notes
    assert "compiled again because parameters were frozen or released" in pair.program.notes


def test_a_setting_that_changes_all_the_time_runs_eagerly(pair: Pair) -> None:
    """A schedule of momentum would compile before every step: after some it is left to the eager step."""
    for index in range(2 * MOST_RECOMPILES + 5):
        pair.run(index)
        pair.both(
            lambda step, m=0.9 - index / 50: step.optimizer.param_groups[0].update(momentum=m)
        )
    assert pair.counters()["recaptures"] == MOST_RECOMPILES
    assert pair.counters()["eager_steps"] >= 2
    note = f"steps ran eagerly after {MOST_RECOMPILES} compilations, since settings keep changing"
    assert any(text.startswith(note) for text in pair.program.notes)


def test_loaded_checkpoints_are_taken_over(pair: Pair) -> None:
    """Model and optimizer state loaded between steps is what the next step trains on."""
    for index in range(4):
        pair.run(index)
        if index == 1:
            saved = [
                (s.model.state_dict(), s.optimizer.state_dict())
                for s in pair
            ]  # fmt: skip
            saved = torch.utils._pytree.tree_map_only(Tensor, torch.clone, saved)
    for step, (model, optimizer) in zip(pair, saved, strict=True):
        step.model.load_state_dict(model)
        step.optimizer.load_state_dict(optimizer)
    for index in range(4, 7):
        pair.run(index)
    assert "recaptures" not in pair.counters()


@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support will be removed from itertools"
)
def test_a_counter_is_refused_by_name(interpreted: None) -> None:
    """A program would count no further, and train differently; the step goes on from where it was."""
    calls = itertools.count(1)

    def counting(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1.0 + next(calls))

    model = make()
    with PlannedStep(model, counting, sgd(model), STEP_GRAPH, device="cpu") as step:
        for index in range(EAGER_STEPS):
            step(batch_of(index))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(  # torch 2.11 cannot read it at all
            CaptureError,
            match=r"got one that changes .* \(a count\), which one program|`__next__` of class `count`",
        ):
            step(batch_of(EAGER_STEPS))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_torch_raises_in_the_first_run_is_a_refusal() -> None:
    """Of whatever type: it names the mode to use, leaves no trace, and the step goes on."""

    def fail(_: list[Tensor]) -> Any:
        raise TypeError("expected Tensor()\nand much more")

    model = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compile_graph", lambda *_: fail)
        with PlannedStep(model, loss_fn, sgd(model), STEP_GRAPH, device="cpu") as step:
            for index in range(EAGER_STEPS):
                step(batch_of(index))
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(CaptureError) as caught:
                step(batch_of(EAGER_STEPS))
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            step(batch_of(EAGER_STEPS))
    assert isinstance(caught.value.__cause__, TypeError)
    assert str(caught.value) == (
        "wanted the step's program run, got TypeError: expected Tensor(); use another mode of execution, "
        "such as execution='eager'"
    )


def test_several_workers_are_refused() -> None:
    """One program has no place for the synchronisation of gradients; the message says what has."""
    model = make()
    device = torch.device("cpu")
    body = StepBody(model, loss_fn, sgd(model), STEP_GRAPH, None, clip_norm=None, device=device)
    world = World(rank=0, size=2, local_rank=0, device=device)
    with pytest.raises(PlanError) as caught:
        StepGraphRunner(body, Recorder(HostClock()), world, [], packaged=False)
    assert str(caught.value) == (
        "wanted a single worker for execution='step-graph', got workers=2; its one program has no room for "
        "the synchronisation of gradients: use 'compiled+graph' or 'regional+graph' there"
    )


class Encoding(nn.Module):
    """A layer of attention that drops out its transposed result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(6, 1, 8, dropout=0.0, batch_first=True)
        self.layer.dropout1.p = 0.5
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.stack((x, x.flip(1)), 1)).mean(1))


@pytest.mark.usefixtures("compiled_in_this_process")
def test_compiled_dropout_of_a_transposed_tensor_draws_the_eager_mask() -> None:
    """The mask is filled in the order of memory, whatever layout the compiler prefers."""
    with pair_of(Encoding) as pair:
        pair.train(4, {})
        assert pair.counters()["shapes"] == 1


class Dropping(nn.Module):
    """Normalisation, activation and dropout, twice: the compiler joins them around the drawing of the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip((self.first, self.second), self.norms, strict=True):
            x = nn.functional.dropout(nn.functional.gelu(norm(layer(x))).tanh(), 0.1)
        return x


@pytest.mark.usefixtures("compiled_in_this_process")
def test_compiled_masks_are_drawn_before_they_are_read() -> None:
    """They were read first, from memory that nobody had written."""
    with pair_of(Dropping) as pair:
        pair.train(4, {})
        assert pair.counters()["shapes"] == 1


@pytest.mark.usefixtures("compiled_in_this_process")
def test_compiled_steps_equal_eager_ones() -> None:
    """Compiled: two dropouts, batch norm, AdamW, clipping, micro-batches and a scheduler, step by step.

    The scheduler, which is made between steps of the program, does not warn that none came before its own.
    """
    steps = []
    for execution in ("step-graph", "eager"):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        plan = Plan(execution=execution, accumulate=2)
        steps.append(PlannedStep(model, loss_fn, optimizer, plan, clip_norm=0.5, device="cpu"))
    pair = Pair(*steps)
    schedulers: list[Any] = []
    for index in range(6):
        pair.run(index)
        for scheduler in schedulers:
            scheduler.step()
        if index == 2:
            schedulers = [
                torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, 3) for step in pair
            ]
    for mine, theirs in zip(*(step.model.state_dict().values() for step in pair), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert pair.counters()["compile_s"] > 0
    pair.both(lambda step: step.close())


def test_batches_are_recognised_by_structure_shape_type_and_constants() -> None:
    """The tensors of a batch like the example come in its order; any other gives None."""
    x, y = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    pattern = BatchPattern({"a": (x, [y]), "b": "word"})
    assert pattern.tensors({"a": (x, [y]), "b": "word"}) == [x, y]
    for other in (
        {"b": "word", "a": (x, [y])},  # code may go through the keys
        {"a": (x, [y]), "b": "other"},
        {"a": (x, (y,)), "b": "word"},
        {"a": (x[:1], [y]), "b": "word"},
        {"a": (x.double(), [y]), "b": "word"},
        {"a": (x, [y])},
        {"a": (x, [y]), "c": "word"},
        (x, y),
    ):
        assert pattern.tensors(other) is None


class Named(NamedTuple):
    x: Tensor
    y: Tensor


def test_named_tuples_are_recognised() -> None:
    """What pytree flattens is compared by its structure."""
    pattern = BatchPattern(Named(torch.ones(2), torch.zeros(3)))
    assert pattern.tensors(Named(torch.ones(2), torch.zeros(3))) is not None
    assert pattern.tensors((torch.ones(2), torch.zeros(3))) is None


def test_a_step_is_saved_for_the_batch_that_was_given(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is a program for batches of the usual shape, which would refuse it."""
    saved: list[int] = []

    def save(path: Path, program: Any, **_: Any) -> Path:
        saved.append(program.inputs[0].shape[0])
        return path

    monkeypatch.setattr(runner, "save_step", save)
    monkeypatch.setattr(saving, "save_step", save)
    for index in range(3):
        pair.run(index)
    for size in (8, 5):
        pair.program.save(tmp_path / "step.pt2", batch_of(0, size))
    assert saved == [8, 5]


def test_a_file_that_cannot_be_loaded_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled ahead of time does not stay behind where the step cannot run it."""
    closed: list[bool] = []

    class Unloadable:
        def load(self) -> Any:
            raise CaptureError("wanted a program, got one that does not load")

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(runner, "compile_file", lambda program: Unloadable())
    model = make()
    with PlannedStep(model, loss_fn, sgd(model), Plan(execution="packaged"), device="cpu") as step:
        step(batch_of(0))
        with pytest.raises(CaptureError, match="one that does not load"):
            step(batch_of(1))
        assert closed == [True]
