"""The exchange of sparse gradients: every worker gathers the rows of all, and sums them up in their order.

First all learn what each has (so many rows, a dense gradient, or none), then all gather the numbers of the
rows and the rows themselves: two messages a worker, however many parameters there are. Each row is summed up
from the first worker to the last, so that all hold the same bits.

Where something else than its layer used a parameter, its gradient is dense on that worker: then all make
theirs dense, and the transport makes the mean.

Source: gloo sums sparse tensors by an all-gather of indices and values as well (torch 2.13), one parameter
after the other; NCCL does not sum them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.tensors.row_sums import rows_tensor, summed_rows
from ridgeline.workers.flat_collectives import all_gather, all_gather_uneven
from ridgeline.workers.world import World

_ABSENT, _DENSE = -1, -2
"""What a worker says in place of a number of rows."""


class Rows(NamedTuple):
    """The rows of a gradient: their numbers, each once, and themselves."""

    numbers: Tensor
    values: Tensor


class SparseExchange:
    """Makes sparse gradients of some parameters the mean over the workers along the data axis.

    All workers make the same calls, with the same parameters in the same order.

    Args:
        parameters: By name; at least one.
        world: This worker's place; size at least 2.
        dense_mean: Makes a flat tensor the mean over the workers, in place.

    Attributes:
        sent_bytes: Numbers and rows that this worker has handed over so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        dense_mean: Callable[[Tensor], None],
    ) -> None:
        self._parameters = tuple(parameters.values())
        self._group, self._size = world.group("data"), world.axis_size("data")
        self._device = world.device
        self._dense_mean = dense_mean
        self._scaling = Scaling.over(self._size)
        self.sent_bytes = 0

    def exchange(self) -> None:
        """Give every parameter the mean of its gradients; none where no worker has one.

        Means of rows are coalesced. A worker without a gradient counts as one of zeros.

        Cost: Three small or large exchanges, one more for each dense gradient. Waits for the device.
        """
        own = [self._own(parameter) for parameter in self._parameters]
        told = self._told([one if isinstance(one, int) else len(one.numbers) for one in own])
        by_rows: list[int] = []
        for index, parameter in enumerate(self._parameters):
            said = [counts[index] for counts in told]
            # Decided by what all said, so that every worker comes to the same collective.
            if _DENSE in said:
                self._average_dense(parameter)
            elif max(said) != _ABSENT:
                by_rows.append(index)
        rows = [_rows_of(own[index], self._parameters[index]) for index in by_rows]
        # An absent gradient says -1, and brings no rows.
        counts = [[max(0, counts[index]) for index in by_rows] for counts in told]
        if rows:
            for index, mean in zip(by_rows, self._means(rows, counts), strict=True):
                parameter = self._parameters[index]
                parameter.grad = rows_tensor(mean.numbers, mean.values, parameter.shape)

    def _own(self, parameter: nn.Parameter) -> Rows | int:
        """This worker's rows, scaled; or what it says instead."""
        gradient = parameter.grad
        if gradient is None:
            return _ABSENT
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            return _DENSE
        # Each row once: what is summed up below must not depend on how a layer repeated it.
        whole = gradient.detach().coalesce()
        return Rows(whole.indices()[0], whole.values() * self._scaling.factor)

    def _told(self, said: Sequence[int]) -> list[list[int]]:
        """What each worker says of each parameter."""
        share = torch.tensor(said, dtype=torch.int64, device=self._device)
        whole = share.new_empty(self._size, len(said))
        all_gather(whole, share, self._group)
        return whole.tolist()

    def _means(self, own: Sequence[Rows], counts: Sequence[Sequence[int]]) -> list[Rows]:
        """The mean of each parameter.

        Args:
            own: This worker's rows, by parameter.
            counts: How many each worker has, by parameter.
        """
        numbers = self._gathered([rows.numbers for rows in own], counts)
        values: list[Sequence[Tensor]] = [()] * len(own)
        # One message for each type, however many parameters have it.
        for dtype in dict.fromkeys(rows.values.dtype for rows in own):
            places = [place for place, rows in enumerate(own) if rows.values.dtype == dtype]
            part = [[row[place] for place in places] for row in counts]
            found = self._gathered([own[place].values for place in places], part)
            for place, values_of_all in zip(places, found, strict=True):
                values[place] = values_of_all
        means = []
        for brought in zip(numbers, values, strict=True):
            touched, summed = summed_rows(list(zip(*brought, strict=True)))
            self._scaling.take_back(summed)
            means.append(Rows(touched, summed))
        return means

    def _gathered(
        self, own: Sequence[Tensor], counts: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, ...]]:
        """For each of some tensors of one type those of all workers, by rank.

        Args:
            own: Those of this worker; the first dimension is that of rows.
            counts: Rows of each worker, by tensor.
        """
        flat = torch.cat([tensor.flatten() for tensor in own])
        widths = [tensor.shape[1:].numel() for tensor in own]
        lengths = [[n * width for n, width in zip(row, widths, strict=True)] for row in counts]
        shares = [flat.new_empty(sum(row)) for row in lengths]
        self.sent_bytes += flat.nbytes
        all_gather_uneven(shares, flat, self._group)
        parts = [share.split(row) for share, row in zip(shares, lengths, strict=True)]
        return [
            tuple(
                part[place].view(row[place], *tensor.shape[1:])
                for part, row in zip(parts, counts, strict=True)
            )
            for place, tensor in enumerate(own)
        ]

    def _average_dense(self, parameter: nn.Parameter) -> None:
        """The mean of dense gradients, where one is dense."""
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        # In place where it has no gaps; in another memory format it is copied, since transports want a line.
        mean = gradient.detach().contiguous()
        self._dense_mean(mean.view(-1))
        parameter.grad = mean


def _rows_of(own: Rows | int, parameter: nn.Parameter) -> Rows:
    """This worker's rows, or none of them."""
    if not isinstance(own, int):
        return own
    like = parameter.detach()
    return Rows(
        torch.empty(0, dtype=torch.int64, device=like.device), like.new_empty(0, *like.shape[1:])
    )
