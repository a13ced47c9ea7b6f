"""A training step so small that all its time is the host's, timed in turns with a replay of its operators."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.timing import synchronize
from ridgeline.tensors.operator_text import dtype_name, encode
from ridgeline.workload import Op, Phase, TensorSpec

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
BLOCKS = 8
WIDTH = 8


class SmallStep:
    """A step of a loss and an optimizer; `calls` are its operators by phase.

    Args:
        loss: The forward pass.
        optimizer: Of the parameters that the loss uses.
        device: Where they are.
        times_clearing: Setting gradients to None is in the seconds of the optimizer; else it comes before the
            step, and in none.

    Cost: Runs the step four times.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        optimizer: Optimizer,
        device: torch.device,
        *,
        times_clearing: bool,
    ) -> None:
        self._loss, self._optimizer, self._device = loss, optimizer, device
        self._times_clearing = times_clearing
        # The first steps make the optimizer's state and fill the allocator's caches.
        for _ in range(3):
            self.run()
        recorder = OperatorRecorder()
        with recorder:
            self.run(recorder)
        self.calls = recorder.calls

    def run(self, recorder: "OperatorRecorder | None" = None) -> tuple[float, float, float]:
        """Seconds of host time of the three phases of one step."""
        if not self._times_clearing:
            self._optimizer.zero_grad()
        # What a GPU still has to do would otherwise block the host in the middle of a phase.
        synchronize()
        times = [time.perf_counter()]
        loss = self._loss()
        times.append(time.perf_counter())
        if recorder is not None:
            recorder.phase = "backward"
        loss.backward()
        times.append(time.perf_counter())
        if recorder is not None:
            recorder.phase = "optimizer"
        self._optimizer.step()
        if self._times_clearing:
            self._optimizer.zero_grad()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def beyond_replay(
        self, rounds: int, least: Callable[[list[float]], float]
    ) -> dict[Phase, float]:
        """Seconds of each phase beyond those of a replay of its operators.

        `least` picks the figure of a phase from those of all rounds; other programs only ever add.
        """
        ops = tuple(op for phase in PHASES for op in self.calls[phase])
        replay = WorkloadReplay(ops, self._device)
        real: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
        again: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
        # In turns, so that a clock that changes meanwhile changes both alike.
        for _ in range(rounds):
            for phase, taken in zip(PHASES, self.run(), strict=True):
                real[phase].append(taken)
            # Autograd's own cost is what is asked for: it must not be in the replay.
            with torch.no_grad():
                marks = replay.run(lambda index: True)
            for phase in PHASES:
                taken_ns = sum(e - b for i, (b, e) in marks.items() if ops[i].phase == phase)
                again[phase].append(taken_ns * 1e-9)
        return {phase: least(real[phase]) - least(again[phase]) for phase in PHASES}


class SmallNetwork(nn.Module):
    """Linear layers, activations, norms and residual sums; `num_calls` of modules are in a forward pass."""

    num_calls = 3 * BLOCKS + 1

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what the last block makes of `x` [batch, WIDTH]."""
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + self.act(linear(norm(x)))
        return x.sum()


class OperatorRecorder(TorchDispatchMode):
    """Records the aten operators of a step by phase, enough to replay them."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.calls: dict[Phase, list[Op]] = {phase: [] for phase in PHASES}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.namespace == "aten":
            self.calls[self.phase].append(self._op(func, args, named))
        return func(*args, **named)

    def _op(self, func: Any, args: Any, kwargs: Any) -> Op:
        inputs: list[TensorSpec] = []

        def index_of(tensor: Tensor) -> int:
            shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            inputs.append(TensorSpec(shape=shape, stride=tensor.stride(), dtype=dtype))
            return len(inputs) - 1

        text = encode(args, kwargs, index_of, where=str(func))
        return Op(
            name=str(func),
            phase=self.phase,
            module="",
            family="other",
            dtype="float32",
            inputs=tuple(inputs),
            # Nothing is fed on: tiny tensors cost the same whoever made them.
            outputs=(),
            arguments=text,
            flops=0,
            bytes_read=0,
            bytes_written=0,
        )
