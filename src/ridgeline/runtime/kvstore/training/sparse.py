"""Parameters whose gradients are sparse rows: they are pushed behind backward, each by itself.

A gradient is dense all the same where something else than the embedding used its weights. What one worker
pushes as rows all push as rows, so they agree on that, and on who has a gradient at all.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.runtime.kvstore.training.transport import StoreTransport
from ridgeline.tensors.row_sums import rows_tensor


class StoredSparseGradients:
    """Pushes the gradients of some parameters, and pulls these.

    Args:
        parameters: By key.
        transport: Has the store.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], transport: StoreTransport) -> None:
        self._parameters = dict(parameters)
        self._transport = transport
        self._taken: dict[str, Tensor | None] = {}

    def take(self) -> None:
        """Backward is over: the gradients are the store's."""
        for name, parameter in self._parameters.items():
            # Taken away, or the user's optimizer would make an update of its own.
            self._taken[name], parameter.grad = parameter.grad, None

    def exchange(self) -> None:
        """Push what was taken, and bring the updated values into the parameters.

        Raises:
            EngineError: a push failed, or the update by it.
        """
        if not self._taken:
            return
        gradients = {**self._taken}
        self._taken.clear()
        said = [
            (one is not None, one is not None and not one.is_sparse) for one in gradients.values()
        ]
        for (name, gradient), (is_used, is_dense) in zip(
            gradients.items(), self._agreed(said), strict=True
        ):
            # No push at all where nobody has a gradient: one of zeros would still move momenta.
            if is_used:
                parameter = self._parameters[name]
                value = _as_agreed(gradient, parameter, is_dense=is_dense) * self._transport.scale
                self._transport.store.pushpull(name, value, parameter.detach())

    def _agreed(self, said: Sequence[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
        """Whether any worker has a gradient, and whether any has a dense one."""
        if not self._transport.waits:
            # Where a bound is set, others wait for a push of each key: one without rows will do.
            return [(is_used or self._transport.pushes_all, is_dense) for is_used, is_dense in said]
        told = torch.tensor(said, dtype=torch.int32, device=self._transport.world.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._transport.group)
        return [(bool(is_used), bool(is_dense)) for is_used, is_dense in told.tolist()]


def _as_agreed(gradient: Tensor | None, like: Tensor, *, is_dense: bool) -> Tensor:
    """The gradient as all workers push theirs; nothing but zeros where this one has none."""
    if gradient is None and is_dense:
        return torch.zeros_like(like)
    if gradient is None:
        none = torch.empty(0, dtype=torch.int64, device=like.device)
        return rows_tensor(none, like.new_empty(0, *like.shape[1:]), like.shape)
    return gradient.to_dense() if is_dense and gradient.is_sparse else gradient
