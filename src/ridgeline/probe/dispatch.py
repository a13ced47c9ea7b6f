"""What it costs the host to issue one operator, whatever its size."""

import statistics
from typing import Literal, NamedTuple

import torch

from ridgeline.machine import Dispatch, Quantity
from ridgeline.probe.small_step import PHASES, WIDTH, SmallNetwork, SmallStep
from ridgeline.workload import Phase, Workload


def measure_dispatch(device: torch.device, *, quick: bool) -> tuple[Dispatch, ...]:
    """Host seconds per operator in the forward pass, the backward pass and the optimizer.

    A tiny network of linear layers, activations, norms and residual sums is trained, so that modules,
    autograd nodes and the optimizer's loop are in the figure as they are in a real step.

    Source: seconds of a phase divided by the aten operators that torch dispatches in it.
    """
    tiny = _Tiny(device)
    samples: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(60 if quick else 300):
        for phase, taken in zip(PHASES, tiny.run(), strict=True):
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
        tiny = _Tiny(device)
        beyond = tiny.beyond_replay(rounds, _lower_quartile)
    finally:
        torch.set_num_threads(threads)
    return Excess(
        forward=beyond["forward"] / len(tiny.calls["forward"]),
        backward=beyond["backward"] / len(tiny.calls["backward"]),
        parameter=beyond["optimizer"] / tiny.num_parameters,
    )


def _lower_quartile(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


class _Tiny(SmallStep):
    """A step of the small network, plainly optimized."""

    def __init__(self, device: torch.device) -> None:
        network, batch = SmallNetwork().to(device), torch.rand(2, WIDTH, device=device)
        parameters = list(network.parameters())
        self.num_parameters = len(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        super().__init__(lambda: network(batch), optimizer, device, times_clearing=False)
