"""What a replayed step costs the host where nothing is another, and that it still sees whatever is."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from emulated_graphs import Graph, emulated_graphs
from ridgeline.errors import PlanError
from ridgeline.plan import Execution, Plan
from ridgeline.reach.replaced_code import replacements
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.body.capture_watch import MOST_COMPILED, CaptureWatch
from ridgeline.session import TrainStep
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.copies import common_type, copier, copier_as
from ridgeline.tensors.sameness import Sameness
from ridgeline.tensors.usual_batch import usual_batch

MOST_CALLS = 26
"""Python functions that a steady step calls, from the user's call on. There were 83. Two of them ask whether somebody keeps
a gradient that the replay writes over, one ends the record of the step."""

objects = [object() for _ in range(4)]
kept = st.sampled_from(objects)
stores = st.lists(st.dictionaries(st.sampled_from("abc"), kept), min_size=1, max_size=4)


@given(stores, st.integers(0, 3), st.sampled_from("abcd"), st.sampled_from([*objects, None]))
def test_sameness_is_that_of_each_entry_in_order(
    stores: list[dict[str, object]], place: int, key: str, value: object
) -> None:
    """An entry that is put, taken or replaced is seen, and the same one put again is none."""
    same = Sameness()
    for store in stores:
        same.entries(store)
    is_same = same.compiled()
    assert is_same()
    store = stores[place % len(stores)]
    before = [*store.values()]
    store.pop(key, None) if value is None else store.update({key: value})
    after = [*store.values()]
    assert is_same() == (
        len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
    )


def test_sameness_of_attributes_lists_and_single_entries() -> None:
    number = 1.5
    owner, store, values = SimpleNamespace(a=number, b=None), OrderedDict(x=1), [1, 2]
    same = Sameness()
    same.attribute(owner, "a")
    same.attribute(owner, "b")
    same.entry(store, "x")
    same.entry(store, "y")
    same.entries(values)
    is_same = same.compiled()
    assert is_same()
    for change, undo in (
        (lambda: setattr(owner, "a", float("1.5")), lambda: setattr(owner, "a", number)),
        (lambda: setattr(owner, "b", 0), lambda: setattr(owner, "b", None)),
        (lambda: delattr(owner, "b"), lambda: setattr(owner, "b", None)),
        (lambda: store.update(y=None), lambda: store.pop("y")),
        (lambda: store.pop("x"), lambda: store.update(x=1)),
        (values.clear, lambda: values.extend((1, 2))),
        (values.reverse, values.reverse),
    ):
        change()
        assert not is_same()
        undo()
        assert is_same()


shapes = st.sampled_from([(4, 6), (6, 4), (4, 1), (24,), ()])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    made = torch.zeros(draw(shapes), dtype=draw(dtypes))
    if draw(st.booleans()) and made.dim() == 2:
        made = made.t().contiguous().t()
    if draw(st.booleans()) and made.is_floating_point():
        made = draw(
            st.sampled_from([made.requires_grad_(), nn.Parameter(made, requires_grad=False)])
        )
    return made


batches = st.recursive(
    tensors() | st.sampled_from([None, 3, "word"]),
    lambda part: (
        st.lists(part, max_size=2)
        | st.tuples(part)
        | st.tuples(part, part)
        | st.dictionaries(st.sampled_from("ab"), part, max_size=2)
    ),
    max_leaves=4,
)


def described(batch: Any) -> Any:
    """All that decides which program a batch is for, and how it lies in memory."""
    if isinstance(batch, Tensor):
        return type(batch), batch.shape, batch.stride(), batch.dtype, batch.requires_grad
    if isinstance(batch, dict):
        return dict, [(key, described(value)) for key, value in batch.items()]  # in their order
    return type(batch)(map(described, batch)) if isinstance(batch, (list, tuple)) else batch


@given(batches, batches)
def test_usual_batches_are_described_alike(example: Any, other: Any) -> None:
    """And give their tensors in the order in which those of the example were named."""
    found = BatchPattern(example).tensors(example)
    read = usual_batch(example, found or [])
    if read is None:
        assert not found
        return
    assert read(example) is not None
    assert all(a is b for a, b in zip(read(example) or (), found or (), strict=True))
    taken = read(other)
    assert (taken is not None) == (described(other) == described(example))


def test_a_batch_with_one_tensor_twice_is_no_usual_one() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert usual_batch((x, x), [x, x]) is None
    read = usual_batch((x, y), [x, y])
    assert read is not None
    assert read((y, x)) is not None
    assert read((x, x)) is None


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def looking_loss(model: nn.Module, batch: Any) -> Tensor:
    """One that depends on an attribute that is missing, as the code of libraries does."""
    try:
        scale = model.scale
    except AttributeError:
        scale = 1.0
    return loss_fn(model, batch) * scale


BATCH = torch.randn(8, 4), torch.randint(2, (8,))


def watch_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, inside: bool) -> CaptureWatch:
    body = StepBody(
        model, loss_fn, optimizer, Plan(), None, clip_norm=None, device=torch.device("cpu")
    )
    loss_fn(model, BATCH).backward()
    optimizer.step()
    watch = CaptureWatch(body, has_optimizer=inside)
    assert watch.changed() is None
    return watch


Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]
CHANGES: tuple[Change, ...] = (
    lambda m, o: m.append(nn.ReLU()),
    lambda m, o: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    lambda m, o: m[1].eval(),
    lambda m, o: m[0].bias.requires_grad_(False),
    lambda m, o: m[1].register_forward_hook(lambda *_: None),
    lambda m, o: m[1].register_full_backward_hook(lambda *_: None),
    lambda m, o: m[0].weight.register_hook(lambda g: g),
    lambda m, o: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    lambda m, o: o.register_step_pre_hook(lambda *_: None),
    lambda m, o: setattr(o, "step", lambda: None),
    lambda m, o: o.param_groups[0]["params"].pop(),
    lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    lambda m, o: m._modules.update({"0": m._modules.pop("0")}),
)
INSIDE: tuple[Change, ...] = (
    lambda m, o: o.load_state_dict(o.state_dict()),
    lambda m, o: o.state.clear(),
    lambda m, o: o.state[m[0].weight].update(step=torch.zeros(())),
    lambda m, o: o.param_groups[0].update(weight_decay=0.1),
    lambda m, o: o.param_groups[0].update(lr=0.1),
)


@pytest.mark.parametrize(
    ("change", "inside"), [(c, i) for i in (True, False) for c in (CHANGES + INSIDE * i)]
)
def test_what_changed_does_not_hold(change: Change, inside: bool) -> None:
    """Whatever a look at everything finds, the compiled function does not pass over."""
    model, optimizer = make()
    watch = watch_of(model, optimizer, inside=inside)
    assert not watch.holds()  # nobody has settled it yet
    watch.settle()
    assert watch.holds()
    change(model, optimizer)
    assert not watch.holds()


def test_equal_objects_hold_once_they_were_looked_at_and_not_for_ever() -> None:
    """A setting that is put anew in each step would have a function compiled in each."""
    model, optimizer = make()
    watch = watch_of(model, optimizer, inside=True)
    held = []
    for number in range(2 * MOST_COMPILED):
        optimizer.param_groups[0]["eps"] = float(f"1e-{8 + number - number}")
        assert watch.changed() is None
        if not watch.holds():
            watch.settle()
        held.append(watch.holds())
    assert held == [True] * MOST_COMPILED + [False] * MOST_COMPILED


def test_code_that_is_put_into_functions_is_counted() -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 2

    counted = replacements()
    before = counted.count
    one.__name__ = "other"
    assert counted.count == before
    one.__code__ = two.__code__
    assert counted.count == before + 1


@pytest.fixture
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


def steady(
    execution: Execution, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = loss_fn
) -> TrainStep:
    step = TrainStep(model, loss, optimizer, Plan(execution=execution), device="cpu")
    for _ in range(8):
        step(BATCH)
    return step


def calls_of(act: Callable[[], object]) -> list[str]:
    """The Python functions that are called, but for those of the emulation."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "emulated_graphs" not in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("loss", "more"), [(loss_fn, 0), (looking_loss, 3)])
def test_a_steady_step_makes_few_calls(
    loss: Any, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many for a model of any depth, since what depends on its size is one function."""
    counts = []
    for depth in (0, 20):
        model, optimizer = make()
        model.extend([nn.Linear(2, 2) for _ in range(depth)])
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        with steady("graph", model, optimizer, loss) as step, monkeypatch.context() as patch:
            patch.setattr(Graph, "replay", lambda self: None)
            found = calls_of(lambda step=step: step(BATCH))  # type: ignore[misc]
            counts.append(len(found))
            assert len(found) <= MOST_CALLS + more, found
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("memory_format", ["as-is", "channels_last"])
def test_batches_that_lie_as_usual_are_brought_nowhere(
    memory_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are, and train as the same batches do in an eager step of the plan."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 6, 6), torch.randint(2, (4,))
    last = images[0].to(memory_format=torch.channels_last), images[1]
    usual, other = (images, last) if memory_format == "as-is" else (last, images)
    brought: list[Any] = []
    right = StepBody.placed

    def placed(body: StepBody, batch: Any) -> Any:
        brought.append(batch)
        return right(body, batch)

    losses: dict[Execution, list[float]] = {}
    executions: tuple[Execution, ...] = ("eager", "graph")
    for execution in executions:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        plan = Plan(execution=execution, memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with TrainStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            losses[execution] = [float(step(usual)) for _ in range(8)]
            with monkeypatch.context() as patch:
                patch.setattr(StepBody, "placed", placed)
                brought.clear()
                losses[execution] += [float(step(usual)) for _ in range(3)]
                assert bool(brought) is (execution == "eager")
                losses[execution] += [float(step(batch)) for batch in (other, usual)]
                assert any(batch is other for batch in brought)
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-5)


@pytest.mark.usefixtures("graphs")
def test_batches_copied_as_one_type_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; batches that lie otherwise are copied as those do."""
    kinds: list[torch.dtype | None] = []

    def as_on_a_gpu(targets: Any, examples: Any = ()) -> Callable[[Any], object]:
        if not examples:
            return copier(targets)
        kinds.append(kind := common_type([*targets, *examples]))
        return copier(targets) if kind is None else copier_as(kind, targets)

    monkeypatch.setattr("ridgeline.runtime.steps.graphs.captured_step.copier", as_on_a_gpu)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(8, 4, generator=generator) for _ in range(10)]
    labels = [torch.randint(2, (8,), generator=generator) for _ in data]
    labels[8] = torch.stack([labels[8]] * 2, 1)[:, 0]  # strided
    losses: dict[Execution, list[float]] = {}
    executions: tuple[Execution, ...] = ("eager", "graph")
    for execution in executions:
        model, optimizer = make()
        with TrainStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step:
            losses[execution] = [float(step(batch)) for batch in zip(data, labels, strict=True)]
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-5)
    assert kinds == [torch.float32, None, torch.float32]


@pytest.mark.usefixtures("graphs")
def test_code_replaced_after_steady_steps_is_captured_again() -> None:
    """Also where other functions had got other code in between."""

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * x

    def other(self: nn.Module, x: Tensor) -> Tensor:
        return 3.0 * x

    model, _ = make()
    model.append(Doubled())
    with steady("graph", model, torch.optim.Adam(model.parameters(), 0.0)) as step:
        before = float(step(BATCH))
        make.__code__ = make.__code__.replace()
        assert float(step(BATCH)) == before
        assert "captured again" not in str(step.notes)
        Doubled.forward.__code__ = other.__code__
        wanted = float(loss_fn(model, BATCH).detach())
        assert wanted != before
        assert float(step(BATCH)) == pytest.approx(wanted, rel=1e-5)


def test_a_closed_step_says_so_after_steady_steps() -> None:
    model, optimizer = make()
    step = TrainStep(model, loss_fn, optimizer, Plan(), device="cpu")
    step(BATCH)
    step.close()
    with pytest.raises(PlanError, match="closed"):
        step(BATCH)
