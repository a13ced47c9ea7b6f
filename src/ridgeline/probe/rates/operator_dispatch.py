"""What one small operator of each class costs the host: its call, its record for backward, and backward.

`dispatch` has the mean over a small network, with which steps are predicted; this separates the classes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.errors import MachineError
from ridgeline.host.speed import HOST_SPEED
from ridgeline.machine import Machine, Setting
from ridgeline.machine.operator_dispatch import OperatorClass, OperatorDispatch
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.fields import forgotten, measured_apart, warned
from ridgeline.probe.timing import synchronize
from ridgeline.probe.turns import in_turns

SIDE = 8
"""Of the tensors: their work takes well under the microseconds of a call."""
LONG, SHORT = 128, 16
"""Calls of a chain. Backward is timed over both, so that its start is not in the seconds of a call."""
FOREACH = 8
"""Parameters that one call of the optimizer's operator updates."""
ROUNDS, LEAST_S = 61, 4.0
PREFIX = "no dispatch by class of operator: "


class SmallCall(NamedTuple):
    """A call that takes a tensor and returns one of the same shape: chains of it have any length.

    `weights` holds, for each call of a chain, what it uses beside its input. `has_gradient` says whether the
    chain can be gone back through.
    """

    kind: OperatorClass
    call: str
    function: Callable[..., Tensor]
    start: Tensor
    weights: Sequence[tuple[Tensor, ...]]
    has_gradient: bool = True


class CallSeconds(NamedTuple):
    """Host seconds of one call: without a record, with one, and of its backward."""

    plain: float
    recorded: float
    backward: float


def with_operator_dispatch(
    machine: Machine, keep: Callable[[Machine], Machine], say: Callable[[str], None]
) -> Machine:
    """The profile with what calls of each class cost the host, if it lacks that, kept.

    Arguments as of `fields.with_fields`.

    Cost: one core for about 10 s, in a process of its own. What fails there costs the figures, and a warning
        says so.
    """
    device = machine.device_kind
    machine = forgotten(machine, PREFIX)
    if any(entry.device == device for entry in machine.operator_dispatch):
        return machine
    say(f"dispatch: classes of operators on {device}")
    try:
        one = Setting(device=device, threads=1)
        reply = measured_apart(f"{__name__}:in_worker", device.encode(), one)
    except MachineError as error:
        return warned(machine, f"{PREFIX}{error}")
    found = msgspec.json.decode(reply, type=tuple[OperatorDispatch, ...])
    every = (*machine.operator_dispatch, *found)
    return keep(msgspec.structs.replace(machine, operator_dispatch=every))


def in_worker(request: bytes) -> bytes:
    """Target of `run_in_group`: what calls cost on the device that is named, as JSON."""
    place = request.decode()
    device = torch.device(place, torch.cuda.current_device()) if place == "cuda" else place
    return msgspec.json.encode(measure_operator_dispatch(torch.device(device)))


def measure_operator_dispatch(device: torch.device) -> tuple[OperatorDispatch, ...]:
    """Host seconds of a call of each class, all classes in turns.

    Chains of calls on tensors of 8 x 8 are issued as a script issues them: without a record for backward,
    with one, and gone back through. On a GPU nothing waits for what was issued before a chain ends.

    Source: seconds of a chain divided by its calls; backward by the difference of two lengths of chain.

    Cost: one core for about 5 s.
    """
    calls = small_calls(device)
    for call in calls:
        seconds_of(call)  # warms up
    HOST_SPEED.wait()
    loops = {call.kind: partial(seconds_of, call) for call in calls}
    found = in_turns(loops, ROUNDS, LEAST_S)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return tuple(_dispatch(kind, call, found[call.kind]) for call in calls)


def small_calls(device: torch.device) -> tuple[SmallCall, ...]:
    """One call for each class, the commonest of a training step."""

    def made(*shape: int, gradient: bool = True) -> Tensor:
        return torch.rand(shape, device=device).requires_grad_(gradient)

    square, image = f"of {SIDE} x {SIDE}", f"of {SIDE} x {SIDE}, 4 channels"
    none: list[tuple[Tensor, ...]] = [()] * LONG
    matrices = [(made(SIDE, SIDE),) for _ in range(LONG)]
    kernels = [(made(4, 4, 3, 3),) for _ in range(LONG)]
    scales = [(made(SIDE), made(SIDE)) for _ in range(LONG)]
    start, batch = made(SIDE, SIDE), made(1, 4, SIDE, SIDE)
    parameters = [made(SIDE, SIDE, gradient=False) for _ in range(2 * FOREACH)]
    update = SmallCall(
        "optimizer",
        f"_foreach_add_ to {FOREACH} {square}",
        _foreach(parameters[:FOREACH], parameters[FOREACH:]),
        made(1, gradient=False),
        none,
        has_gradient=False,
    )
    return (
        SmallCall("elementwise", f"relu {square}", torch.relu, start, none),
        SmallCall("reduction", f"sum of rows {square}", _rows, start, none),
        SmallCall("matmul", f"mm {square}", torch.mm, start, matrices),
        SmallCall("convolution", f"conv2d 3 x 3 {image}", _convolved, batch, kernels),
        SmallCall("normalization", f"layer_norm {square}", _normalized, start, scales),
        SmallCall("view", f"t {square}", torch.t, start, none),
        SmallCall("random", f"dropout {square}", _dropped, start, none),
        SmallCall("copy", f"clone {square}", torch.clone, start, none),
        update,
    )


def seconds_of(call: SmallCall, clock: Callable[[], float] = time.perf_counter) -> CallSeconds:
    """Host seconds of one call; those with a record are 0 where no gradient passes.

    Cost: 288 calls and, where gradients pass, backward of 144; synchronises the device before each chain.
    """
    with torch.no_grad():
        _chain(call, SHORT)  # another class came before
        synchronize()
        begin = clock()
        _chain(call, LONG)
        plain_s = (clock() - begin) / LONG
    if not call.has_gradient:
        return CallSeconds(plain_s, 0.0, 0.0)
    with torch.enable_grad():
        _, short_s = _there_and_back(call, SHORT, clock)
        recorded_s, long_s = _there_and_back(call, LONG, clock)
    return CallSeconds(plain_s, recorded_s / LONG, max(0.0, (long_s - short_s) / (LONG - SHORT)))


def _there_and_back(call: SmallCall, count: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a recorded chain, and of its backward."""
    # Accumulating into gradients that are there costs an addition each.
    for leaf in (call.start, *(weight for each in call.weights for weight in each)):
        leaf.grad = None
    synchronize()
    begin = clock()
    end = _chain(call, count)
    there_s = clock() - begin
    # Before the clock, since a step's comes from the loss.
    gradient = torch.ones_like(end)
    synchronize()
    begin = clock()
    end.backward(gradient)
    return there_s, clock() - begin


def _chain(call: SmallCall, count: int) -> Tensor:
    x, function = call.start, call.function
    for weights in call.weights[:count]:
        x = function(x, *weights)
    return x


def _dispatch(
    device: Literal["cpu", "cuda"], call: SmallCall, taken: Sequence[CallSeconds]
) -> OperatorDispatch:
    plain, recorded, backward = (Sampled.measured(each, "s") for each in zip(*taken, strict=True))
    return OperatorDispatch(
        device=device,
        kind=call.kind,
        call=call.call,
        plain=plain,
        recorded=recorded if call.has_gradient else None,
        backward=backward if call.has_gradient else None,
    )


def _rows(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True)


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    return functional.conv2d(x, weight, padding=1)


def _normalized(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, (SIDE,), scale, shift)


def _dropped(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, training=True)


def _foreach(parameters: list[Tensor], gradients: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def update(x: Tensor) -> Tensor:
        torch._foreach_add_(parameters, gradients, alpha=-1e-3)
        return x

    return update
