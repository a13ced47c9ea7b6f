"""Gradients that a script keeps from one step to the next: a plain step leaves them as they are.

Gradients of parameters lie in buckets, which the next step writes over. Where somebody keeps one, or a view
of one (an optimizer the last gradient, a script those that it compares), that memory is left to who keeps it.
A captured step keeps none: its graph has the gradients that it was captured with; each replay writes them.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ridgeline.errors import WorkloadError
from ridgeline.runtime.sync.buckets.buckets import Bucket, is_at
from ridgeline.tensors.kept_gradients import num_uses


class KeptInBuckets:
    """Buckets, and how many tensors share the memory of each while nobody keeps a gradient.

    Args:
        buckets: Newly cut: no parameter has a gradient in them yet.
        is_shared: Whether other workers read that memory, so that it cannot be left.
    """

    def __init__(self, buckets: Sequence[Bucket], *, is_shared: bool) -> None:
        self._usual = [(bucket, num_uses(bucket.flat)) for bucket in buckets]
        self._is_shared = is_shared
        self._is_captured = False
        self._of_graphs: list[list[weakref.ref[Tensor]]] = [[] for _ in buckets]

    def leave_to_graph(self) -> None:
        """Behind a backward pass: where it is captured, the gradients that are there now are its graph's."""
        if self._is_captured:
            for (bucket, _), mine in zip(self._usual, self._of_graphs, strict=True):
                mine.extend(map(weakref.ref, _shown(bucket)))

    def are_any(self) -> bool:
        """Whether tensors lie there that are no parameter's gradient; False while a step is captured.

        Raises:
            WorkloadError: some do, and other workers read that memory.

        Cost: 0.3 us a bucket; where some gradients were not cleared, or are a graph's, 0.3 us a parameter.
        """
        self._is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._is_captured:
            return False  # of graphs `GraphGradients` knows
        found = any(
            (more := num_uses(bucket.flat) - usual) > 0 and more > _num_known(bucket, mine)
            for (bucket, usual), mine in zip(self._usual, self._of_graphs, strict=True)
        )
        if found and self._is_shared:
            raise WorkloadError(
                "wanted steps after which nobody keeps a gradient for a sync.algorithm whose workers read "
                "each other's memory, got one that is kept, or a view of one; keep p.grad.clone(), or use "
                "another algorithm"
            )
        return found


def _shown(bucket: Bucket) -> Iterator[Tensor]:
    """The gradients of parameters that lie in the bucket."""
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        gradient = parameter.grad
        if gradient is not None and is_at(gradient, view):
            yield gradient


def _num_known(bucket: Bucket, of_graphs: Sequence["weakref.ref[Tensor]"]) -> int:
    """Tensors in the bucket's memory that parameters have now or that a graph has, each once."""
    known = [*_shown(bucket), *(one() for one in of_graphs)]
    return len({id(one) for one in known if one is not None})
