"""Calls of a model that set up its parameters: a scale taken from the first batch, say.

A graph of such a call would set them up in each replay, and what `.data = ...` puts into a parameter lies in
the memory of that graph. What every call does so is found by looking, see `inspection`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_Parameters = dict[str, tuple[int, Tensor]]
"""By name, where each lies and what it holds."""


class WrittenParameters:
    """What two calls of a model have left in its parameters, of which it keeps copies."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[_Parameters] = []
        self._note()

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, after which is noted what it left."""

        def run(*args: Any) -> Any:
            result = call(*args)
            self._note()
            return result

        return run

    def are_first(self) -> bool:
        """Whether the first call wrote or moved some, and the last one none.

        Cost: Waits for the device.
        """
        before, *_, after, last = self._seen
        return _has_changed(before, after) and not _has_changed(after, last)

    def restore(self) -> None:
        """Write back what the parameters held; where they are is not touched."""
        before = self._seen[0]
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                # Only where it differs: a write counts as one to whoever watches versions.
                if name in before and not torch.equal(parameter, before[name][1]):
                    parameter.data.copy_(before[name][1])

    def _note(self) -> None:
        # Compared later: whoever watches the call would see that wait for the device.
        self._seen.append(
            {
                name: (parameter.data_ptr(), parameter.detach().clone())
                for name, parameter in self._model.named_parameters()
            }
        )


def _has_changed(before: _Parameters, now: _Parameters) -> bool:
    return any(
        before[name][0] != place or not torch.equal(before[name][1], values)
        for name, (place, values) in now.items()
        if name in before
    )


@contextlib.contextmanager
def written_parameters(model: nn.Module) -> Iterator[WrittenParameters]:
    """What two calls inside do to parameters; afterwards these have the values that they had.

    Cost: Three copies of the parameters; waits for the device.
    """
    found = WrittenParameters(model)
    try:
        yield found
    finally:
        found.restore()
