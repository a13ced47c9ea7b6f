"""What steps left that several comparisons of one perturbation ask for: run once where memory allows it.

A difference of an update, of gradients and of what else is written is each set beside the same few runs that
rounding and chance make different. Of a network with many small layers these runs are most of a check.
"""

from collections.abc import Callable, Hashable

from torch import Tensor

from ridgeline.runtime.steps.checks.step_difference import Outcome
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

MOST_BYTES = 1 << 30
"""Of all that is kept; a run beyond it is taken again. EfficientNet-B0 with AdamW leaves 64 MB a run."""


class KeptRuns:
    """Outcomes by what was run, up to so many bytes.

    Args:
        world: All workers keep the same, since a run that is taken again is a collective.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: dict[Hashable, list[Outcome]] = {}
        self._num_bytes = 0.0

    def get(self, what: Hashable, run: Callable[[], list[Outcome]]) -> list[Outcome]:
        """What `run` gives, or gave before for the same `what`.

        Cost: A collective where there are several workers and it is run.
        """
        # No collective before this: all workers have found the same so far.
        if what in self._found:
            return self._found[what]
        outcomes = run()
        size = largest_of_workers(float(sum(map(_num_bytes, outcomes))), self._world)
        # By the largest of all workers: one that took a run again alone would wait in its collectives.
        if self._num_bytes + size <= MOST_BYTES:
            self._found[what] = outcomes
            self._num_bytes += size
        return outcomes

    def forget(self) -> None:
        """Give the memory back: the next perturbation is another."""
        self._found.clear()
        self._num_bytes = 0.0


def _num_bytes(outcome: Outcome) -> int:
    written = [tensor for one in outcome.written.values() for tensor in (one.before, one.now)]
    state = [tensor for tensors in outcome.state for tensor in tensors]
    tensors: list[Tensor] = [*outcome.parameters, *state, *written]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
