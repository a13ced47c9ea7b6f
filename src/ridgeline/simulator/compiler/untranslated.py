"""Parts of a model that torch's compiler leaves as they were written, whatever it is asked."""

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.simulator.pricing.dataflow import operator_name
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, Workload

RECURRENT = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh", "rnn_relu")
SIZED_BY_VALUES = (
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
"""Beside an index of booleans."""
READS_VALUES = ("_local_scalar_dense", "item")


def untranslated(workload: Workload) -> Callable[[Op], bool]:
    """Tells which operators run as they were written when loss and model are compiled.

    Those of a module that holds a recurrent layer, and of one in which values decide about shapes or go to
    the host; and of all modules beneath.

    Source: torch/_dynamo (2.11 to 2.13): functions that reach a recurrent layer are not translated unless
    `allow_rnn` is set, nor are those of torch's own containers; a loop with a break runs as it was written.
    A mixture of experts, a network with packed sequences and one of convolutions and a GRU took as long
    compiled as eager (one H200).
    """
    recurrent, decided = _left_alone(workload)
    return _beneath_any(recurrent | decided)


def translated_in_pieces(workload: Workload) -> Callable[[Op], bool]:
    """Tells which of them are compiled all the same, in pieces between the places where values decide.

    What they take then is about what they take as written, and compiling what it takes of one piece.
    """
    _, decided = _left_alone(workload)
    return _beneath_any(decided)


def has_sizes_by_values(workload: Workload) -> bool:
    """Whether values decide about shapes within a module of the model, so that no graph can hold it."""
    return any(
        op.phase == "forward" and op.module and _is_sized_by_values(op) for op in workload.ops
    )


def _is_sized_by_values(op: Op) -> bool:
    name = operator_name(op)
    return name in SIZED_BY_VALUES or (name == "index" and op.waits_for_device)


class _Left(NamedTuple):
    """Paths of modules whose code is not translated as a whole; the empty one is the whole model."""

    recurrent: frozenset[str]
    decided_by_values: frozenset[str]


@kept_by_identity(64)
def _left_alone(workload: Workload) -> _Left:
    recurrent, decided = set(), set()
    for op in workload.ops:
        if op.phase != "forward" or not op.module:
            continue
        name = operator_name(op)
        if name in RECURRENT:
            # The module that calls the layer is what dynamo gives up on, and all beneath it.
            recurrent.add(op.module.rpartition(".")[0])
        elif name in READS_VALUES or _is_sized_by_values(op):
            decided.add(op.module)
    return _Left(frozenset(recurrent), frozenset(decided))


def _beneath_any(paths: frozenset[str]) -> Callable[[Op], bool]:
    return lambda op: any(_is_beneath(op.module, path) for path in paths)


def _is_beneath(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")
