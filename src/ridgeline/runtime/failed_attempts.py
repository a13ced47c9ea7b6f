"""A step that cannot be captured or compiled is refused, and leaves what it can reach as it was."""

import contextlib
from collections.abc import Iterator

from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from ridgeline.errors import CaptureError, first_line
from ridgeline.reach.undo import Undo
from ridgeline.runtime.body import StepBody

COMPILER_FAILURES = (BackendCompilerFailed, InternalTorchDynamoError)
"""What torch's compiler raises where it fails itself; what the user's code raises keeps its type."""


@contextlib.contextmanager
def unchanged_if_it_fails(body: StepBody) -> Iterator[None]:
    """Where a capture or its check raises inside, names, lists and random state are as they were.

    What the code renews under a name is the graph's then, and was never computed. Values of tensors are not
    put back: a capture changes none, and its check puts them back itself.

    Args:
        body: The step.

    Cost: Walks what the step can reach, see `Undo`; the gradients that are there live as long.
    """
    before = Undo(body.model, body.loss_fn, body.optimizer, values=False)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of a lost device, which the error itself tells
            before.restore()
        raise


@contextlib.contextmanager
def refused_if_not_compiled(body: StepBody) -> Iterator[None]:
    """A step inside that torch's compiler fails on is refused, and undone: blocks before may have run.

    Args:
        body: The step.

    Raises:
        CaptureError: the compiler fails.

    Cost: See `Undo`, with a copy of all tensors that the step can reach.
    """
    before = Undo(body.model, body.loss_fn, body.optimizer)
    try:
        yield
    except COMPILER_FAILURES as error:
        before.restore()
        raise compiler_refusal(body, "the step", error) from error


def compiler_refusal(body: StepBody, what: str, error: Exception) -> CaptureError:
    """The refusal of a step that torch's compiler fails on; `what` it was to compile."""
    return CaptureError(
        f"wanted execution={body.plan.execution!r} to compile {what}, got {first_line(error)}; "
        "use execution='eager'"
    )
