"""What a program looks up where torch's compiler does not look again: made keys, orders, classes, loggers, numbers."""

import abc
import builtins
import collections
import enum
import logging
import math
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.guards.reading import UnreadableError
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches.added import with_guards

NAME = "ridgeline_name_of_a_test"
LOG = logging.getLogger("ridgeline.test_looked_up")
SENTINEL = object()
PAIR = (1.0, 2)
WEAK: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class Kind(enum.Enum):
    """Members with values."""

    FIRST = 2.0
    SECOND = 3.0


class Missing(dict[str, float]):
    """Has an answer for every key."""

    by = 2.0

    def __missing__(self, key: str) -> float:
        return self.by


@runtime_checkable
class Quacking(Protocol):
    """Whatever quacks is one."""

    def quack(self) -> int:
        """Some number."""
        ...


class Plain:
    """None of the above, at first."""


class Root:
    """Whose heirs may be given others of its heirs for bases."""


class Base(Root):
    """One of them."""


class OtherBase(Root):
    """Another one."""


class Derived(Base):
    """Of the one, at first."""


class Late:
    """Has a number for each attribute that it has not."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1.0


class Part(nn.Module):
    """As it is."""

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x * 1.0


class Net(nn.Module):
    """Computes with what a case looks up."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.read, self.part = read, Part()
        self.kind, self.number = Kind.FIRST, np.float64(2.0)
        self.other, self.sentinel = Plain(), SENTINEL
        self.order = collections.OrderedDict(a=2.0, b=1.0)
        self.table: dict[Any, float] = {}
        self.abstract = abc.ABCMeta("Abstract", (), {"__module__": __name__})
        self.missing, self.plain, self.is_plain = Missing(), Plain(), _is(Plain)
        self.pair, self.nan, self.made = PAIR, math.nan, set[Any]()
        self.numbers = [self.nan]
        self.by_object, self.objects = {self.plain: 2.0}, {self.plain}
        self.members: Any = enum.Enum("Members", {"FIRST": 2.0, "SECOND": 3.0})
        self.derived, self.late = Derived(), Late()
        self.hooked = nn.Identity()
        self.hooked.register_forward_hook(lambda module, args, out: out * 2.0)
        self.hooked.register_forward_hook(lambda module, args, out: out + 1.0)

    def forward(self, x: Tensor) -> Any:
        """What the case makes of it."""
        return self.read(self, x)


def _in_order(net: Any, x: Tensor) -> Tensor:
    for name, by in net.order.items():
        x = x * by if name == "a" else x + by
    return x


def _is(what: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, x: x * (2.0 if isinstance(net.plain, what) else 1.0)


def _first_last(net: Any) -> None:
    hooks = net.hooked._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


Case = tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]
MADE: dict[str, Case] = {
    "weak reference": (lambda n, x: x * WEAK.get(n, 1.0), lambda n: WEAK.setdefault(n, 2.0)),
    "tuple with a module": (
        lambda n, x: x * n.table.get((n.part, 1), 1.0),
        lambda n: n.table.__setitem__((n.part, 1), 2.0),
    ),
    "tuple, in": (
        lambda n, x: x * (2.0 if (n.part, 1) in n.table else 1.0),
        lambda n: n.table.__setitem__((n.part, 1), 2.0),
    ),
    "order of a dictionary": (_in_order, lambda n: n.order.move_to_end("a")),
    "order of hooks": (lambda n, x: n.hooked(x), _first_last),
    "variable behind __missing__": (
        lambda n, x: x * n.missing["k"],
        lambda n: setattr(Missing, "by", 3.0),
    ),
    "variable of a class": (
        lambda n, x: x * Missing.by,
        lambda n: setattr(Missing, "by", 3.0),
    ),
    "variable of an object's type": (
        lambda n, x: x * type(n.missing).by,
        lambda n: setattr(Missing, "by", 3.0),
    ),
    "class that is registered": (
        lambda n, x: x * (2.0 if isinstance(n.plain, n.abstract) else 1.0),
        lambda n: n.abstract.register(Plain),
    ),
    "method of a protocol": (_is(Quacking), lambda n: setattr(n.plain, "quack", int)),
    "sentinel": (
        lambda n, x: x * (2.0 if n.sentinel is SENTINEL else 1.0),
        lambda n: setattr(n, "sentinel", object()),
    ),
    "two that become one": (
        lambda n, x: x * (2.0 if n.plain is n.other else 1.0),
        lambda n: setattr(n, "other", n.plain),
    ),
    "tuple that is one": (
        lambda n, x: x * (2.0 if n.pair is PAIR else 1.0),
        lambda n: setattr(n, "pair", (*list(PAIR),)),
    ),
    "nan in a list": (
        lambda n, x: x * (2.0 if n.nan in n.numbers else 1.0),
        lambda n: setattr(n, "nan", float("nan")),
    ),
    "object as a key": (
        lambda n, x: x * n.by_object.get(n.other, 1.0),
        lambda n: setattr(n, "other", n.plain),
    ),
    "object in a set": (
        lambda n, x: x * (2.0 if n.other in n.objects else 1.0),
        lambda n: setattr(n, "other", n.plain),
    ),
    "made key in a set": (
        lambda n, x: x * (2.0 if (n.part, 1) in n.made else 1.0),
        lambda n: n.made.add((n.part, 1)),
    ),
    "member by value": (
        lambda n, x: x * n.members(2.0).value,
        lambda n: n.members._value2member_map_.update({2.0: n.members.SECOND}),
    ),
    "member by name": (
        lambda n, x: x * n.members["FIRST"].value,
        lambda n: n.members._member_map_.update(FIRST=n.members.SECOND),
    ),
    "name that hides one of Python's": (
        lambda n, x: x * max(2.0, 1.0),
        lambda n: globals().__setitem__("max", lambda a, b: 3.0),
    ),
    "attribute in place of __getattr__": (
        lambda n, x: x * n.late.by,
        lambda n: setattr(n.late, "by", 2.0),
    ),
    "type of autocast": (
        lambda n, x: x * (2.0 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else 1.0),
        lambda n: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "class in a closure": (
        lambda n, x: n.is_plain(n, x),
        lambda n: setattr(n, "is_plain", _is(Part)),
    ),
}
"""What compiled programs compare as well."""
CASES: dict[str, Case] = {
    **MADE,
    "value of a member": (
        lambda n, x: x * n.kind.value,
        lambda n: setattr(n, "kind", Kind.SECOND),
    ),
    "method of a class, later": (
        lambda n, x: x * (2.0 if n.plain else 1.0),
        lambda n: setattr(Plain, "__bool__", lambda plain: False),
    ),
    "call of a module": (
        lambda n, x: n.part(x),
        lambda n: setattr(Part, "__call__", lambda part, x: x * 3.0),
    ),
    "call of a layer of torch's": (
        lambda n, x: n.hooked(x),
        lambda n: setattr(nn.Identity, "__call__", lambda layer, x: x * 3.0),
    ),
    "bases of a class": (
        lambda n, x: x * (2.0 if isinstance(n.derived, Base) else 1.0),
        lambda n: setattr(Derived, "__bases__", (OtherBase,)),
    ),
    "name among Python's": (
        lambda n, x: x * ridgeline_name_of_a_test,  # type: ignore[name-defined]  # noqa: F821
        lambda n: setattr(builtins, NAME, 3.0),
    ),
    "level of a logger": (
        lambda n, x: x * (2.0 if LOG.isEnabledFor(logging.INFO) else 1.0),
        lambda n: LOG.setLevel(logging.ERROR),
    ),
    "number of NumPy's": (
        lambda n, x: x * n.number,
        lambda n: setattr(n, "number", np.float64(3.0)),
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    setattr(builtins, NAME, 2.0)
    LOG.setLevel(logging.INFO)
    yield
    delattr(builtins, NAME)
    LOG.setLevel(logging.NOTSET)
    Missing.by = 2.0
    Derived.__bases__ = (Base,)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    for kind, name in ((Part, "__call__"), (Plain, "__bool__"), (nn.Identity, "__call__")):
        if name in vars(kind):
            delattr(kind, name)
    globals().pop("max", None)
    WEAK.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_guards_hold_until_it_changes(name: str) -> None:
    """And the plain result is another then."""
    read, change = CASES[name]
    net, x = Net(read), torch.arange(1.0, 4.0)
    if name == "nan in a list" and torch.__version__ < "2.12":
        # To that compiler each nan is another one.
        with pytest.raises(UnreadableError, match="nan compared in a container"), torch.no_grad():
            CallReads(net, (x,))
        return
    with torch.no_grad():
        guards, before = CallReads(net, (x,)).guards, net(x)
        arguments = {"fn": net, "args": (x,)}
        assert guards.holds(arguments)
        assert guards.holds({"fn": net, "args": (x * 2.0,)})
        change(net)
        assert not guards.holds(arguments)
        assert not torch.equal(net(x), before)


@pytest.mark.parametrize("name", MADE)
def test_a_change_compiles_anew(name: str) -> None:
    """Where nothing but the compiler's guards looks, too."""
    if name in ("tuple that is one", "nan in a list") and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 its compiler makes tuples and nan anew")
    read, change = MADE[name]
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    net, x = Net(read), torch.arange(1.0, 4.0)
    run = torch.compile(lambda x: read(net, x), backend=with_guards(backend))
    with many_variants():
        for count in (1, 1):
            assert torch.equal(run(x), read(net, x))
            assert len(compiled) == count
        change(net)
        assert torch.equal(run(x), read(net, x))
        assert len(compiled) == 2


def test_an_order_is_followed_where_the_dictionary_is_another() -> None:
    """A way to it that is no longer there is no match, and no error."""
    net, x = Net(_in_order), torch.arange(1.0, 4.0)
    with torch.no_grad():
        guards = CallReads(net, (x,)).guards
        net.order = collections.OrderedDict(net.order)
        assert guards.holds({"fn": net, "args": (x,)})
        del net.order
        assert not guards.holds({"fn": net, "args": (x,)})


def test_members_and_numbers_are_captured_once() -> None:
    """They are read anew in each call, and are what they were: one capture serves all."""

    def read(net: Any, x: Tensor) -> Tensor:
        return x * net.kind.value / np.sqrt(net.number) + len(net.kind.name)

    net, x = Net(read), torch.arange(1.0, 4.0)
    with interpreted(), torch.no_grad(), rl.hybridize(net, x, mode="compiled") as fast:
        for step in range(4):
            torch.testing.assert_close(fast(x + step), net(x + step))
        assert fast.report.counters == {"eager_calls": 0, "shapes": 1, "rebuilds": 0}
        net.number = np.float64(5.0)
        torch.testing.assert_close(fast(x), net(x))
        assert fast.report.counters["shapes"] == 2


def test_a_logger_is_asked_and_not_only_told() -> None:
    """What it answers decides a branch from the first call on."""
    net, x = Net(CASES["level of a logger"][0]), torch.arange(1.0, 4.0)
    with interpreted(), torch.no_grad(), rl.hybridize(net, x, mode="compiled") as fast:
        assert torch.equal(fast(x), x * 2.0)
        LOG.setLevel(logging.ERROR)
        assert torch.equal(fast(x), x)


def test_descriptors_of_classes_are_not_run() -> None:
    """Only what a class has is compared: looking it up there would call code of the user's."""
    calls: list[Any] = []

    class Value:
        def __get__(self, owner: Any, kind: Any = None) -> float:
            if owner is None:
                calls.append(kind)
            return 2.0

    plain = types.new_class("Described", (), {}, lambda own: own.update(value=Value()))
    net, x = Net(lambda n, x: x * n.plain.value), torch.arange(1.0, 4.0)
    net.plain = plain()
    with torch.no_grad():
        guards = CallReads(net, (x,)).guards
        assert guards.holds({"fn": net, "args": (x,)})
        assert guards.holds({"fn": net, "args": (x,)})
        setattr(plain, "value", 3.0)  # noqa: B010
        assert not guards.holds({"fn": net, "args": (x,)})
    assert not calls


def test_what_weak_references_refer_to_is_not_kept_alive() -> None:
    """It goes when the user lets it go, and the branch on it is the other one then."""

    def read(net: Any, x: Tensor) -> Tensor:
        held = net.reference()
        return x - 1.0 if held is None else x * held.rate

    net, x = Net(read), torch.arange(1.0, 4.0)
    net.strong = Plain()
    net.strong.rate, net.reference = 2.0, weakref.ref(net.strong)
    with interpreted(), torch.no_grad(), rl.hybridize(net, x, mode="compiled") as fast:
        assert torch.equal(fast(x), x * 2.0)
        net.strong = None
        assert net.reference() is None
        assert torch.equal(fast(x), x - 1.0)
