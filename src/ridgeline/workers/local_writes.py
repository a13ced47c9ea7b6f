"""What a script writes between two steps into the parameters or the optimizer of its own worker."""

from collections.abc import Iterator
from operator import attrgetter, is_

from torch import Tensor, nn
from torch.optim import Optimizer

_version = attrgetter("_version")
"""Of a tensor: how often it was written; torch has no other tally."""


class LocalWrites:
    """Finds whether parameters were written, moved or replaced, or the optimizer was loaded.

    Cost: On the host 0.5 us a parameter.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = tuple(model.parameters())
        places = [(m._parameters, n) for m in model.modules() for n in m._parameters]  # noqa: SLF001
        self._holders, self._names = zip(*places, strict=True) if places else ((), ())
        self.note()

    def note(self) -> None:
        """What was written until now is known."""
        self._versions = sum(map(_version, self._parameters))  # each of them only grows
        # Assigning to `.data` moves a parameter without a change of its version.
        self._addresses = [*map(Tensor.data_ptr, self._parameters)]
        self._held = [*self._now()]
        self._state, self._groups = self._optimizer.state, self._optimizer.param_groups

    def found(self) -> bool:
        """Whether anything was written since the last note."""
        return (
            self._versions != sum(map(_version, self._parameters))
            or self._addresses != [*map(Tensor.data_ptr, self._parameters)]
            or not all(map(is_, self._held, self._now()))
            or self.is_loaded()
        )

    def _now(self) -> Iterator[nn.Parameter | None]:
        """What the modules hold by the names of the start; a parametrization takes one away, pruning too."""
        return map(dict.get, self._holders, self._names)

    def allow(self, num_writes: int) -> None:
        """So many writes into parameters are none of a script's."""
        self._versions += num_writes

    def is_loaded(self) -> bool:
        """Whether the optimizer was loaded since the last note."""
        optimizer = self._optimizer
        return self._state is not optimizer.state or self._groups is not optimizer.param_groups
