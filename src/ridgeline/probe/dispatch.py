"""What it costs the host to issue one operator, whatever its size."""

import statistics
import time
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.machine import Dispatch, Quantity
from ridgeline.probe.replay import Replay
from ridgeline.probe.timing import synchronize
from ridgeline.workload import Op, Phase, TensorSpec, Workload

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
BLOCKS = 8
WIDTH = 8


def measure_dispatch(device: torch.device, *, quick: bool) -> tuple[Dispatch, ...]:
    """Host seconds per operator in the forward pass, the backward pass and the optimizer.

    A tiny network of linear layers, activations, norms and residual sums is trained, so that modules,
    autograd nodes and the optimizer's loop are in the figure as they are in a real step.

    Source: seconds of a phase divided by the aten operators that torch dispatches in it.
    """
    tiny = _Tiny(device)
    samples: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(60 if quick else 300):
        for phase, taken in zip(PHASES, tiny.step(), strict=True):
            samples[phase].append(taken / len(tiny.calls[phase]))
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return tuple(
        Dispatch(device=kind, phase=phase, seconds=Quantity.measured(samples[phase], "s"))
        for phase in PHASES
    )


class Excess(NamedTuple):
    """Seconds that a real step costs the host of a GPU beyond issuing its operators again.

    For each operator of the forward and the backward pass; of the optimizer, for each parameter: its loop
    over them is what costs, whether it then calls one operator for all or several for each.
    """

    forward: float
    backward: float
    parameter: float

    def of(self, workload: Workload) -> dict[Phase, float]:
        """For each operator of a workload, by phase."""
        count = sum(op.phase == "optimizer" for op in workload.ops)
        share = self.parameter * len(workload.parameters) / max(1, count)
        return {"forward": self.forward, "backward": self.backward, "optimizer": share}


def reissue_excess(device: torch.device, *, rounds: int = 40) -> Excess:
    """What a real step costs the host beyond being issued again by a replay.

    A real forward pass adds modules and autograd's records; a real backward pass is run by autograd
    in C++ and needs no Python for each operator, so there the excess is negative.

    Source: a tiny step, and a replay of the operators recorded in it, in turns, on one thread; the
        difference of the lower quartiles (other programs only ever add) per operator or parameter.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _excess(_Tiny(device), device, rounds)
    finally:
        torch.set_num_threads(threads)


def _excess(tiny: "_Tiny", device: torch.device, rounds: int) -> Excess:
    ops = tuple(op for phase in PHASES for op in tiny.calls[phase])
    replay = Replay(ops, device)
    real: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    again: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(rounds):
        for phase, taken in zip(PHASES, tiny.step(), strict=True):
            real[phase].append(taken)
        with torch.no_grad():
            marks = replay.run(lambda index: True)
        for phase in PHASES:
            taken_ns = sum(e - b for i, (b, e) in marks.items() if ops[i].phase == phase)
            again[phase].append(taken_ns * 1e-9)
    beyond = {
        phase: _lower_quartile(real[phase]) - _lower_quartile(again[phase]) for phase in PHASES
    }
    return Excess(
        forward=beyond["forward"] / len(tiny.calls["forward"]),
        backward=beyond["backward"] / len(tiny.calls["backward"]),
        parameter=beyond["optimizer"] / tiny.num_parameters,
    )


def _lower_quartile(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


class _Tiny:
    """A training step so small that all its time is dispatch; `calls` are its operators by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._net = SmallNetwork().to(device)
        self._batch = torch.rand(2, WIDTH, device=device)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            self.step()
        recorder = OperatorRecorder()
        with recorder:
            self.step(recorder)
        self.calls = recorder.calls
        self.num_parameters = len(list(self._net.parameters()))

    def step(self, recorder: "OperatorRecorder | None" = None) -> tuple[float, float, float]:
        """Seconds of host time of the three phases of one step."""
        self._optimizer.zero_grad()
        synchronize()
        times = [time.perf_counter()]
        loss = self._net(self._batch)
        times.append(time.perf_counter())
        if recorder is not None:
            recorder.phase = "backward"
        loss.backward()
        times.append(time.perf_counter())
        if recorder is not None:
            recorder.phase = "optimizer"
        self._optimizer.step()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]


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

        def encoded(value: Any) -> Any:
            if isinstance(value, Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                spec = TensorSpec(shape=tuple(value.shape), stride=value.stride(), dtype=dtype)
                inputs.append(spec)
                return {"tensor": len(inputs) - 1}
            if isinstance(value, (list, tuple)):
                return [encoded(inner) for inner in value]
            for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
                if isinstance(value, kind):
                    return {kind.__name__: str(value).removeprefix("torch.")}
            return value

        content = {"args": encoded(args), "kwargs": {k: encoded(v) for k, v in kwargs.items()}}
        return Op(
            name=str(func),
            phase=self.phase,
            module="",
            family="other",
            dtype="float32",
            inputs=tuple(inputs),
            outputs=(),
            arguments=msgspec.json.encode(content).decode(),
            flops=0,
            bytes_read=0,
            bytes_written=0,
        )
