"""Deep gradient compression: only the largest elements are sent, and the others wait until they are large.

What waits is the sum of all that was not sent. With the option `momentum` it is the sum of momenta instead,
as if an optimizer had accumulated each element until it was sent; the optimizer's own is to be 0 then.

Gradients are not clipped here: `clip_norm` clips what arrived, which is the sum of several steps for the few
elements that arrived. The paper clips each worker's gradient before, to 1 / sqrt(workers) of the norm; a loss
function that needs it does so itself.

Source: Lin et al., "Deep gradient compression", ICLR 2018.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Exchange
from ridgeline.runtime.sync.codecs.exchanges import Parts, RowCodec
from ridgeline.runtime.sync.codecs.parameter_memory import ParameterMemory
from ridgeline.runtime.sync.codecs.tiles import TILE_ELEMENTS
from ridgeline.synchronisation import OptionValue, kept_elements

_FALL = 0.25
"""By this factor the density falls from one stage of the warm-up to the next. Source: the paper."""
_STEPS = "warmup_steps_done"
_SAMPLE_ELEMENTS = 1 << 14
_MARGIN = 1.25
"""By so much more elements are looked at than are kept, so that a sample seldom lets through too few."""


class TopK(RowCodec):
    """Exactly as many elements of a bucket in every step, by magnitude; a NaN counts as the largest.

    With `warmup_steps` the density falls from a quarter to the plan's in stages of equal length. A change of
    stage changes shapes, so that captured steps refuse it; between changes shapes are fixed.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self._momentum = float(options["momentum"])
        self._momenta = ParameterMemory("momentum") if self._momentum else None
        self._warmup_steps = int(options["warmup_steps"])
        self._steps = 0
        self._saved_steps: Tensor | None = None

    def encode(self, rows: Tensor) -> Parts:
        """int32 [rows, 2, kept]: the bits of the values, and their positions."""
        kept = kept_elements(rows.shape[1], self.density)
        positions = torch.stack([largest_positions(row, kept) for row in rows])
        values = rows.gather(1, positions)
        # Bits of floats beside int32 positions: one tensor of one type, so one collective sends both.
        return (torch.stack((values.view(torch.int32), positions.int()), 1),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """Zero where nothing was sent."""
        values, positions = _values_and_positions(parts[0])
        rows = values.new_zeros((len(values), num_elements))
        return rows.scatter_(1, positions, values)

    @property
    def density(self) -> float:
        """Fraction of the elements that the coming step sends."""
        return density_after(self._steps, float(self.options["density"]), steps=self._warmup_steps)

    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """All gather what is kept of each; what is sent loses its momentum as well."""
        momenta = None if self._momenta is None else self._momenta.of(bucket)
        held: list[tuple[Tensor, Tensor]] = []
        if momenta is not None:
            held = self._accelerate(values, bucket, momenta)
        encoded = self.encode(values[None])[0]
        mean.zero_()
        gathered = exchange.gather(encoded)[:, 0]
        for row_values, row_positions in zip(*_values_and_positions(gathered), strict=True):
            # Rank after rank: within one, no position comes twice, so that the order of additions is fixed.
            mean.index_add_(0, row_positions, row_values)
        mean.div_(exchange.size)
        positions = encoded[0, 1].long()
        # What stays in `values` is what was not sent; the next step adds its gradients to it.
        values.index_fill_(0, positions, 0.0)
        if momenta is not None:
            momenta.index_fill_(0, positions, 0.0)
        # Behind that: zeros of parameters without a gradient are sent where a bucket has little else.
        for place, before in held:
            place.copy_(before)
        if self._warmup_steps and bucket.index == self._last:
            self._advance()

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Keep the momenta of each parameter, wherever it lies now."""
        self._last = max((b.index for b in buckets if b.payload.numel()), default=-1)
        if self._momenta is not None:
            self._momenta.arranged(buckets)
        if self._warmup_steps and buckets and self._saved_steps is None:
            self._saved_steps = torch.zeros((), device=buckets[0].payload.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Momenta by parameter, and how far the warm-up has come."""
        found = {} if self._momenta is None else self._momenta.state_dict()
        if self._saved_steps is not None:
            found[_STEPS] = self._saved_steps
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from there.

        Cost: In a warm-up, waits for the device.
        """
        if self._momenta is not None:
            self._momenta.load_state_dict(state)
        if self._saved_steps is not None:
            saved = state.get(_STEPS)
            self._steps = 0 if saved is None else int(saved.item())
            self._saved_steps.fill_(self._steps)

    def _accelerate(
        self, values: Tensor, bucket: Bucket, momenta: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Add to what is waiting to be sent what momentum does in this step.

        Returns:
            Places of parameters without a gradient, and their momenta, which stay as optimizers leave them.
        """
        places = [bucket.place(position, momenta) for position in bucket.missing]
        held = [(place, place.clone()) for place in places]
        # `values` has this step's payload already, so only the momentum of earlier steps is added to it.
        momenta.mul_(self._momentum)
        for place in places:
            place.zero_()
        values.add_(momenta)
        # A NaN or an infinity would stay in the momenta for all later steps, however small the factor.
        momenta.add_(bucket.payload).nan_to_num_(0.0, 0.0, 0.0)
        return held

    def _advance(self) -> None:
        self._steps = min(self._steps + 1, self._warmup_steps)
        assert self._saved_steps is not None
        self._saved_steps.fill_(self._steps)


def density_after(num_steps: int, density: float, *, steps: int) -> float:
    """The density after some steps, of a warm-up of `steps`.

    Args:
        num_steps: That are over.
        density: After the warm-up.
        steps: Of the warm-up; 0 for none.
    """
    stages: list[float] = []
    while (stage := _FALL ** (len(stages) + 1)) > density:
        stages.append(stage)
    if num_steps >= steps or not stages:
        return density
    return stages[num_steps * len(stages) // steps]


def largest_positions(row: Tensor, kept: int) -> Tensor:
    """Positions of the elements that are largest in magnitude; a NaN counts as the largest.

    On a CPU selecting among all takes ten times as long as reading them, so it is among those only that reach
    what a sample says they must. Source: the paper, 3.1 of its appendix (hierarchical selection).
    """
    if row.device.type == "cpu" and row.numel() > TILE_ELEMENTS:
        sample = row[:: max(1, row.numel() // _SAMPLE_ELEMENTS)].abs()
        rank = min(len(sample), round(_MARGIN * kept / row.numel() * len(sample)) + 1)
        least = torch.topk(sample, rank, sorted=False).values.min()
        # What is not below it: so a NaN is taken as well.
        above = [(part.abs() < least).logical_not_().nonzero() for part in row.split(TILE_ELEMENTS)]
        starts = range(0, row.numel(), TILE_ELEMENTS)
        found = torch.cat([part.add_(start) for part, start in zip(above, starts, strict=True)])
        if len(found) >= kept:
            found = found.view(-1)
            return found[torch.topk(row[found].abs(), kept, sorted=False).indices]
    return torch.topk(row.abs(), kept, sorted=False).indices


def _values_and_positions(coded: Tensor) -> tuple[Tensor, Tensor]:
    values, positions = coded.unbind(1)
    return values.contiguous().view(torch.float32), positions.long()
