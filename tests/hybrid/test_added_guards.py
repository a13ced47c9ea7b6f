"""What the guards of `torch.compile` leave out, and compiled programs are compiled anew for all the same."""

import contextlib
import os
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import guards

from ridgeline.callables.hybridize import hybridize
from ridgeline.guards.reading import read_program
from ridgeline.plan import Plan
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches import comparing
from ridgeline.programs.watches.added import with_guards
from ridgeline.runtime.steps.step import PlannedStep

VARIABLE = "RIDGELINE_TEST_OF_GUARDS"
ERRORS = (ValueError, AttributeError)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The compiler's pool of processes would outlive the tests; neither would the variable be there by itself."""
    from torch._inductor import config

    os.environ.pop(VARIABLE, None)
    Meta.factor = 1.0
    torch._dynamo.reset()  # it keeps what it compiled by code, which all cases share
    with config.patch(compile_threads=1):
        yield
    os.environ.pop(VARIABLE, None)


class Store(MutableMapping[str, float]):
    """A mapping of one's own, as `os.environ` is."""

    def __init__(self) -> None:
        self._data: dict[str, float] = {}

    def __getitem__(self, key: str) -> float:
        try:
            return self._data[key]
        except KeyError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: float) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def _doubled(_: Any, x: Tensor) -> Tensor:
    return x * 2.0


def _tripled(_: Any, x: Tensor) -> Tensor:
    return x * 3.0


def _scaled(box: Any, x: Tensor) -> Tensor:
    return x * box.by


class Meta(type):
    """What a class finds in it is no variable of its own."""

    factor = 1.0


class Made(metaclass=Meta):
    """Finds it there."""


class Held:
    """What programs read."""

    def __init__(self) -> None:
        self.zero: Any = 0.0
        self.zeros: Any = (0.0, 1.0)
        self.tuple = ([1.0],)
        self.named = types.SimpleNamespace(v=({"k": ([1.0],)},))
        self.sets = ({1},)
        self.store = Store()
        self.cache: dict[str, float] = {}
        self.module = nn.Identity()
        self.module.own = types.MethodType(_doubled, self.module)
        self.module.other = types.MethodType(_scaled, types.SimpleNamespace(by=2.0))

    def cached(self, key: str) -> float:
        """What the cache holds under a key, or 1."""
        try:
            return self.cache[key]
        except KeyError:
            return 1.0

    def late_or(self, default: float) -> Any:
        """What is held under a name that it is not held under at first."""
        try:
            return self.late  # type: ignore[attr-defined]
        except AttributeError:
            return default


def _late_or_one(held: Any) -> Any:
    try:
        return held.late
    except:  # noqa: E722 - what is tried
        return 1.0


def _late_by_a_tuple(held: Any) -> Any:
    try:
        return held.late
    except ERRORS:
        return 1.0


def _late_by_a_context(held: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(AttributeError):
        return x * held.late
    return x + 1.0


def _turned(x: Tensor, zero: Any) -> Tensor:
    """Half a turn or the other way, by the sign of a zero."""
    return torch.atan2(torch.ones_like(x) * zero, -x.abs() - 1) + x


Change = Callable[[Held], Any]
CASES: dict[str, tuple[Callable[[Held, Tensor], Tensor], Change]] = {
    "sign of a zero": (lambda h, x: _turned(x, h.zero), lambda h: setattr(h, "zero", -0.0)),
    "sign in a tuple": (
        lambda h, x: _turned(x, h.zeros[0]),
        lambda h: setattr(h, "zeros", (-0.0, 1.0)),
    ),
    "list in a tuple": (
        lambda h, x: x * h.tuple[0][0],
        lambda h: h.tuple[0].append(h.tuple[0].pop() + 1),
    ),
    "nest in a tuple": (
        lambda h, x: x * h.named.v[0]["k"][0][0],
        lambda h: h.named.v[0]["k"][0].__setitem__(0, 3.0),
    ),
    "set in a tuple": (
        lambda h, x: x * (2.0 if 5 in h.sets[0] else 1.0),
        lambda h: h.sets[0].add(5),
    ),
    "key of a mapping": (
        lambda h, x: x * h.store.get("k", 1.0),
        lambda h: h.store.__setitem__("k", 2.0),
    ),
    "key of a cache": (lambda h, x: x * h.cached("k"), lambda h: h.cache.__setitem__("k", 2.0)),
    "another cache": (lambda h, x: x * h.cached("k"), lambda h: setattr(h, "cache", {"k": 2.0})),
    "environment, get": (
        lambda h, x: x * float(os.environ.get(VARIABLE, "1")),
        lambda h: os.environ.__setitem__(VARIABLE, "2"),
    ),
    "environment, in": (
        lambda h, x: x * (2.0 if VARIABLE in os.environ else 1.0),
        lambda h: os.environ.__setitem__(VARIABLE, "2"),
    ),
    "environment, getenv": (
        lambda h, x: x * float(os.getenv(VARIABLE, "1")),
        lambda h: os.environ.__setitem__(VARIABLE, "2"),
    ),
    "vars, get": (lambda h, x: x * vars(h).get("new", 1.0), lambda h: setattr(h, "new", 2.0)),
    "__dict__, in": (
        lambda h, x: x * (2.0 if "new" in h.__dict__ else 1.0),
        lambda h: setattr(h, "new", 2.0),
    ),
    "__dict__, len": (lambda h, x: x * len(h.__dict__), lambda h: setattr(h, "new", 2.0)),
    "error caught": (lambda h, x: x * h.late_or(1.0), lambda h: setattr(h, "late", 2.0)),
    "any error caught": (lambda h, x: x * _late_or_one(h), lambda h: setattr(h, "late", 2.0)),
    "errors of a tuple": (lambda h, x: x * _late_by_a_tuple(h), lambda h: setattr(h, "late", 2.0)),
    "error suppressed": (_late_by_a_context, lambda h: setattr(h, "late", 2.0)),
    "own method of a module": (
        lambda h, x: h.module.own(x),
        lambda h: setattr(h.module, "own", types.MethodType(_tripled, h.module)),
    ),
    "another object's method in a module": (
        lambda h, x: h.module.other(x),
        lambda h: setattr(
            h.module, "other", types.MethodType(_scaled, types.SimpleNamespace(by=3.0))
        ),
    ),
    "variable of a metaclass": (
        lambda h, x: x * Made.factor,
        lambda h: setattr(Meta, "factor", 2.0),
    ),
    "buffer of a module": (
        lambda h, x: x * _late_or_one(h.module),
        lambda h: h.module.register_buffer("late", torch.tensor(2.0)),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def _as_it_is(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    return graph.forward


@cases
def test_a_change_compiles_anew(name: str) -> None:
    """And only a change: the third call is served by what the first one compiled."""
    read, change = CASES[name]
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return _as_it_is(graph, inputs)

    held, x = Held(), torch.randn(3)
    run = torch.compile(lambda x: read(held, x), backend=with_guards(backend))
    with many_variants():  # as every form of ours calls what it has compiled
        assert torch.equal(run(x), read(held, x))
        assert torch.equal(run(x), read(held, x))
        assert len(compiled) == 1
        change(held)
        assert torch.equal(run(x), read(held, x))
        assert len(compiled) == 2


@cases
def test_a_reading_does_not_hold_any_longer(name: str) -> None:
    """So that captured forms are made anew."""
    if name == "__dict__, len" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 reads no len(x.__dict__), and so captures none")
    read, change = CASES[name]
    held, x = Held(), torch.randn(3)

    def program(read: Any, held: Any, x: Any) -> Any:
        return read(held, x)

    arguments = {"read": read, "held": held, "x": x}
    manager = read_program(program, arguments).manager
    assert manager.check(arguments)
    change(held)
    assert not manager.check(arguments)


class Net(nn.Module):
    """Read in pieces: it branches on a value."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = Held()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Something of what is held."""
        x = self.linear(x)
        if float(x.detach().sum()) > 1e9:
            x = x + 1
        return CASES[self.name][0](self.held, x)


ends = pytest.mark.parametrize(
    "name",
    [
        "sign of a zero",
        "list in a tuple",
        "environment, get",
        "error caught",
        "variable of a metaclass",
    ],
)


@ends
def test_calls_in_pieces_follow(name: str) -> None:
    """By itself the compiler would give the results of before."""
    model, x = Net(name), torch.randn(2, 4)
    call = hybridize(model, x, mode="compiled")
    torch.testing.assert_close(call(x), model(x).detach())
    CASES[name][1](model.held)
    torch.testing.assert_close(call(x), model(x).detach())


@ends
def test_steps_follow(name: str) -> None:
    """The loss of a compiled step after a change is that of the step as written."""
    model, x = Net(name), torch.randn(2, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() + model(x).square().mean()

    with PlannedStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), Plan(execution="compiled")
    ) as step:
        step(x)
        step(x)
        CASES[name][1](model.held)
        wanted = float(loss_fn(model, x))
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


class Block(nn.Module):
    """Scales by what it may hold one day."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Its linear layer's, scaled."""
        return self.scaled(self.linear(x))

    def scaled(self, x: Tensor) -> Tensor:
        """Times what it holds late, or as it is."""
        return x * _late_or_one(self)


def test_exchanged_blocks_take_their_methods_along() -> None:
    """The program of the block with a method of its own does not serve the other one in its place."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)
    model[0].scaled = types.MethodType(_tripled, model[0])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with PlannedStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), Plan(execution="regional")
    ) as step:
        for _ in range(3):
            wanted = float(loss_fn(model, x))
            assert float(step(x)) == pytest.approx(wanted, rel=1e-5)
            model[0], model[1] = model[1], model[0]


@pytest.mark.parametrize("is_parameter", [False, True])
def test_equal_blocks_follow_each_its_own(is_parameter: bool) -> None:
    """What one of them gets and loses again does not concern the other."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    late: Any = nn.Parameter(torch.tensor(2.0)) if is_parameter else 2.0
    with PlannedStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), Plan(execution="regional")
    ) as step:
        for change in ("none", "put", "none", "taken"):
            if change == "put":
                model[1].late = late
            elif change == "taken":
                del model[1].late
            wanted = float(loss_fn(model, x))
            assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


def test_says_what_changed() -> None:
    """In the words of `Guards.difference`."""
    held = Held()

    def program(held: Any, x: Any) -> Any:
        return x * held.tuple[0][0]

    arguments = {"held": held, "x": torch.randn(3)}
    manager = read_program(program, arguments).manager
    held.tuple[0][0] = 2.0
    found = manager.check_verbose(arguments)
    assert [str(part) for part in found.verbose_code_parts] == [
        "what is held by L['held'].tuple changed"
    ]


def test_guards_are_timed_for_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler does so for its log, and empties all caches before."""
    timed: list[Any] = []
    monkeypatch.setattr(comparing, "_time_guards", lambda *_: timed.append(_) or 0.0)
    monkeypatch.setattr(guards, "profile_guard_manager", comparing._time_guards)
    x = torch.ones(2)
    read_program(_doubled, {"_": None, "x": x})
    assert (
        torch.compile(_doubled, backend=with_guards(lambda graph, _: graph))(None, x).sum() == 4.0
    )
    assert not timed
    assert torch.compile(_tripled, backend="eager")(None, x).sum() == 6.0
    assert len(timed) == 1
