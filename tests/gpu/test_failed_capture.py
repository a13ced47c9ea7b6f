"""A process goes on after a capture that failed."""

from typing import Any

import pytest
import torch
from gpu_programs import FAILURES, fail_a_capture

from ridgeline.lint.child_trial import try_in_child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FILLS = "fills memory"


def kinds(known: Any) -> list[Any]:
    """The ways to fail, of which one takes all memory, so that others on the GPU would fail beside it."""
    return [pytest.param(kind, marks=pytest.mark.quiet if kind == FILLS else ()) for kind in known]


@pytest.mark.parametrize("kind", kinds(FAILURES))
def test_a_process_goes_on(kind: str) -> None:
    """It draws random numbers and captures, on the stream that it was on; in a child, should it not."""
    outcome = try_in_child(fail_a_capture, {"kind": kind, "wants_memory": False})
    assert outcome.status == "ok", outcome


@pytest.mark.parametrize(
    "kind",
    [
        "reads",
        "leaves a stream",
        pytest.param(
            FILLS,
            marks=[
                pytest.mark.quiet,
                pytest.mark.xfail(reason="on an H100, torch 2.11, what was taken stays reserved"),
            ],
        ),
    ],
)
def test_memory_is_given_back(kind: str) -> None:
    """What the capture took is free for others."""
    outcome = try_in_child(fail_a_capture, {"kind": kind, "wants_memory": True})
    assert outcome.status == "ok", outcome
