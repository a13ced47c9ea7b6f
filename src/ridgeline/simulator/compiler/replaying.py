"""What replaying a step, or the model in it, costs beside its kernels."""

from ridgeline.simulator.compiler.call_costs import handing
from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.dataflow import spec_bytes
from ridgeline.simulator.pricing.pieces import Piece, PricedStep
from ridgeline.workload import Workload

CALL_DISPATCHES = 4.0
"""What a step that a GPU replays costs the host beside the replay, in dispatches of a forward operator: its
batch is looked at and copied, its loss handed out, the step written down.

Source: measured, four small steps on two hosts of an H200 with 12 to 14 us a dispatch: 44 to 61 us.
"""
MODEL_DISPATCHES = 10.0
"""Replaying the model forward or backward, beside what handing over parameters takes. Source: assumed."""


def loading(list_: Prices, workload: Workload, first: Piece) -> Piece:
    """Copying the batch to where a replay reads it, and the start of the replay, before the `first` piece."""
    # What stays on the host is no part of the captured step.
    sizes = [spec_bytes(spec) for spec in workload.batch if not spec.on_host]
    copied_s = sum(list_.copy_seconds(2 * size) for size in sizes)
    work_s = copied_s + list_.dispatch("graph_start")
    return Piece("load batch", first.module, work_s=work_s, num_bytes=2 * sum(sizes))


def with_replayed_model(list_: Prices, workload: Workload, priced: PricedStep) -> PricedStep:
    """The step whose model is replayed: the host issues two replays instead of what the model is made of.

    The model is taken to be everything from the start of the step to the last operator of a module, and in
    backward from the first such operator on; what the loss function computes first counts as part of it.
    """
    ops = workload.ops
    of_modules = [index for index, op in enumerate(ops) if op.module]
    forward_end = max((i for i in of_modules if ops[i].phase == "forward"), default=-1)
    begin = min((i for i in of_modules if ops[i].phase == "backward"), default=len(ops))
    call_s = list_.dispatch("forward")
    # A replay is issued in one call: nothing in it is issued, or waits for values, by itself.
    forward = [_unissued(p) if _op(p) <= forward_end else p for p in priced.forward]
    backward = [_unissued(p) if _op(p) >= begin or _op(p) < 0 else p for p in priced.backward]
    if forward:
        load = loading(list_, workload, forward[0])
        dispatches = MODEL_DISPATCHES + handing("forward", workload)
        forward.insert(0, load._replace(host_s=dispatches * call_s))
    if backward:
        module, start_s = backward[0].module, list_.dispatch("graph_start")
        replay = Piece("replay backward", module, work_s=start_s, host_s=MODEL_DISPATCHES * call_s)
        handing_s = handing("backward", workload) * call_s
        gradients = Piece("hand over gradients", module, host_s=handing_s)
        # The loss function's own backward comes first, and is issued operator by operator.
        at = next((i for i, p in enumerate(backward) if _op(p) >= begin), len(backward))
        backward.insert(at, replay)
        backward.append(gradients)  # while the graph runs
    return priced._replace(forward=tuple(forward), backward=tuple(backward))


def _unissued(piece: Piece) -> Piece:
    """The piece as part of a replay."""
    return piece._replace(host_s=0.0, waits=False)


def _op(piece: Piece) -> int:
    """The operator that a piece stands for; of a fused one its first."""
    return min(piece.members) if piece.members else piece.op
