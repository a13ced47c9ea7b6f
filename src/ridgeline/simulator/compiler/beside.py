"""Weight gradients that a replayed compiled step computes beside the chain of its backward pass."""

from collections.abc import Sequence

import msgspec

from ridgeline.execution import BESIDE_BYTES, BESIDE_FLOPS
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.workload import Op, Workload

HIDDEN_SHARE = 0.33
"""Share of their time that the chain hides.

Source: assumed; a ResNet-18 (batch 32, bf16, an H200) took 1.26 ms a step with them in the chain and 1.16 ms
with them beside, of which they are 306 us.
"""
ASSUMED = (
    f"assumed: the chain of a replayed compiled backward pass hides {HIDDEN_SHARE:.0%} of the weight "
    "gradients that leave room beside them"
)


def hide_weight_gradients(workload: Workload, backward: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces of backward without what is hidden of small weight gradients; the same if there are none.

    `backward` is priced, of a compiled step that a GPU replays.
    """
    shares = _weight_shares(workload)
    movable = [piece.op for piece in backward if piece.op in shares]
    if len(movable) < 2:  # one by itself stays in the chain
        return tuple(backward)
    return tuple(
        _hidden(piece, shares[piece.op]) if piece.op in shares else piece for piece in backward
    )


def _hidden(piece: Piece, share: float) -> Piece:
    """What is seen of a piece, of which a share makes weight gradients; no kernel beats its roofline."""
    seen_s = piece.work_s * (1.0 - HIDDEN_SHARE * share)
    if seen_s <= piece.roofline_s:
        return piece
    return piece._replace(work_s=seen_s, source="assumed")


def _weight_shares(workload: Workload) -> dict[int, float]:
    """By operator, which share of its work makes the gradient of a weight and may leave the chain."""
    found: dict[int, float] = {}
    for parameter in workload.gradients:
        index = _maker(workload.ops, parameter.ready_op)
        op = workload.ops[index]
        parts = num_products(op)
        num_bytes = op.bytes_read
        if parts and op.flops / parts <= BESIDE_FLOPS and num_bytes <= BESIDE_BYTES:
            found[index] = 1.0 / parts
    return found


def _maker(ops: Sequence[Op], index: int) -> int:
    """The operator that computed what views and copies passed on."""
    while ops[index].family in ("view", "copy") and ops[index].dependencies:
        index = ops[index].dependencies[-1]
    return index


def num_products(op: Op) -> int:
    """Products that an operator of backward computes in one: a convolution's for its input and its weight."""
    if op.family == "matmul":
        return 1
    if op.family != "convolution":
        return 0
    # The mask says for which of input, weight and bias a gradient is wanted; the bias is no product.
    arguments = msgspec.json.decode(op.arguments)
    mask = arguments["args"][-1] if isinstance(arguments, dict) else None
    return sum(map(bool, mask[:2])) if isinstance(mask, list) else 1
