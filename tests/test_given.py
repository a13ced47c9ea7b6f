"""Arguments and fields of the wrong type are refused at the door, by one error that names all of it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import ridgeline as rl
from ridgeline.errors import FileFormatError, PlanError, RidgelineError
from ridgeline.given import Positive, checked


@checked(PlanError, but=("own",))
def door(
    plan: rl.Plan,
    number: float = 1.0,
    words: Collection[Literal["a", "b"]] = (),
    table: Mapping[str, int] | None = None,
    pairs: Sequence[tuple[int, ...]] = (),
    say: Callable[[str], None] | None = None,
    factor: Positive = 1.0,
    quoted: "Path | None" = None,
    own: int = 0,
) -> str:
    """Stands for a public function."""
    return f"in {own!r} {number!r}"


@pytest.mark.parametrize(
    ("arguments", "wanted", "got"),
    [
        ({"plan": None}, "plan as Plan", "None"),
        ({"plan": rl.Plan}, "plan as Plan", "the class Plan"),
        ({"number": "1"}, "number as a number", "'1'"),
        ({"number": True}, "number as a number", "True"),
        ({"number": math.nan}, "number as a number", "nan"),
        ({"words": "ab"}, "words as Collection[Literal['a', 'b']]", "'ab'"),
        ({"words": ["a", "c"]}, "words as Collection[Literal['a', 'b']]", "['a', 'c']"),
        ({"table": {1: 2}}, "table as Mapping[str, int] or None", "{1: 2}"),
        ({"pairs": [(1, 2), (3, 0.5)]}, "pairs as Sequence[tuple[int, ...]]", "[(1, 2), (3, 0.5)]"),
        ({"say": "loud"}, "say as a function or None", "'loud'"),
        ({"factor": 0}, "factor as a number > 0 and < 1000000000.0", "0"),
        ({"factor": math.inf}, "factor as a number > 0 and < 1000000000.0", "inf"),
    ],
)
def test_the_error_says_wanted_got_where_and_next(
    arguments: dict[str, Any], wanted: str, got: str
) -> None:
    with pytest.raises(PlanError) as error:
        door(**{"plan": rl.Plan(), **arguments})
    where = "ridgeline.door"
    assert str(error.value) == (
        f"wanted {wanted}, got {got} in {where}(); help({where}) says what each argument is"
    )


def test_what_fits_goes_in_and_a_path_is_told_who_reads_it() -> None:
    assert (
        door(rl.Plan(), 1, ("a",), {"x": 1}, [(1, 2), ()], print, 2.5, "not looked at", "own")
        == "in 'own' 1"
    )  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match=r"got 'p.json' in .*; for a file give rl.Plan.load\(path\)$"
    ):
        door("p.json")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'plan'"):
        door()  # type: ignore[call-arg]


def test_numbers_of_numpy_are_those_of_python() -> None:
    """What an array gives for a length or a rate, also where the function itself says what it wants."""
    given = door(rl.Plan(), np.float32(0.5), own=np.int64(2))  # type: ignore[arg-type]
    assert given == "in 2 0.5"
    plan = rl.Plan(accumulate=np.int64(2))  # type: ignore[arg-type]
    assert repr(plan) == "rl.Plan(accumulate=2)"
    with pytest.raises(PlanError, match="wanted accumulate as a whole number >= 1, got"):
        rl.Plan(accumulate=np.float64(2))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="wanted threads >= 0, got -1 in the plan"):
        rl.Plan(threads=np.int32(-1))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"x", "", "/dev/full"])
def test_a_noun_is_in_a_file(path: Any) -> None:
    """Reading a device may never end."""
    with pytest.raises(FileFormatError, match=r"^wanted a p.* got .*; give .*a file$"):
        rl.Plan.load(path)


@pytest.mark.parametrize("make", [rl.hybridize, rl.parallelize])
def test_a_class_is_no_function_of_tensors(make: Any) -> None:
    with pytest.raises(
        RidgelineError, match=r"wanted a function or module.*, got the class Linear"
    ):
        make(torch.nn.Linear, torch.ones(2))


@pytest.mark.parametrize("wrong", [3, "a.json", {"a": 1}, rl.Plan, rl.Feed])
def test_no_function_takes_what_is_no_noun(wrong: Any) -> None:
    """The error is Ridgeline's own, before anything is measured, computed or written."""
    for function, arguments in (
        (rl.simulate, {"machine": wrong, "workload": wrong, "plan": wrong}),
        (rl.choose, {"machine": wrong, "workload": wrong}),
        (rl.verify, {"predicted": wrong, "measured": wrong}),
        (rl.report, {"path": "never.html", "machine": wrong}),
        (rl.measure, {"settings": wrong}),
        (rl.Plan, {"sync": wrong}),
        (rl.Plan, {"layout": wrong}),
        (rl.Plan, {"feed": wrong}),
        (rl.Plan, {"choices": wrong}),
    ):
        with pytest.raises(RidgelineError, match=r"^wanted "):
            function(**arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync": 3}, "wanted sync as Sync, got 3 in the plan; correct it"),
        (
            {"layout": {"data": 2}},
            "wanted layout as Layout or None, got {'data': 2} in the plan; correct it",
        ),
        (
            {"layout": rl.Layout(data="1")},
            "wanted layout.data as a whole number >= 1, got '1' in the plan; correct it",
        ),  # type: ignore[arg-type]
        (
            {"layout": rl.Layout(data=-1, shard=-1)},
            "wanted layout.data >= 1, got -1 in the plan; raise it",
        ),
    ],
)
def test_plans_are_made_of_what_they_say(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        rl.Plan(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"memory_formats": ["foo"]},
            "wanted memory_formats out of as-is, channels_last, got foo; correct the name",
        ),
        (
            {"clip_norm": math.nan},
            (
                "wanted clip_norm as a finite number above 0, or None, got nan; give the largest total norm that "
                "gradients may have, or None to leave them as they are"
            ),
        ),
        (
            {"precisions": "bf16"},
            (
                "wanted precisions as Collection[str], got 'bf16' in ridgeline.trace(); help(ridgeline.trace) says "
                "what each argument is"
            ),
        ),
    ],
)
def test_a_step_is_traced_as_asked(arguments: dict[str, Any], message: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RidgelineError) as error:
        rl.trace(
            model, lambda model, batch: model(batch).sum(), optimizer, torch.ones(1, 2), **arguments
        )
    assert str(error.value) == message
