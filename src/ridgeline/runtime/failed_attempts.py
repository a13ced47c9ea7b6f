"""A step that cannot be captured is refused, and leaves what it can reach as it was."""

import contextlib
from collections.abc import Iterator

from ridgeline.reach.undo import Undo
from ridgeline.runtime.body import StepBody


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
