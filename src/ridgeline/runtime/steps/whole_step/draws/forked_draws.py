"""Random numbers that a step draws while it has put random state back: no program draws them twice alike."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ridgeline.errors import CaptureError


@contextlib.contextmanager
def refusing_forked_draws() -> Iterator[None]:
    """Refuse a trace that draws inside of `torch.random.fork_rng`, as a checkpoint with dropout does.

    Random state is no operator. In a program the second forward pass of an activation checkpoint would drop
    other elements than the first, so that gradients would be of another function; where random numbers may
    be a program's own, no comparison with the eager step shows.

    Raises:
        CaptureError: at the end; errors of the trace go first.

    Source: torch/utils/checkpoint.py, releases 2.11 to 2.13, which puts state back in `fork_rng` alone.
    """
    right: Callable[..., Any] = torch.random.fork_rng
    # A list, since the function below is called by torch and cannot return it.
    forked = [0]

    @contextlib.contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        before = _num_draws()
        try:
            with right(*args, **kwargs):
                yield
        finally:  # a checkpoint leaves by an exception once it has what it needs
            forked[0] += _num_draws() - before

    torch.random.fork_rng = fork_rng  # type: ignore[assignment] - the same call
    try:
        yield
    finally:
        torch.random.fork_rng = right  # type: ignore[assignment]
    if forked[0]:
        raise CaptureError(
            "wanted a step that draws each random number once, got some that are drawn again from random "
            "state that was put back (an activation checkpoint with dropout inside), which no program does; "
            "leave dropout outside of checkpoints, or use execution='compiled' or 'eager'"
        )


def _num_draws() -> int:
    """Random operators in the graph that is being traced."""
    mode = get_proxy_mode()
    return 0 if mode is None else sum(map(is_draw, mode.tracer.graph.nodes))


def is_draw(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    target = node.target
    is_operator = isinstance(target, torch._ops.OpOverload)  # noqa: SLF001 - it has no public name
    return is_operator and torch.Tag.nondeterministic_seeded in target.tags
