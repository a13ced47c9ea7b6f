"""Bytes that a layer sends under data and under model parallelism, and its intensity on the wire.

Both ways share a layer's FLOP equally, so whichever sends fewer bytes has the higher intensity. Convolutions
have few weights and large activations, fully connected layers the reverse: so the former are shared by their
samples, the latter by their outputs, unless the batch is large.

Bytes are those that go out over one worker's link in one step; as many come in at the same time.
"""

import math

from ridgeline.laws.arguments import check
from ridgeline.laws.collectives import CollectiveOperation, bus_bandwidth_factor

SUM: CollectiveOperation = "all_reduce"
"""What adds up gradients: those of weights between samples, those of inputs between columns."""
OUTPUTS: CollectiveOperation = "all_gather"
"""What puts columns of outputs together."""


def data_parallel_bytes(gradient_bytes: float, workers: int) -> float:
    """Bytes that each worker sends when the workers share the samples: an all-reduce of the gradients.

    Args:
        gradient_bytes: Of the layer's parameters, on each worker.
        workers: Number of workers; one alone sends nothing.

    Raises:
        LawError: a number is out of range.

    Source: Patarasuk, Yuan 2009 (see `ring_all_reduce_seconds`): 2 (n-1)/n |W|.

    Example:
        >>> data_parallel_bytes(1e6, 4)
        1500000.0
    """
    check("gradient_bytes", gradient_bytes, least=0.0)
    return bus_bandwidth_factor(SUM, workers) * gradient_bytes


def model_parallel_bytes(gathered_bytes: float, reduced_bytes: float, workers: int) -> float:
    """Bytes that each worker sends when the layer is split by columns, that is, by its outputs.

    Each worker has all samples and computes its share of the outputs. Forward these are gathered, so that
    the next layer's columns have their whole input; backward each worker has a part of the sum that is the
    input's gradient. Gradients of weights stay where the weights are.

    Args:
        gathered_bytes: Outputs of the layer, of all samples of all workers.
        reduced_bytes: Inputs whose gradient is wanted, of all samples; 0 for the first layer.
        workers: Number of workers; one alone sends nothing.

    Raises:
        LawError: a number is out of range.

    Source: Gholami, Azad, Jin, Keutzer, Buluc, "Integrated model, batch and domain parallelism in training
        neural networks", SPAA 2018: an all-gather of the outputs and an all-reduce of the inputs' gradients,
        (n-1)/n |Y| + 2 (n-1)/n |X|. The same collectives are counted of torch's `ColwiseParallel` with
        replicated outputs, and described of Megatron-LM's column-parallel layer with gathered output.

    Example:
        A 3 x 3 convolution of 256 channels on 14 x 14 pixels and a fully connected layer of 25088 x 4096,
        128 samples, 8 workers. The convolution sends a 16th under data parallelism, the fully connected layer
        a 30th under model parallelism:

        >>> weights, outputs = 4 * 256 * 256 * 9, 4 * 128 * 256 * 14 * 14
        >>> model_parallel_bytes(outputs, outputs, 8) / data_parallel_bytes(weights, 8)
        16.333333333333332
        >>> weights, inputs, outputs = 4 * 25088 * 4096, 4 * 128 * 25088, 4 * 128 * 4096
        >>> round(data_parallel_bytes(weights, 8) / model_parallel_bytes(outputs, inputs, 8), 1)
        29.6
    """
    check("gathered_bytes", gathered_bytes, least=0.0)
    check("reduced_bytes", reduced_bytes, least=0.0)
    forward = bus_bandwidth_factor(OUTPUTS, workers) * gathered_bytes
    return forward + bus_bandwidth_factor(SUM, workers) * reduced_bytes


def wire_intensity(flops: float, num_bytes: float) -> float:
    """FLOP that a worker does per byte that it sends; infinite where it sends nothing.

    Below the ridge point of computing unit and link (`ridge_point`) sending takes longer than computing,
    however well the two overlap.

    Args:
        flops: Of one worker.
        num_bytes: That it sends.

    Raises:
        LawError: a number is out of range.

    Source: Williams, Waterman, Patterson 2009, with the link in place of the memory.

    Example:
        Trained with 128 samples on 8 workers (3 x as many FLOP as forward), an LSTM of 1024 units over 20
        steps does more FLOP a byte under model parallelism, but even so an eighth of what that convolution
        does under data parallelism:

        >>> share, weights = 3 * 2 * 128 / 8, 3 * 3 * 256 * 256
        >>> round(wire_intensity(share * weights * 14 * 14, data_parallel_bytes(4 * weights, 8)))
        2688
        >>> weights, states = 4 * 1024 * 2048, 4 * 128 * 20 * 1024
        >>> round(wire_intensity(share * weights * 20, data_parallel_bytes(4 * weights, 8)))
        274
        >>> round(wire_intensity(share * weights * 20, model_parallel_bytes(states, 2 * states, 8)))
        351
    """
    check("flops", flops, least=0.0)
    check("num_bytes", num_bytes, least=0.0)
    return flops / num_bytes if num_bytes else math.inf


def samples_of_equal_bytes(samples: float, data_bytes: float, model_bytes: float) -> float:
    """Samples of all workers with which both ways send as much; with more, data parallelism sends less.

    Weights do not grow with the batch, activations do, in proportion.

    Args:
        samples: With which the bytes were counted.
        data_bytes: Under data parallelism.
        model_bytes: Under model parallelism, above 0.

    Raises:
        LawError: a number is out of range.

    Source: the two formulas above, set equal.

    Example:
        >>> samples_of_equal_bytes(128, 29.6, 1.0)
        3788.8
    """
    check("samples", samples, above=0.0)
    check("data_bytes", data_bytes, least=0.0)
    return samples * data_bytes / check("model_bytes", model_bytes, above=0.0)
