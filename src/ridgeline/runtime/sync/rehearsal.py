"""A codec's work on a bucket without other workers: what the probe times (`synchronisation.REHEARSAL`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.compressed import share
from ridgeline.runtime.sync.codecs.feedback import ErrorFeedback
from ridgeline.runtime.sync.loading import load
from ridgeline.synchronisation import COMPRESSIONS
from ridgeline.synchronisation.entries import Shape


def rehearsal(
    compression: str, shapes: Sequence[Shape], workers: int, device: torch.device
) -> Callable[[], None]:
    """All that a worker does for one bucket of a step, by a compression with its default options.

    What it would hear of the others is what it sends itself, so that nothing is waited for. It may be called
    again and again: what arrives and what is left are the payload together.

    Args:
        compression: Key of an entry with a codec.
        shapes: Of the parameters in the bucket, float32.
        workers: As many payloads are decoded.
        device: On which it works.

    Raises:
        PlanError: the entry's class cannot be imported.

    Cost: Allocates the bucket, and what the codec remembers of it.
    """
    entry = COMPRESSIONS[compression]
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    bucket = Bucket(0, [(f"p{index}", p) for index, p in enumerate(parameters)])
    # As if from backward: error feedback sends nothing of a gradient that is missing.
    bucket.arrived, bucket.num_missing = [True] * len(parameters), 0
    bucket.payload.normal_()
    codec: Codec = load(entry.codec)({option.name: option.default for option in entry.options})
    codec.arranged((bucket,))
    feedback = ErrorFeedback() if entry.has_state else None
    if feedback is not None:
        feedback.arranged((bucket,))

    def gather(part: Tensor) -> Tensor:
        return part[None].repeat(workers, *[1] * part.dim())

    exchange = Exchange(entry.exchange_among(workers), _alone, gather, Tensor.clone, workers, 0)

    def run() -> None:
        share(bucket, codec, exchange, feedback)

    return run


def _alone(values: Tensor) -> None:
    """The mean over workers that all send the same."""
