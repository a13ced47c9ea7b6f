"""Plans as they are written by hand: what their constructor refuses, and that the rest survives its file."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.codec import decode, encode
from ridgeline.errors import FileFormatError, PlanError
from ridgeline.plan import Execution, Feed, Plan, Precision, Sync

EXECUTIONS = ", ".join(repr(word) for word in get_args(Execution))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"execution": "turbo"},
            f"wanted execution to be one of {EXECUTIONS}, got 'turbo' in the plan; choose one of those",
        ),
        (
            {"precision": "turbo"},
            (
                "wanted precision to be one of 'as-is', 'tf32', 'bf16', 'fp16', got 'turbo' in the plan; choose "
                "one of those"
            ),
        ),
        (
            {"workers": 1.5},
            "wanted workers as a whole number >= 1, got 1.5 in the plan; correct it",
        ),
        (
            {"threads": "2"},
            "wanted threads as a whole number >= 0, got '2' in the plan; correct it",
        ),
        ({"workers": 0}, "wanted workers >= 1, got 0 in the plan; raise it"),
        (
            {"sync": Sync(bucket_bytes=4194304)},  # type: ignore[arg-type]
            (
                "wanted sync.bucket_bytes with at least one entry, each >= 1 byte, got 4194304 in the plan; for "
                "example (4194304,)"
            ),
        ),
        (
            {"sync": Sync(bucket_bytes=(1.5,))},  # type: ignore[arg-type]
            (
                "wanted sync.bucket_bytes with at least one entry, each >= 1 byte, got (1.5,) in the plan; for "
                "example (4194304,)"
            ),
        ),
    ],
)
def test_impossible_plans(fields: dict[str, Any], message: str) -> None:
    """What no plan can say is refused where it is written, not where it is loaded again."""
    with pytest.raises(PlanError) as error:
        Plan(**fields)
    assert str(error.value) == message


@given(
    execution=st.sampled_from((*get_args(Execution), "turbo")),
    precision=st.sampled_from((*get_args(Precision), "")),
    workers=st.integers(-1, 5) | st.floats(),
    accumulate=st.integers(-1, 5) | st.booleans(),
    depth=st.integers(-1, 3) | st.floats(),
)
def test_a_plan_that_can_be_made_can_be_loaded(depth: Any, **fields: Any) -> None:
    """The constructor and the file agree on what a plan is."""
    try:
        plan = Plan(feed=Feed(depth=depth), **fields)
    except PlanError:
        return
    assert decode(Plan, encode(plan), where="plan.json") == plan


def test_an_unknown_word_in_a_file() -> None:
    """The file's own check says where the word stands."""
    data = encode(Plan()).replace(b'"eager"', b'"turbo"')
    with pytest.raises(FileFormatError, match=r"Invalid enum value 'turbo' - at `\$.execution`"):
        decode(Plan, data, where="plan.json")
