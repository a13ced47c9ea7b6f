"""The optimizer's part of a recorded step, in its steady state."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim import Optimizer

from ridgeline.errors import WorkloadError
from ridgeline.optimizer_forms import takes_fused_form
from ridgeline.tensors.operator_text import dtype_name
from ridgeline.tracing.operators.operands import storage_address
from ridgeline.tracing.operators.traffic import tensor_bytes
from ridgeline.tracing.recorder import Record, StepRecorder, use_of
from ridgeline.tracing.storages import Storages
from ridgeline.tracing.subject import Subject

_COUNTERS = {"step": 1000.0, "mu_product": 0.5}
"""Numbers to continue with where an optimizer reads a scalar of its state: a step count beyond any warm-up
(RAdam has another rule for its first steps), and NAdam's momentum product, which lies in (0, 1)."""


@dataclass(frozen=True)
class Stepping:
    """What became of the optimizer.

    `fused_bytes` is what it moves in its fused form, 0 where it has none; `note` says why its ops are
    estimated, or is empty.
    """

    fused_bytes: int
    note: str = ""


def record_optimizer(subject: Subject, recorder: StepRecorder, users: Optimizer) -> Stepping:
    """Record `optimizer.step()` as it runs once its state exists, that is from the second step on.

    Where an optimizer cannot run without data, each of its parameter groups is entered as one op
    `ridgeline.optimizer_step.<class>` that reads parameters, gradients and state once and writes
    parameters and state once.

    Args:
        subject: The step, after its backward pass; a real one has made a step before.
        recorder: Active, in the phase of the optimizer.
        users: The optimizer as the user made it.
    """
    optimizer = subject.optimizer
    recorder.scalar_of = lambda tensor: _scalar(tensor, optimizer, is_fake=subject.is_fake)
    step = type(optimizer).step  # schedulers wrap the bound one, around the user's optimizer
    first = len(recorder.records)
    try:
        if subject.is_fake:
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                # The user's hooks must not see steps that never happened.
                vars(optimizer).get(hooks, {}).clear()
            # The first step makes the state, as no later one does; the second is recorded.
            recorder.is_paused = True
            step(optimizer)
            recorder.is_paused = False
        _enter_state(optimizer, recorder.storages)
        step(optimizer)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
        recorder.is_paused = False
        # A part of the step would be added to the estimate of all of it.
        del recorder.records[first:]
        _enter_state(optimizer, recorder.storages)
        _estimate(optimizer, recorder)
        reason = str(error).strip().splitlines() or [type(error).__name__]
        how = " without data" if subject.is_fake else ""
        return Stepping(
            fused_bytes(optimizer, users),
            f"the optimizer {type(optimizer).__name__} cannot be traced{how} ({reason[0]}); its step is "
            "estimated as one pass over parameters, gradients and state",
        )
    finally:
        recorder.scalar_of = None
    return Stepping(fused_bytes(optimizer, users))


def _scalar(tensor: Tensor, optimizer: Optimizer, *, is_fake: bool) -> float | None:
    """The number that a scalar of the optimizer stands for; None where a real tensor knows it."""
    # By storage, since `.item()` may be asked of a view of the counter.
    address = storage_address(tensor)
    for state in optimizer.state.values():
        for name, value in state.items():
            if (
                isinstance(value, Tensor)
                and storage_address(value) == address
                and name in _COUNTERS
            ):
                return _COUNTERS[name]
    if not is_fake:
        return None
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        with unset_fake_temporarily():
            return tensor.constant.item()
    raise WorkloadError("it reads the value of a tensor")


def _enter_state(optimizer: Optimizer, storages: Storages) -> None:
    """Enter the optimizer's state as having been there before the step."""
    for tensor in state_tensors(optimizer):
        number = storages.number(tensor, "state")
        # Some optimizers keep references to parameters and gradients in their state; they stay what they are.
        if number >= 0 and storages.lifetimes[number].role not in ("parameter", "gradient"):
            storages.lifetimes[number].role = "state"
            storages.lifetimes[number].birth = -1


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]


class _Operands(NamedTuple):
    """What the step of one parameter group reads; it writes parameters and state."""

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    state: tuple[Tensor, ...]

    @property
    def bytes_written(self) -> int:
        return sum(tensor_bytes(t) for t in (*self.parameters, *self.state))

    @property
    def bytes_read(self) -> int:
        return self.bytes_written + sum(tensor_bytes(t) for t in self.gradients)


def _operands(optimizer: Optimizer, group: dict[str, Any]) -> _Operands:
    parameters = tuple(p for p in group["params"] if p.grad is not None)
    values = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    state = tuple(value for value in values if isinstance(value, Tensor))
    return _Operands(parameters, tuple(p.grad for p in parameters), state)


def fused_bytes(optimizer: Optimizer, users: Optimizer) -> int:
    """What an optimizer moves in its fused form; gradients and state must exist.

    0 where it has none, or where a gradient is sparse, which no fused form takes.

    Args:
        optimizer: The recorded one; a twin has settings of its own, `foreach` among them.
        users: The user's, whose settings say whether it takes the fused form.
    """
    if not all(takes_fused_form(type(users).__name__, group) for group in users.param_groups):
        return 0
    operands = [_operands(optimizer, group) for group in optimizer.param_groups]
    if any(
        g is not None and g.layout != torch.strided for each in operands for g in each.gradients
    ):
        return 0
    return sum(each.bytes_read + each.bytes_written for each in operands)


def _estimate(optimizer: Optimizer, recorder: StepRecorder) -> None:
    """One op for each parameter group."""
    for group in optimizer.param_groups:
        operands = _operands(optimizer, group)
        parameters, gradients, state = operands
        if not parameters:
            continue
        recorder.storages.now = len(recorder.records)
        recorder.records.append(
            Record(
                name=f"ridgeline.optimizer_step.{type(optimizer).__name__}",
                phase="optimizer",
                module="",
                family="elementwise",
                dtype=dtype_name(parameters[0].dtype),
                inputs=tuple(
                    use_of(t, recorder.storages) for t in (*parameters, *gradients, *state)
                ),
                outputs=(),
                written=tuple(recorder.storages.number(t) for t in (*parameters, *state)),
                is_view=False,
                arguments='{"args":[],"kwargs":{}}',
                flops=0,
                bytes_read=operands.bytes_read,
                bytes_written=operands.bytes_written,
            )
        )
