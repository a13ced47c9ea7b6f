"""What it costs the host to issue one operator, whatever its size."""

from typing import Literal

import torch

from ridgeline.host.speed import HOST_SPEED
from ridgeline.machine import Dispatch
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.operators.small_step import PHASES, WIDTH, SmallNetwork, SmallStep
from ridgeline.workload import Phase


def measure_dispatch(device: torch.device, *, quick: bool) -> tuple[Dispatch, ...]:
    """Host seconds per operator in the forward pass, the backward pass and the optimizer.

    A tiny network of linear layers, activations, norms and residual sums is trained, so that modules,
    autograd nodes and the optimizer's loop are in the figure as they are in a real step.

    Source: seconds of a phase divided by the aten operators that torch dispatches in it.
    """
    network, batch = SmallNetwork().to(device), torch.rand(2, WIDTH, device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    tiny = SmallStep(lambda: network(batch), optimizer, device, times_clearing=False)
    samples: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    HOST_SPEED.wait()
    for _ in range(20 if quick else 100):
        for phase, taken in zip(PHASES, tiny.run(), strict=True):
            samples[phase].append(taken / len(tiny.calls[phase]))
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return tuple(
        Dispatch(device=kind, phase=phase, seconds=Sampled.measured(samples[phase], "s"))
        for phase in PHASES
    )
