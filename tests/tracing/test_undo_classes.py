"""Taking back what a step did to containers of the user's own classes, and behind decorators of libraries."""

import contextlib
import ctypes
import enum
import functools
import os
import random
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ridgeline.reach.side_effects import streams
from ridgeline.reach.undo import Undo, undone


class Counting(dict[str, int]):
    """Counts what is put into it."""

    __slots__ = ("log", "total")

    def __init__(self) -> None:
        super().__init__()
        self.total, self.log = 0, ["made"]

    def __setitem__(self, key: str, value: int) -> None:
        self.total += 1
        self.log.append(key)
        super().__setitem__(key, value)


class Running(list[float]):
    best = 0.0
    mean: float


class Named(tuple[int, ...]):
    label: str


def test_what_containers_have_beside_their_elements_is_put_back_and_their_own_code_not_run() -> (
    None
):
    """Attributes of an object and of its class; entries by the methods of Python's own classes."""
    counting, running, named = Counting(), Running([1.0]), Named((1, 2))
    counting["first"], running.mean, named.label = 1, 1.0, "a"
    counting.total, counting.log[:] = 0, ["made"]

    def change() -> None:
        counting["second"] = counting["first"] = 2
        running.append(2.0)
        running.mean, Running.best, named.label = 1.5, 2.0, "b"

    with undone(change):
        change()
    assert (dict(counting), counting.total, counting.log) == ({"first": 1}, 0, ["made"])
    assert (list(running), running.mean, Running.best) == ([1.0], 1.0, 0.0)
    assert named.label == "a"


def test_entries_of_weak_dictionaries_and_sets_are_put_back() -> None:
    """As are those of others; what they refer to lives on."""
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    counts, layers = weakref.WeakKeyDictionary({layer: 1}), weakref.WeakSet([layer])

    def change() -> None:
        counts[layer] += 1
        counts[other] = 1
        layers.add(other)

    with undone(change):
        change()
    assert dict(counts) == {layer: 1}
    assert set(layers) == {layer}


HIDDEN = types.SimpleNamespace(calls=0)
"""Only named by what is below."""


@torch.no_grad()
def without_gradients() -> None:
    HIDDEN.calls += 1


@contextlib.contextmanager
def entered() -> Any:
    HIDDEN.calls += 1
    yield


@functools.singledispatch
def by_kind(_: Any) -> None:
    HIDDEN.calls += 1


class Decorated:
    @torch.no_grad()
    def method(self) -> None:
        HIDDEN.calls += 1

    @functools.cached_property
    def cached(self) -> int:
        HIDDEN.calls += 1
        return 1

    @functools.singledispatchmethod
    def by_kind(self, _: Any) -> None:
        HIDDEN.calls += 1


def test_what_a_function_in_a_librarys_decorator_names_is_put_back() -> None:
    """The decorator's code is not the user's, and names nothing of theirs."""

    def change() -> None:
        without_gradients()
        with entered():
            by_kind(1)
        decorated = Decorated()
        decorated.method()
        decorated.by_kind(decorated.cached)

    with undone(change):
        change()
        assert HIDDEN.calls == 6
    assert HIDDEN.calls == 0


@pytest.mark.parametrize("call", [without_gradients, entered, by_kind, Decorated.method, Decorated])
def test_each_decorator_is_looked_into(call: Any) -> None:
    """Alone, as a name in code that does nothing else."""

    def change() -> Any:
        return call

    assert Undo(lambda: change).has(HIDDEN)


def test_what_hooks_of_all_modules_change_is_put_back() -> None:
    """They are called in each step, whatever names them."""
    layer, calls = nn.Linear(2, 2), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        with undone(layer):
            layer(torch.ones(2))
            assert calls == [1]
    finally:
        hook.remove()
    assert calls == [0]


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Source(random.Random):
    """Counts its draws, and has a method of its own under a name of Python's."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        return super().random()

    def getstate(self) -> Any:
        raise AssertionError


class Counted(np.ndarray[Any, Any]):
    calls = 0


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_double))


def test_what_values_of_libraries_hold_beside_what_they_are_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attributes of members, generators, arrays and parameters; memory as C has it; the environment."""
    monkeypatch.delenv("RIDGELINE_TEST", raising=False)
    settings, source, weight = (
        types.SimpleNamespace(side=Side.RIGHT),
        Source(1),
        nn.Linear(2, 2).weight,
    )
    array = np.zeros(2).view(Counted)
    masked = np.ma.array([1.0, 2.0])
    numbers, pair, raw = (ctypes.c_int * 3)(), Pair(1, 2.0), bytearray(4)
    view = memoryview(raw)[1:]

    def change() -> None:
        Side.LEFT.calls = settings.side.calls = 1  # type: ignore[attr-defined]
        weight.calls = source.random()  # type: ignore[attr-defined]
        array.calls += 1
        array[0], masked[0] = 1.0, np.ma.masked
        numbers[1], pair.first, view[0] = 5, 6, 7
        os.environ["RIDGELINE_TEST"] = "set"

    def show() -> str:
        drawn = random.Random.getstate(source)
        held = [vars(one) for one in (Side.LEFT, Side.RIGHT, weight, source, array)]
        memory = [bytes(one) for one in (numbers, pair, raw)]
        return repr((held, memory, drawn, array, masked, os.environ.get("RIDGELINE_TEST")))

    before, undo = show(), Undo(change)
    change()
    assert show() != before
    assert "os.environ['RIDGELINE_TEST']" in {change.what for change in undo.changes()}
    undo.restore()
    assert show() == before


def test_what_a_pointer_leads_to_cannot_be_put_back() -> None:
    """It is named, as an iterator is."""
    numbers = (ctypes.c_int * 3)()
    place = ctypes.pointer(numbers)

    def change() -> None:
        place.contents[0] += 1

    assert streams(change) == ["place (a LP_c_int_Array_3)"]
