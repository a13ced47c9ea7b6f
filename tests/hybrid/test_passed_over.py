"""What torch's compiler passes over as it reads a program: each is compared, or left to Python in words."""

import importlib.util
import numbers
import sys
import threading
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from ridgeline.callables.calls.reads import CallReads
from ridgeline.guards.reading import UnreadableError
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches.added import with_guards

Case = tuple[Callable[[], Any], Callable[[], Any]]
"""What a result is multiplied by, and what changes that."""


class Missing(dict[str, float]):
    """Has an answer for every key."""

    gain = 2.0

    def __missing__(self, key: str) -> float:
        return self.gain


class Local(threading.local):
    """Has a variable until an object hides it."""

    gain = 2.0


class Named:
    """A key that says itself what it equals."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.number == self.number

    def __hash__(self) -> int:
        return 1


def _moved(table: dict[str, float]) -> None:
    """Its first key becomes the last one."""
    table["a"] = table.pop("a")


def _of_keys(ask: Callable[[dict[str, float]], Any]) -> Case:
    table = {"a": 2.0, "b": 3.0}
    return lambda: 2.0 if ask(table) == "a" else 3.0, lambda: _moved(table)


def key_that_a_list_takes() -> Case:
    return _of_keys(lambda table: [*table][0])  # noqa: RUF015 - what is tried


def key_of_a_list() -> Case:
    return _of_keys(lambda table: list(table)[0])  # noqa: RUF015


def key_of_a_copy() -> Case:
    return _of_keys(lambda table: next(iter(table.copy())))


def number_of_keys() -> Case:
    table = {"a": 2.0}
    return lambda: 1.0 + len([*table]), lambda: table.update(b=2.0)


def list_of_two_tuples() -> Case:
    shared = [1]
    held: Any = SimpleNamespace(first=(shared,), second=(shared,))
    return (
        lambda: 2.0 if held.first[0] is held.second[0] else 3.0,
        lambda: setattr(held, "second", ([1],)),
    )


def annotation() -> Case:
    def told(value: 2.0) -> None:  # type: ignore[valid-type]
        """Says so."""

    return lambda: told.__annotations__["value"], lambda: told.__annotations__.update(value=3.0)


def attribute_of_a_dictionary() -> Case:
    held = Missing()
    return lambda: held["key"], lambda: setattr(held, "gain", 3.0)


def attribute_of_a_thread() -> Case:
    held = Local()
    return lambda: held.gain, lambda: setattr(held, "gain", 3.0)


def registered_number() -> Case:
    class Own:
        """No number, at first."""

    held = Own()
    return (
        lambda: 3.0 if isinstance(held, numbers.Number) else 2.0,
        lambda: numbers.Number.register(Own),
    )


def setting_of_torch() -> Case:
    return (
        lambda: 2.0 if torch._C._get_flash_sdp_enabled() else 3.0,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    )


def type_of_autocast() -> Case:
    return (
        lambda: 2.0 if torch.get_autocast_dtype("cuda") is torch.float16 else 3.0,
        lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    )


def leaf() -> Case:
    held: Any = SimpleNamespace(tensor=torch.ones(1, requires_grad=True))
    return (
        lambda: 2.0 if held.tensor.is_leaf else 3.0,
        lambda: setattr(held, "tensor", torch.ones(1, requires_grad=True) * 1.0),
    )


def call_of_a_module() -> Case:
    part = nn.Identity()
    return lambda: part(2.0), lambda: setattr(part, "_call_impl", lambda x: x + 1.0)


def key_that_says_what_it_equals() -> Case:
    key = Named(2.0)
    table = {Named(2.0): 2.0, Named(3.0): 3.0}
    return lambda: table[key], lambda: setattr(key, "number", 3.0)


def member_that_says_what_it_equals() -> Case:
    key, held = Named(2.0), {Named(3.0)}
    return lambda: 3.0 if key in held else 2.0, lambda: setattr(key, "number", 3.0)


def item_of_a_class() -> Case:
    gains = [2.0]

    class Kind:
        def __class_getitem__(cls, key: int) -> Any:
            return gains[key]

    return lambda: Kind[0], lambda: gains.__setitem__(0, 3.0)


def object_of_a_metaclass() -> Case:
    made = [2.0]

    class Meta(type):
        def __call__(cls) -> Any:
            return made[0]

    class Kind(metaclass=Meta):
        pass

    kind: Any = Kind
    return lambda: 1.0 * kind(), lambda: made.__setitem__(0, 3.0)


def package() -> Case:
    # As if it were installed.
    found = importlib.util.find_spec
    return (
        lambda: 2.0 if importlib.util.find_spec("ridgeline_late_package") is None else 3.0,
        lambda: setattr(importlib.util, "find_spec", lambda _: found("ridgeline")),
    )


def compiled_call_of_a_module() -> Case:
    part: Any = nn.Identity()
    return lambda: part(2.0), lambda: setattr(part, "_compiled_call_impl", lambda x: x + 1.0)


def method_of_a_tensor() -> Case:
    held: Any = torch.ones(2)
    return lambda: 1.0 * held.sum(), lambda: setattr(held, "sum", lambda: 3.0)


def hooks_of_a_tensor() -> Case:
    held = torch.ones(1, requires_grad=True)
    return lambda: 3.0 if held._backward_hooks else 2.0, lambda: held.register_hook(lambda _: None)


def hooks_that_are_there() -> Case:
    held = torch.ones(1, requires_grad=True)
    hook = held.register_hook(lambda _: None)
    return lambda: 2.0 if held._backward_hooks else 3.0, hook.remove


def own_attributes_of_a_tensor() -> Case:
    held: Any = torch.ones(1)
    return lambda: 3.0 if "gain" in held.__dict__ else 2.0, lambda: setattr(held, "gain", 3.0)


def own_call_of_a_module() -> Case:
    part: Any = nn.Identity()
    part._compiled_call_impl = lambda _: 2.0
    return lambda: part(1.0), lambda: setattr(part, "_compiled_call_impl", lambda _: 3.0)


def fields_of_a_data_class() -> Case:
    @dataclass
    class Gains:
        first: float = 2.0

    held: Any = Gains()
    known = held.__dataclass_fields__
    return lambda: 1.0 + len(fields(held)), lambda: known.update(second=known["first"])


def slots_of_a_class() -> Case:
    class Kind:
        __slots__ = ("first",)

    return lambda: 1.0 + len(Kind.__slots__), lambda: setattr(Kind, "__slots__", ("a", "b"))


def fields_of_a_named_tuple() -> Case:
    kind: Any = namedtuple("kind", "a b")  # noqa: PYI024 - its fields are to change
    held, first = kind(1.0, 2.0), {"a": 2.0, "b": 3.0}
    return lambda: first[held._fields[0]], lambda: setattr(kind, "_fields", ("b", "a"))


def attributes_that_a_pattern_takes() -> Case:
    class Kind:
        __match_args__: Any = ("first",)
        first, second = 2.0, 3.0

    held: Any = Kind()

    def ask() -> Any:
        match held:
            case Kind(gain):
                return gain

    return ask, lambda: setattr(Kind, "__match_args__", ("second",))


def class_of_a_number_of_numpy() -> Case:
    held = SimpleNamespace(gain=np.float32(2.0))
    return (
        lambda: 2.0 if isinstance(held.gain, np.floating) else 3.0,
        lambda: setattr(held, "gain", np.int64(2)),
    )


def property_of_a_module() -> Case:
    class Settings(types.ModuleType):
        gain = property(lambda _: 3.0)

    module: Any = types.ModuleType("ridgeline_settings")
    vars(module)["gain"] = 2.0
    return lambda: module.gain, lambda: setattr(module, "__class__", Settings)


COMPARED = (
    *(key_that_a_list_takes, key_of_a_list, key_of_a_copy, number_of_keys, list_of_two_tuples),
    *(annotation, attribute_of_a_dictionary, attribute_of_a_thread, registered_number),
    *(setting_of_torch, type_of_autocast, leaf, call_of_a_module, property_of_a_module),
    *(compiled_call_of_a_module, method_of_a_tensor, hooks_of_a_tensor, fields_of_a_data_class),
    *(class_of_a_number_of_numpy, slots_of_a_class, fields_of_a_named_tuple),
    attributes_that_a_pattern_takes,
)
LEFT_TO_PYTHON = {
    key_that_says_what_it_equals: "a key of Named looked up, whose own methods say what it equals",
    member_that_says_what_it_equals: "a key of Named looked up, whose own methods say what it equals",
    item_of_a_class: "Kind[...], for which the class has a method of its own",
    object_of_a_metaclass: "Kind, whose metaclass decides what that gives",
    hooks_that_are_there: "_backward_hooks of a tensor",
    own_attributes_of_a_tensor: "__dict__ of a tensor",
    own_call_of_a_module: "Identity, which a function of its own stands for (_compiled_call_impl)",
    package: "importlib.util.find_spec(...) in each call, though packages may be installed later",
}


class Net(nn.Module):
    """Scales by what it finds."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return x * self.ask()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Settings of the process are put back."""
    torch._dynamo.reset()
    found, kind = importlib.util.find_spec, torch.get_autocast_dtype("cuda")
    is_flash = torch.backends.cuda.flash_sdp_enabled()
    yield
    importlib.util.find_spec = found
    torch.set_autocast_dtype("cuda", kind)
    torch.backends.cuda.enable_flash_sdp(is_flash)


@pytest.mark.parametrize("case", COMPARED)
def test_guards_hold_until_it_changes(case: Callable[[], Case]) -> None:
    """And say then that they do not."""
    ask, change = case()
    net, x = Net(ask), torch.randn(3)
    arguments = {"fn": net, "args": (x,)}
    with torch.no_grad():
        guards = CallReads(net, (x,)).guards
        assert guards.holds(arguments)
    change()  # where gradients are recorded, so that a tensor can be no leaf
    with torch.no_grad():
        assert not guards.holds(arguments)
        assert guards.difference(arguments)


@pytest.mark.parametrize("case", [*COMPARED, *LEFT_TO_PYTHON])
def test_compiled_pieces_follow(case: Callable[[], Case]) -> None:
    """What they give after the change is what the code gives."""

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        return graph.forward

    if case is attribute_of_a_thread and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 its compiler looks into the class first")
    ask, change = case()
    net, x = Net(ask), torch.randn(3)
    run = torch.compile(net.forward, backend=with_guards(backend))
    with many_variants():
        for _ in range(2):
            torch.testing.assert_close(run(x), x * 2.0)
        change()
        torch.testing.assert_close(run(x), x * 3.0)


@pytest.mark.parametrize("case", LEFT_TO_PYTHON)
def test_no_program_holds_it(case: Callable[[], Case]) -> None:
    """The words say what it is."""
    net, words = Net(case()[0]), LEFT_TO_PYTHON[case]
    if "Named" in words and torch.__version__ < "2.13":  # which refuses such keys itself
        words = "overridden __hash__"
    with pytest.raises(UnreadableError) as refused, torch.no_grad():
        CallReads(net, (torch.randn(3),))
    assert words in str(refused.value)


def test_another_entry_is_none_of_a_program_that_asks_for_one() -> None:
    """Only code that goes through all keys depends on all, and on their order."""
    table = {"a": 2.0, "b": 3.0}
    net, x = Net(lambda: table["b"]), torch.randn(3)
    with torch.no_grad():
        guards = CallReads(net, (x,)).guards
        _moved(table)
        table["c"] = 4.0
        assert guards.holds({"fn": net, "args": (x,)})


def test_more_layers_take_no_more_calls_of_python() -> None:
    """What is compared of each module is compared in C++: this is asked before every call of a program."""

    def num_calls(num_layers: int) -> int:
        layers = (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(num_layers))
        net, x = nn.Sequential(*layers), torch.randn(3)
        with torch.no_grad():
            guards = CallReads(net, (x,)).guards
        calls = 0

        def count(frame: types.FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        arguments = {"fn": net, "args": (x,)}
        with torch.no_grad():
            sys.setprofile(count)
            is_held = guards.holds(arguments)
            sys.setprofile(None)
        assert is_held
        return calls

    assert num_calls(1) == num_calls(4)
