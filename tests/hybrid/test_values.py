"""Values of Python's library, containers that are empty, and pieces without an operator: compiled as Python runs them."""

import array
import collections
import contextvars
import copy
import datetime
import decimal
import functools
import math
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx

from ridgeline.guards.guards import Guards
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches.added import with_guards

HELD: Any = SimpleNamespace()
NAN = math.nan
CALL = functools.partial(print)
WITH_NAN, PAIR = (NAN, 1), (1, [2])
DAY, LATER = datetime.date(2020, 1, 2), datetime.date(2020, 1, 5)


class Rate(float):
    """A number of a class of its own."""


class Table(dict[str, float]):
    """A dictionary of a class of its own."""


def compared(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value > datetime.date(2020, 1, 3) else 3.0)


def equal(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value == 1 else 3.0)


def true(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value else 3.0)


def hashed(x: Tensor) -> Tensor:
    return x * (hash(HELD.value) % 7)


def key(x: Tensor) -> Tensor:
    return x * {datetime.date(2020, 1, 2): 2.0}.get(HELD.value, 3.0)


def number(x: Tensor) -> Tensor:
    return x * float(HELD.value)


def sign_ahead_of_a_break(x: Tensor) -> Tensor:
    by = 2.0 if math.copysign(1.0, HELD.value) > 0 else 3.0
    torch._dynamo.graph_break()
    return x * by


def order_ahead_of_a_break(x: Tensor) -> Tensor:
    by = next(iter(HELD.value))
    torch._dynamo.graph_break()
    return x * by


def class_of_a_result(x: Tensor) -> Tensor:
    return x * (2.0 if isinstance(np.sqrt(HELD.value), float) else 3.0)


def class_of_a_sum(x: Tensor) -> Tensor:
    return x * (2.0 if type(np.sum(HELD.value)) is np.float64 else 3.0)


def class_of_a_number(x: Tensor) -> Tensor:
    return x * (2.0 if type(HELD.value) is np.float32 else 3.0)


def is_in(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value in [NAN, 1.0] else 3.0)


def equal_to_one_with_nan(x: Tensor) -> Tensor:
    return x * (2.0 if (HELD.value, 1) == WITH_NAN else 3.0)


def attribute_of_a_result(x: Tensor) -> Tensor:
    return x * (2.0 if hasattr(np.sqrt(HELD.value), "is_integer") else 3.0)


def attribute_of_a_number(x: Tensor) -> Tensor:
    return x * (2.0 if hasattr(HELD.value, "as_integer_ratio") else 3.0)


def one_function(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value == CALL else 3.0)


def one_object(x: Tensor) -> Tensor:
    return x * (2.0 if HELD.value is PAIR else 3.0)


class Factors:
    """What is gotten from."""

    a, b = 2.0, 3.0

    def by(self, y: float) -> float:
        return self.a * y


FACTORS = Factors()


def gotten(x: Tensor) -> Tensor:
    found = HELD.value(FACTORS)
    return x * (found if isinstance(found, float) else len(found))


def gotten_of_a_list(x: Tensor) -> Tensor:
    return x * HELD.value([2.0, 3.0])


def asked(x: Tensor) -> Tensor:
    return x * HELD.value.get()


def asked_in_vain(x: Tensor) -> Tensor:
    try:
        return x * HELD.value.get()
    except LookupError:
        return x * 5.0


GETTERS: dict[str, tuple[Callable[[Tensor], Tensor], Any, Any]] = {
    "attribute": (gotten, operator.attrgetter("a"), operator.attrgetter("b")),
    "attributes": (gotten, operator.attrgetter("a"), operator.attrgetter("a", "a")),
    "element": (gotten_of_a_list, operator.itemgetter(0), operator.itemgetter(1)),
    "method": (gotten, operator.methodcaller("by", 1.0), operator.methodcaller("by", y=2.0)),
    "variable": (
        asked, contextvars.ContextVar("one", default=2.0), contextvars.ContextVar("two", default=3.0),
    ),
}  # fmt: skip
"""Objects in C that code calls, or whose methods it does."""


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Any, Any]] = {
    "date compared": (compared, DAY, LATER),
    "date as a key": (key, DAY, LATER),
    "span hashed": (hashed, datetime.timedelta(1), datetime.timedelta(2)),
    "span": (true, datetime.timedelta(1), datetime.timedelta(0)),
    "decimal equal": (equal, decimal.Decimal(1), decimal.Decimal(2)),
    "decimal": (true, decimal.Decimal(1), decimal.Decimal(0)),
    "decimal as a number": (number, decimal.Decimal(1), decimal.Decimal(2)),
    "array": (true, array.array("d", [math.nan]), array.array("d")),
    "number of a class": (equal, Rate(1.0), Rate(2.0)),
    "ordered dictionary": (true, collections.OrderedDict(a=1), collections.OrderedDict()),
    "default dictionary": (true, collections.defaultdict(int, a=1), collections.defaultdict(int)),
    "counter": (true, collections.Counter("a"), collections.Counter()),
    "dictionary of a class": (true, Table(a=1.0), Table()),
    "class of a result": (class_of_a_result, 3, np.float32(3)),
    "class of a sum": (class_of_a_sum, np.ones(2), np.ones(2, np.int64)),
    "class of a number": (class_of_a_number, np.float32(2), np.float64(2)),
    "attribute of a result": (attribute_of_a_result, np.float64(3), np.ones(2)),
    "attribute of a number": (attribute_of_a_number, np.float32(2), np.int16(2)),
    "one function": (one_function, CALL, functools.partial(print)),
    "nan in a list": (is_in, NAN, float("nan")),
    "nan in a tuple": (equal_to_one_with_nan, NAN, float("nan")),
    "one tuple": (one_object, PAIR, (1, [2])),
    "zero ahead of a break": (sign_ahead_of_a_break, 0.0, -0.0),
    "order ahead of a break": (
        order_ahead_of_a_break,
        collections.OrderedDict([(1, 1), (2, 2)]),
        collections.OrderedDict([(2, 2), (1, 1)]),
    ),
    **GETTERS,
    "no value": (
        asked_in_vain,
        contextvars.ContextVar("none"),
        contextvars.ContextVar("two", default=3.0),
    ),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The compiler keeps what it compiled by code, which cases share."""
    torch._dynamo.reset()
    yield
    vars(HELD).clear()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_turned", [False, True], ids=["", "turned"])
def test_compiled_programs_follow_there_and_back(name: str, is_turned: bool) -> None:
    program, *values = CASES[name]

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return graph.forward

    x, run = torch.ones(2), torch.compile(program, backend=with_guards(backend))
    with many_variants():
        for HELD.value in (*values[::-1], values[1]) if is_turned else (*values, values[0]):
            assert torch.equal(run(x), program(x))


def on(x: Tensor) -> Tensor:
    return x * 2 if HELD.value["number"] else x


def above(x: Tensor) -> Tensor:
    return x * 2 if HELD.value["number"] > 1 else x


def many(x: Tensor) -> Tensor:
    for index in range(HELD.value["number"]):
        x = x + index
    return x


def at(x: Tensor) -> Tensor:
    return x[HELD.value["number"] :] * {2: 2.0, 1: 3.0}[HELD.value["number"]]


@pytest.mark.parametrize(
    ("program", "values"),
    [
        (on, (np.bool_(True), np.bool_(False))),
        (above, (np.int64(2), np.int64(1))),
        (above, (np.float32(2), np.float64(2))),
        (many, (np.int64(2), np.int64(3))),
        (at, (np.int64(2), np.int64(1))),
    ],
)
def test_a_number_of_numpys_decides(program: Any, values: tuple[Any, Any]) -> None:
    """A captured program may branch, count and look up by one, which is compared before each call."""
    HELD.value = {"number": values[0]}
    arguments = {"x": torch.ones(4)}
    guards = Guards(program, arguments, ["x"])
    assert guards.holds(dict(arguments))
    HELD.value["number"] = values[1]
    assert not guards.holds(dict(arguments))
    HELD.value["number"] = type(values[0])(values[0])
    assert guards.holds(dict(arguments))


@pytest.mark.parametrize("name", GETTERS)
def test_a_getter_that_a_name_holds_is_read(name: str) -> None:
    """In one piece; another one is another program, and one that gets the same is not."""
    program, HELD.value, other = GETTERS[name]
    arguments = {"x": torch.ones(2)}
    guards = Guards(program, arguments, ["x"])
    before = HELD.value
    if name != "variable":
        HELD.value = copy.copy(before)
    assert guards.holds(dict(arguments))
    HELD.value = other
    assert not guards.holds(dict(arguments))
    HELD.value = before
    assert guards.holds(dict(arguments))


def test_what_a_context_variable_is_set_to_is_compared() -> None:
    """Also what is in it, and that nothing is set any more."""
    HELD.value, table = contextvars.ContextVar("table"), {"number": 2}
    arguments = {"x": torch.ones(2)}

    def program(x: Tensor) -> Tensor:
        return x * HELD.value.get()["number"]

    token = HELD.value.set(table)
    guards = Guards(program, arguments, ["x"])
    assert guards.holds(dict(arguments))
    table["number"] = 3
    assert not guards.holds(dict(arguments))
    table["number"] = 2
    assert guards.holds(dict(arguments))
    HELD.value.reset(token)
    assert not guards.holds(dict(arguments))
