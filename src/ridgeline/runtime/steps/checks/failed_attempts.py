"""A step that cannot be captured or compiled is refused, and leaves what it can reach as it was."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from ridgeline.errors import CaptureError, first_line
from ridgeline.reach.undo import Undo
from ridgeline.runtime.steps.body.body import StepBody

_FAILURES = (BackendCompilerFailed, InternalTorchDynamoError)
_TORCH = Path(torch.__file__).parent
_COMPILING = _TORCH / "_dynamo" / "convert_frame.py"
_PARTS = frozenset({"_dynamo", "_functorch", "_inductor", "_subclasses", "fx"})
"""Where torch's compiler lives."""


def is_of_compiler(error: Exception) -> bool:
    """Whether torch's compiler failed itself; what the user's code raises keeps its type.

    Assertions of its own keep theirs, too: `AssertionError` for a view whose base has another dtype (2.11).
    """
    if not isinstance(error, AssertionError):
        return isinstance(error, _FAILURES)
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    # An `assert` of the user's code passes through the compiler's frames as well; the innermost one tells.
    is_torch = files[-1].is_relative_to(_TORCH)
    return _COMPILING in files and is_torch and files[-1].relative_to(_TORCH).parts[0] in _PARTS


@contextlib.contextmanager
def unchanged_if_it_fails(body: StepBody) -> Iterator[None]:
    """Where a capture or its check raises inside, names, lists and random state are as they were.

    What the code renews under a name is the graph's then, and was never computed. Values of tensors are not
    put back: a capture changes none, and its check puts them back itself.

    Cost: Walks what the step can reach, see `Undo`; the gradients that are there live as long.
    """
    before = Undo(body.model, body.loss_fn, body.optimizer, values=False)
    try:
        yield
    # Interrupts, too: they leave the graph's tensors under the user's names as errors do.
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of a lost device, which the error itself reports
            before.restore()
        raise


@contextlib.contextmanager
def refused_if_not_compiled(body: StepBody) -> Iterator[None]:
    """A step inside that torch's compiler fails on is refused, and undone: blocks before may have run.

    Raises:
        CaptureError: the compiler fails.

    Cost: See `Undo`, with a copy of all tensors that the step can reach.
    """
    before = Undo(body.model, body.loss_fn, body.optimizer)
    try:
        yield
    except Exception as error:
        if not is_of_compiler(error):
            raise
        before.restore()
        raise compiler_refusal(body, "the step", error) from error


def compiler_refusal(body: StepBody, what: str, error: Exception) -> CaptureError:
    """The refusal of a step that torch's compiler fails on; `what` it was to compile."""
    return CaptureError(
        f"wanted execution={body.plan.execution!r} to compile {what}, got {first_line(error)}; "
        "use execution='eager'"
    )
