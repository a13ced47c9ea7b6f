"""Guards notice whatever decides what a program computes, and nothing else."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import guarded_programs as programs
import numpy
import pytest
import torch
from guarded_programs import CHANGES, OFFSETS, REMOVED, Base, Derived, Part, Plain
from torch import Tensor, nn
from torch._dynamo.eval_frame import TorchPatcher
from torch.distributions import Distribution, Normal

from adversary.interpreting import interpreted
from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.hybridize import hybridize
from ridgeline.capture.unchecked import NOTE
from ridgeline.errors import CaptureError
from ridgeline.guards import guards
from ridgeline.guards.reading import ProgramReading, UnreadableError
from ridgeline.guards.settled import WritingError
from ridgeline.plan import Execution

CLASSES = (Base, Derived, Part, Plain, nn.Linear)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Classes, globals and settings of the process are put back."""
    kept = [(kind, name, value) for kind in CLASSES for name, value in [*vars(kind).items()]]
    functions = [value for _, _, value in kept if inspect.isfunction(value)]
    functions.append(Part.of_nobody)
    details = [(function, function.__defaults__, function.__code__) for function in functions]
    factor, offsets = programs.FACTOR, dict(OFFSETS)
    yield
    for kind in CLASSES:
        for name in [*vars(kind)]:
            if not any(kind is other and name == known for other, known, _ in kept):
                delattr(kind, name)
    for kind, name, value in kept:
        if vars(kind)[name] is not value:
            setattr(kind, name, value)
    for function, defaults, code in details:
        function.__defaults__, function.__code__ = defaults, code
    programs.FACTOR = factor
    OFFSETS.update(offsets)
    torch.set_default_dtype(torch.float32)
    for handle in REMOVED:
        handle.remove()
    REMOVED.clear()


def made() -> Derived:
    torch.manual_seed(0)
    return Derived()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_noticed(change: Callable[[Base], Any]) -> None:
    """Guards fail after it, not before; those that are made then hold, and say what had changed."""
    model, x = made(), torch.randn(2, 4)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds({"fn": model, "args": (torch.randn(2, 4),)})
        change(model)
        arguments = {"fn": model, "args": (x,)}
        assert not guards.holds(arguments)
        assert guards.difference(arguments)
        assert CallReads(model, (x,)).guards.holds(arguments)


@pytest.mark.parametrize(
    "name",
    [
        *("inherited forward", "negative zero", "transposed in place"),
        *("method of an object", "method of tensors in a list"),
    ],
)
@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_results_follow_the_changes(mode: Execution, name: str) -> None:
    """What a captured program gives is what the model gives, before and after."""
    model, x = made(), torch.randn(2, 4)
    with hybridize(model, x, mode) as hybrid:
        for _ in range(2):
            torch.testing.assert_close(hybrid(x), model(x).detach())
            CHANGES[name](model)
        torch.testing.assert_close(hybrid(x), model(x).detach())


@pytest.mark.parametrize("name", CHANGES)
def test_parallelized_functions_follow_the_changes(name: str) -> None:
    """Another program runs as it was written, forward and backward."""
    model, x = made(), torch.randn(2, 4)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().sum() + model.linear.bias.sum()
        return torch.autograd.grad(loss, model.linear.bias)[0]

    with parallelize(train, x, mode="serial") as parallel:
        torch.testing.assert_close(parallel(x), train(x))
        assert parallel.report.counters == {}
        CHANGES[name](model)
        torch.testing.assert_close(parallel(x), train(x))
        assert parallel.report.counters == {"changed": 1}


def test_another_program_in_other_modes_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that asks whether gradients are recorded runs as it was written where they are not."""

    def fn(x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3

    x, readings = torch.randn(2, 4), []
    read = guards.read_program
    monkeypatch.setattr(guards, "read_program", lambda *a: (readings.append(1), read(*a))[1])
    with parallelize(fn, x, mode="serial") as parallel:
        assert len(readings) == 1
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(parallel(x), x * 3)
            torch.testing.assert_close(parallel(x), x * 2)
        assert parallel.report.counters == {"changed": 3}
    assert len(readings) == 2


def test_parallelized_functions_serve_other_modes_and_refuse_what_writes() -> None:
    """Read once more under no_grad; what appends to a list is refused before it has run."""
    model, x, seen = made(), torch.randn(2, 4), []

    def log(x: Tensor) -> Tensor:
        seen.append(1)
        return x + 1

    with parallelize(lambda x: model(x).detach(), x, mode="serial") as parallel:
        with torch.no_grad():
            torch.testing.assert_close(parallel(x), model(x))
        assert parallel.report.counters == {}
    with pytest.raises(CaptureError, match=r"got one that writes seen \(a list\)"):
        parallelize(log, x, mode="serial")
    assert seen == []


def test_a_call_that_fills_caches_is_not_made() -> None:
    """Reading names what it fills; caches, running statistics and random numbers are left to that call."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = nn.BatchNorm1d(4), None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.full((4,), 2.0)
            return self.norm(x) * self.scale

    model, x = Cached(), torch.randn(8, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WritingError, match=r"got one that writes Cached\.scale \(a Cached\)"):
        CallReads(model, (x,))
    assert model.scale is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(x)
    assert CallReads(model, (x,)).tensors


@interpreted()
def test_modes_of_the_caller_count() -> None:
    """Autocast with its dtype, inference mode and deterministic algorithms; not whether gradients are on."""
    model, x = made(), torch.randn(2, 4)
    with hybridize(model, x, "compiled", max_shapes=5) as hybrid:
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert hybrid(x).dtype == model(x).dtype
                torch.testing.assert_close(hybrid(x), model(x).detach(), rtol=0.05, atol=0.05)
        with torch.inference_mode():
            torch.testing.assert_close(hybrid(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(hybrid(x), model(x))
        assert hybrid.report.counters["shapes"] == 4


def test_layouts_of_arguments_count_where_they_decide() -> None:
    """A model that asks for the layout has two programs, another one for both."""
    model, wide = made(), torch.randn(4, 8)
    with hybridize(model, torch.randn(2, 4), "compiled") as hybrid:
        for x in (wide[:2, :4], wide[:2, ::2], torch.randn(2, 4), torch.randn(1, 4).expand(2, 4)):
            torch.testing.assert_close(hybrid(x), model(x).detach())
        assert hybrid.report.counters["shapes"] == 2
        assert hybrid.report.counters["eager_calls"] == 0
    linear = nn.Linear(4, 4)
    with hybridize(linear, wide[:1, :4].expand(2, 4), "compiled") as hybrid:
        for x in (wide[:2, :4], wide[:2, ::2], torch.randn(2, 4)):
            torch.testing.assert_close(hybrid(x), linear(x).detach())
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 1, "rebuilds": 0}


class Averaging(nn.Module):
    """Assigns a buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean() * 0.1
        return x - self.mean


def test_what_a_captured_program_would_not_write_is_refused_by_name() -> None:
    """Buffers that are assigned, lists, closures and attributes; the callable is left as it was."""
    seen: list[float] = []
    count = 0

    def appending(x: Tensor) -> Tensor:
        seen.append(1.0)
        return x

    def counting(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    model = Averaging()
    cases = ((model, "Averaging"), (appending, "seen (a list)"), (counting, "count"))
    for fn, name in cases:
        with pytest.raises(CaptureError) as caught:
            hybridize(fn, torch.randn(3), "script")
        assert name in str(caught.value)
        assert "which a captured program would never do again" in str(caught.value)
    assert (seen, count, float(model.mean)) == ([], 0, 0.0)


def test_elements_of_arrays_are_compared() -> None:
    """NumPy's arrays are read as constants, unless they are too large for that."""
    arrays = {"small": numpy.ones(4), "large": numpy.ones(4096)}
    x, name = torch.ones(4, dtype=torch.float64), "small"
    fn = lambda x: x * float(arrays[name].sum())  # noqa: E731 - a closure is the subject
    with torch.no_grad():
        guards = CallReads(fn, (x,)).guards
        assert guards.holds({"fn": fn, "args": (x,)})
        arrays["small"][0] = 3.0
        assert not guards.holds({"fn": fn, "args": (x,)})
        name = "large"
        with pytest.raises(UnreadableError, match="at most 4096 bytes"):
            CallReads(fn, (x,))


def test_equal_tensors_outside_of_modules_are_no_constants_of_torchscript() -> None:
    """It would make one of them, which follows only one of the two."""
    pair = [torch.ones(4), torch.ones(4)]
    fn = lambda x, *_: x * pair[0] + pair[1]  # noqa: E731 - a closure is the subject
    with pytest.raises(CaptureError, match="2 tensors from outside of its modules would be const"):
        hybridize(fn, torch.ones(4), "script")


def test_a_global_that_may_be_missing_cannot_be_read() -> None:
    """Nobody could say when it is there."""

    def fn(x: Tensor) -> Tensor:
        try:
            return x * ABSENT  # type: ignore[name-defined]
        except NameError:
            return x

    with pytest.raises(
        UnreadableError, match=r"failed to find name .* \(test_guards.py:\d+ in fn\)"
    ):
        hybridize(fn, torch.ones(2), "script")


def test_a_copy_of_a_model_has_guards_of_its_own() -> None:
    """What one model was captured around says nothing about another, however equal."""
    model, x = made(), torch.randn(2, 4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert not guards.holds({"fn": twin, "args": (x,)})


LOG = logging.getLogger(__name__)


class Deep(nn.Module):
    """Everyday code that torch's compiler reads only when it is told to: a recurrent layer, and a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)
        self.state = Holder()

    def forward(self, x: Tensor) -> Tensor:
        self.state.value = 1  # put back below, so nothing has changed
        LOG.debug("one more step")
        out = self.head(self.lstm(x[:, None])[0][:, -1])
        self.state.value = None
        return out


class Holder:
    """Holds something for the time of a call."""

    def __init__(self) -> None:
        self.value: int | None = None


def test_recurrent_layers_loggers_and_what_is_put_back_can_be_read() -> None:
    """None of them is a change that a captured program would lose."""
    model, x = Deep(), torch.randn(2, 6)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds({"fn": model, "args": (x,)})
        model.lstm.batch_first = False
        assert not guards.holds({"fn": model, "args": (x,)})


def test_bound_methods_are_the_same_method_whenever_they_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11 compares `__iter__` of a Sequential; each look at it makes an object anew."""
    read = guards.read_program

    def read_with_a_method(*args: Any) -> ProgramReading:
        reading = read(*args)
        return reading._replace(expressions=(*reading.expressions, "L['fn'].forward"))

    monkeypatch.setattr(guards, "read_program", read_with_a_method)
    model = nn.Sequential(nn.Linear(4, 4))
    found = CallReads(model, (torch.randn(2, 4),)).guards
    other = {"fn": model, "args": (torch.randn(3, 4),)}
    assert not found.holds(other)
    assert found.could_hold(other)
    model.forward = nn.Linear(4, 4).forward
    assert not found.could_hold(other)


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.layer(x).chunk(2, 1)
        return Normal(mean, nn.functional.softplus(scale)).log_prob(mean + 1)


@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_distributions_are_captured_without_their_checks(mode: Execution) -> None:
    """Which are on for the process afterwards, and whoever asks for them by hand is refused."""
    Distribution.set_default_validate_args(True)
    TorchPatcher.patch.cache_clear()  # as if the compiler were used for the first time
    model, x = Likelihood(), torch.randn(2, 4)
    with hybridize(model, x, mode) as hybrid, torch.no_grad():
        for shift in (0.0, 0.5):
            torch.testing.assert_close(hybrid(x + shift), model(x + shift))
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 1, "rebuilds": 0}
        assert NOTE in hybrid.report.notes
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Normal(0.0, -1.0)


@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_modes_of_the_caller_that_end_are_no_change_of_the_program(mode: Execution) -> None:
    """A default device of the caller's is another setting, which may come back."""
    model, x = Likelihood(), torch.randn(2, 4)
    with torch.device("cpu"):
        hybrid = hybridize(model, x, mode)
    with hybrid, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(hybrid(x), model(x))
            with torch.device("cpu"):
                torch.testing.assert_close(hybrid(x), model(x))
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 2, "rebuilds": 0}
