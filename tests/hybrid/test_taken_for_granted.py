"""What code finds outside of its objects, and may find changed: in classes, functions, modules, the process."""

import abc
import copy
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.guards.reading import UnreadableError
from ridgeline.plan import Plan
from ridgeline.programs.watches.settings import MethodsOfTensors, settings_of
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")

Case = tuple[Callable[[Tensor], Any], Callable[[], Any]]
"""What a result is multiplied by, and what changes that."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Everything is put back that belongs to the process."""
    torch._dynamo.reset()
    limit, own = sys.getrecursionlimit(), {*vars(torch.Tensor)}
    yield
    sys.setrecursionlimit(limit)
    for name in {*vars(torch.Tensor)} - own:
        delattr(torch.Tensor, name)


def _plain(kind: type, value: Any, name: str, method: Any, ask: Callable[[Any], Any]) -> Case:
    own: Any = type("Own", (kind,), {})
    held = own(value)
    return lambda _: ask(held), lambda: setattr(own, name, method)


def number_is_false() -> Case:
    return _plain(int, 2, "__bool__", lambda _: False, lambda k: 2.0 if k else 3.0)


def number_adds() -> Case:
    return _plain(float, 2.0, "__add__", lambda *_: 9.0, lambda k: k + 1.0)


def text_has_a_length() -> Case:
    return _plain(str, "ab", "__len__", lambda _: 9, lambda k: 1.0 * len(k))


def text_has_a_method_of_its_own() -> Case:
    return _plain(
        str, "ab", "startswith", lambda *_: False, lambda k: 2.0 if k.startswith("a") else 3.0
    )


def method_of_tensors() -> Case:
    return lambda x: x.sin().sum() + 2.0, lambda: setattr(torch.Tensor, "sin", lambda x: x * 5.0)


def operator_of_tensors() -> Case:
    return lambda x: (x * 3.0).sum(), lambda: setattr(torch.Tensor, "__mul__", lambda x, _: x + 5.0)


def recursion_limit() -> Case:
    limit = sys.getrecursionlimit()
    return lambda _: sys.getrecursionlimit() / limit, lambda: sys.setrecursionlimit(2 * limit)


def metaclass() -> Case:
    class Meta(type):
        gain = 2.0

    class Kind(metaclass=Meta):
        pass

    return lambda _: Kind.gain, lambda: setattr(Meta, "gain", 5.0)


def call_of_a_class() -> Case:
    class Meta(type):
        pass

    class Kind(metaclass=Meta):
        gain = 2.0

    other = types.SimpleNamespace(gain=5.0)
    return lambda _: Kind().gain, lambda: setattr(Meta, "__call__", lambda _: other)


def single_object() -> Case:
    """Of a class that has one only: its metaclass keeps it."""

    class Meta(type):
        made: Any = None

        def __call__(cls) -> Any:
            Meta.made = Meta.made or super().__call__()
            return Meta.made

    class Config(metaclass=Meta):
        gain = 2.0

    return lambda _: Config().gain, lambda: setattr(Config(), "gain", 5.0)


def registered_class() -> Case:
    class Kind(abc.ABC):  # noqa: B024
        pass

    class Other:
        def is_kind(self) -> bool:
            return issubclass(type(self), Kind)

    held = Other()
    return lambda _: 2.0 if held.is_kind() else 3.0, lambda: Kind.register(Other)


def class_method_in_a_closure() -> Case:
    class Kind:
        @classmethod
        def gain(cls) -> float:
            return 2.0

    return lambda _: Kind.gain(), lambda: setattr(Kind, "gain", classmethod(lambda _: 5.0))


def default_of_a_data_class() -> Case:
    @dataclasses.dataclass
    class Config:
        gain: float = 2.0

    return lambda _: Config().gain, lambda: setattr(Config.__init__, "__defaults__", (5.0,))


def factory_of_a_data_class() -> Case:
    held = [2.0]

    @dataclasses.dataclass
    class Config:
        gains: list[float] = dataclasses.field(default_factory=lambda: [held[0]])

    return lambda _: Config().gains[0], lambda: held.__setitem__(0, 5.0)


def end_of_a_data_class() -> Case:
    @dataclasses.dataclass
    class Config:
        gain: float = 2.0

        def __post_init__(self) -> None:
            self.gain *= 2.0

    return lambda _: Config().gain, lambda: setattr(Config, "__post_init__", lambda _: None)


def closure_of_a_method() -> Case:
    held = [2.0]

    class Made:
        def gain(self) -> float:
            return held[0]

    return lambda _: Made().gain(), lambda: held.__setitem__(0, 5.0)


def code_of_a_method() -> Case:
    class Made:
        def gain(self) -> float:
            return 2.0

    def other(_: Any) -> float:
        return 5.0

    return lambda _: Made().gain(), lambda: setattr(Made.gain, "__code__", other.__code__)


def descriptor() -> Case:
    class Gain:
        def __get__(self, *_: Any) -> float:
            return 2.0

    class Kind:
        gain = Gain()

    held = Kind()
    return lambda _: held.gain, lambda: setattr(Gain, "__get__", lambda *_: 5.0)


def attribute_of_a_module() -> Case:
    module: Any = types.ModuleType("settings")
    return lambda _: getattr(module, "gain", 2.0), lambda: setattr(module, "gain", 5.0)


def attributes_that_a_module_computes() -> Case:
    module: Any = types.ModuleType("settings")
    return (
        lambda _: getattr(module, "gain", 2.0),
        lambda: setattr(module, "__getattr__", lambda _: 5.0),
    )


def one_number() -> Case:
    """An object like any other to `is`; another one may be equal."""
    held: Any = types.SimpleNamespace(first=float("1.25"))
    held.second = held.first
    return (
        lambda _: 2.0 if held.first is held.second else 3.0,
        lambda: setattr(held, "second", float("1.25")),
    )


def one_text() -> Case:
    words = ["one", "text"]
    held: Any = types.SimpleNamespace(first=" ".join(words))
    held.second = held.first
    return (
        lambda _: 2.0 if held.first is held.second else 3.0,
        lambda: setattr(held, "second", " ".join(words)),
    )


CASES: tuple[Callable[[], Case], ...] = (
    *(number_is_false, number_adds, text_has_a_length, text_has_a_method_of_its_own),
    *(method_of_tensors, operator_of_tensors, recursion_limit),
    *(metaclass, registered_class, class_method_in_a_closure, default_of_a_data_class),
    *(factory_of_a_data_class, end_of_a_data_class, closure_of_a_method, code_of_a_method),
    *(descriptor, attribute_of_a_module, attributes_that_a_module_computes, one_number, one_text),
)
LEFT_TO_PYTHON = (call_of_a_class, single_object)
"""Which no program reads in one piece, before or after."""


NEWLY_READ = (number_adds, text_has_a_length, text_has_a_method_of_its_own)
"""What torch's compiler reads in one piece from 2.13 on; before that such a call is refused."""


def cases(*extra: Callable[[], Case]) -> Any:
    return pytest.mark.parametrize("case", [*CASES, *extra], ids=lambda case: case.__name__)


class Net(nn.Module):
    """Scales by what it finds."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        x = self.linear(x)
        return x * self.ask(x)


@cases(*LEFT_TO_PYTHON)
def test_compiled_steps_follow(case: Callable[[], Case]) -> None:
    """The loss after the change is that of the step as written."""
    ask, change = case()
    model, x = Net(ask), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with interpreted(), PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled")) as step:
        for _ in range(2):
            step(x)
        before = float(loss_fn(model, x).detach())
        change()
        wanted = float(loss_fn(model, x).detach())
        assert wanted != pytest.approx(before, rel=1e-3)
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


@cases()
def test_what_was_read_no_longer_holds(case: Callable[[], Case]) -> None:
    """So that captured forms are made anew; what is read then holds."""
    ask, change = case()
    model, x = Net(ask), torch.randn(2, 4)
    arguments = {"fn": model, "args": (x,)}
    with torch.no_grad():
        if torch.__version__ < "2.13" and case in NEWLY_READ:
            with pytest.raises(UnreadableError):
                CallReads(model, (x,))
            return
        guards = CallReads(model, (x,)).guards
        assert guards.holds(arguments)
        change()
        assert not guards.holds(arguments)
        assert guards.difference(arguments)
        if case is not attributes_that_a_module_computes:  # which the compiler cannot read
            assert CallReads(model, (x,)).guards.holds(arguments)


def test_a_variable_that_is_deleted() -> None:
    """Its cell is empty, as code may find out; looking at that is no error of the caller's."""
    gain = 2.0

    def delete() -> None:
        nonlocal gain
        del gain

    def ask(_: Tensor) -> float:
        try:
            return gain
        except NameError:
            return 5.0

    model, x = Net(ask), torch.randn(2, 4)
    arguments = {"fn": model, "args": (x,)}
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds(arguments)
        delete()
        assert not guards.holds(arguments)
        assert not guards.could_hold(arguments)


def test_notes_that_python_makes_in_a_class_compile_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of slots, when a tensor is first copied, and of annotations, when they are first asked for."""
    monkeypatch.delattr(torch.Tensor, "__slotnames__", raising=False)
    monkeypatch.delattr(nn.Parameter, "__annotations__", raising=False)
    ask = MethodsOfTensors()
    before = ask()
    copy.copy(torch.ones(1))
    assert "__slotnames__" in vars(torch.Tensor)
    assert ask() == before
    assert nn.Parameter.__annotations__ == {}
    assert "__annotations__" in vars(nn.Parameter)
    assert ask() == before


class Bare(nn.Module):
    gain = 2.0

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)


class Derived(Bare):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x * self.gain
        except KeyError:
            return x


def test_nor_are_they_keys_of_a_class() -> None:
    """A program was refused in the frame that made it, where the compiler had asked for the annotations."""
    model, x = nn.Sequential(Derived()), torch.randn(2, 4)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert "__annotations__" not in vars(Bare)
        assert Bare.__annotations__ == {}
        assert "__annotations__" in vars(Bare)
        assert guards.holds({"fn": model, "args": (x,)})


def test_what_pythons_own_code_asks_for_is_not_compared() -> None:
    """`unwrap` counts its loops, and torch's compiler sets another limit: programs were compiled twice."""
    asked = [settings_of([], [kind.__code__]) for kind in (recursion_limit, inspect.unwrap)]
    assert [sys.getrecursionlimit in asks for asks in asked] == [True, False]
