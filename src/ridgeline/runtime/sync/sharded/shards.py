"""The part of the parameters that one worker updates: its share of every bucket, as parameters of their own.

A part of a parameter is a view of its memory, so an optimizer that updates the part updates the parameter.
Its gradient is the same place of the bucket, where the collective has left the mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ridgeline.errors import WorkloadError
from ridgeline.optimizer_forms import is_dense
from ridgeline.runtime.sync.buckets.buckets import Bucket

_MARK = "_is_part_of_a_parameter"


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterShard:
    """What a worker holds of one parameter.

    Attributes:
        parameter: The whole of it.
        bucket: In which it travels.
        position: Its place there.
        begin: First element of the worker's part, in the order of memory.
        end: Behind the last one; at `begin` where nothing of it is the worker's.
        part: The part, one-dimensional; None where the worker has none.
        address: Where the parameter was in memory when the part was made.
    """

    parameter: nn.Parameter
    bucket: Bucket
    position: int
    begin: int
    end: int
    part: nn.Parameter | None
    address: int

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a tensor that lies in memory as the parameter does."""
        return in_memory_order(whole)[self.begin : self.end]


def make_shards(
    buckets: Sequence[Bucket], rank: int, num_parts: int
) -> dict[nn.Parameter, ParameterShard]:
    """What the worker of a rank holds of each parameter.

    Args:
        buckets: Made for so many parts.
        rank: Of the worker.
        num_parts: As many as there are workers.
    """
    return {
        shard.parameter: shard
        for bucket in buckets
        for shard in _of_bucket(bucket, rank, num_parts)
    }


def _of_bucket(bucket: Bucket, rank: int, num_parts: int) -> Iterator[ParameterShard]:
    share = bucket.payload.numel() // num_parts
    for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        offset = view.storage_offset() - bucket.payload.storage_offset()
        bounds = (rank * share - offset, (rank + 1) * share - offset)
        begin, end = (min(max(int(bound), 0), parameter.numel()) for bound in bounds)
        # Of a parameter without elements each worker has all, so that the optimizer remembers what it would.
        has_part = begin < end or not parameter.numel()
        part = _part(parameter, begin, end) if has_part else None
        yield ParameterShard(
            parameter=parameter,
            bucket=bucket,
            position=position,
            begin=begin,
            end=end,
            part=part,
            address=parameter.data_ptr(),
        )


def _part(parameter: nn.Parameter, begin: int, end: int) -> nn.Parameter:
    part = nn.Parameter(in_memory_order(parameter.detach())[begin:end])
    # No class of its own: optimizers take their fast forms for torch's own alone.
    setattr(part, _MARK, True)
    return part


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a part of another one."""
    return getattr(parameter, _MARK, False)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as one line, in the order of its memory: a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def check_dense(parameters: Sequence[tuple[str, nn.Parameter]], algorithm: str) -> None:
    """Refuse parameters with gaps in their memory, of which no view is a part.

    Args:
        parameters: (name, parameter) of those that are trained.
        algorithm: Of the plan, for the message.

    Raises:
        WorkloadError: names the first one.
    """
    for name, parameter in parameters:
        if not is_dense(parameter):
            raise WorkloadError(
                f"wanted parameters without gaps in their memory for sync.algorithm={algorithm!r}, got "
                f"{name} with strides {tuple(parameter.stride())} for shape {tuple(parameter.shape)}; make "
                "it contiguous, or use another algorithm"
            )
