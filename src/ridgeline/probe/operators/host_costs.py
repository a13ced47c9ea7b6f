"""What a real step costs the host beyond issuing its operators again, by what causes it.

A replay issues every operator from Python by its full name, which costs more than what a step does: there
torch's own bindings call it, one operator calls others, and autograd runs the backward pass without Python.
What a replay leaves out are calls of modules, gradients that are handed to parameters, and the loop of an
optimizer around its operators. A mean over one network charges its modules to a loop of a thousand operators
that has none; so each cause has a figure of its own, from steps with much of it and little of the others.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ridgeline.host.speed import HOST_SPEED
from ridgeline.probe.operators.small_step import PHASES, WIDTH, SmallNetwork, SmallStep
from ridgeline.workers.host_threads import set_threads
from ridgeline.workload import Phase, Workload

ROUNDS = 20
CHAIN = 60
"""Links of three operators each: together about as many operators as common steps have."""
FEW, MANY = 2, 40
"""Parameters of the two steps from which the cost of one follows."""


class HostCosts(NamedTuple):
    """Seconds beyond those of a replay; below 0 where a replay costs more.

    Attributes:
        forward_op: For each operator of the forward pass.
        module_call: For each call of a module.
        backward_op: For each operator of the backward pass.
        gradient: For each parameter that autograd hands a gradient.
        step: For each step of an optimizer, its gradients set to None included.
        parameter: For each parameter that is updated.
        update_op: For each operator of the optimizer.
    """

    forward_op: float
    module_call: float
    backward_op: float
    gradient: float
    step: float
    parameter: float
    update_op: float

    def of(self, workload: Workload) -> list[float]:
        """Seconds by operator of a workload; those of a phase without operators are left out."""
        found = [0.0] * len(workload.ops)
        phases: dict[Phase, list[int]] = {phase: [] for phase in PHASES}
        for index, op in enumerate(workload.ops):
            phases[op.phase].append(index)
        calls = module_calls([workload.ops[index].module for index in phases["forward"]])
        for index, count in zip(phases["forward"], calls, strict=True):
            found[index] = self.forward_op + count * self.module_call
        for index in phases["backward"]:
            found[index] = self.backward_op
        for parameter in workload.parameters:
            if parameter.ready_op >= 0:
                found[parameter.ready_op] += self.gradient
        updated = sum(parameter.ready_op >= 0 for parameter in workload.parameters)
        # Spread over the operators, as a timeline shows nothing between them.
        whole = self.step + self.parameter * updated
        for index in phases["optimizer"]:
            found[index] = self.update_op + whole / len(phases["optimizer"])
        return found


def module_calls(paths: Sequence[str]) -> list[int]:
    """How many modules are called between each operator of a forward pass and the one before.

    Lists of modules are not called, so a number counts as one with the name before it: `layers.3`.

    Paths are of the module of each operator, in order.
    """
    counts = []
    before: list[str] = []
    for path in paths:
        now = _parts(path)
        pairs = zip(before, now, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # Modules that are left cost nothing by themselves: only calls are counted.
        counts.append(len(now) - common)
        before = now
    return counts


@lru_cache(maxsize=2)
def host_costs(kind: str, rounds: int = ROUNDS) -> HostCosts:
    """The costs of this process where operators are on a device of a kind, on one thread; measured once.

    Source: small steps and replays of the operators recorded in them, in turns; differences of the fastest
        of each (other programs only ever add): of a chain of operators without modules for those, then of a
        network of modules, then of optimizers in one operator over few and many parameters, and in a loop.

    Cost: About half a second.
    """
    # One thread, since several would share out the tiny kernels and wake each other.
    threads = torch.get_num_threads()
    set_threads(1)
    device = torch.device(kind)
    HOST_SPEED.wait()
    try:
        if kind == "cuda":  # its first steps load kernels, and the host's clock rises meanwhile
            list(_steps(device, 2))
        return _solved(*_steps(device, rounds))
    finally:
        set_threads(threads)


class Beyond(NamedTuple):
    """Seconds of a step beyond its replay, by phase, and how much of each cause there is in it."""

    seconds: dict[Phase, float]
    ops: dict[Phase, int]
    modules: int
    parameters: int


def _solved(chain: Beyond, network: Beyond, few: Beyond, many: Beyond, loop: Beyond) -> HostCosts:
    forward_op = chain.seconds["forward"] / chain.ops["forward"]
    rest = network.seconds["forward"] - forward_op * network.ops["forward"]
    # Noise may make a difference negative, which would make larger networks cheaper.
    module_call = max(0.0, rest / network.modules)
    backward_op = chain.seconds["backward"] / chain.ops["backward"]
    rest = network.seconds["backward"] - backward_op * network.ops["backward"]
    gradient = max(0.0, rest / network.parameters)
    more = many.parameters - few.parameters
    parameter = max(0.0, (many.seconds["optimizer"] - few.seconds["optimizer"]) / more)
    extra = loop.ops["optimizer"] - many.ops["optimizer"]
    update_op = (loop.seconds["optimizer"] - many.seconds["optimizer"]) / extra
    step = few.seconds["optimizer"] - few.parameters * parameter
    step -= few.ops["optimizer"] * update_op
    return HostCosts(
        forward_op, module_call, backward_op, gradient, max(0.0, step), parameter, update_op
    )


def _beyond(
    loss: Callable[[], Tensor],
    optimizer: Optimizer,
    device: torch.device,
    rounds: int,
    modules: int = 0,
) -> Beyond:
    step = SmallStep(loss, optimizer, device, times_clearing=True)
    ops = {phase: len(step.calls[phase]) for phase in PHASES}
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    return Beyond(step.beyond_replay(rounds, min), ops, modules, parameters)


def _steps(device: torch.device, rounds: int) -> Iterable[Beyond]:
    """In the order of the arguments of `_solved`."""
    yield _chain(device, CHAIN, FEW, rounds, fused=True)
    network, batch = SmallNetwork().to(device), torch.rand(2, WIDTH, device=device)
    optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)
    yield _beyond(lambda: network(batch), optimizer, device, rounds, network.num_calls)
    # The same links three times: only what the optimizer does differs.
    yield _chain(device, MANY // 2, FEW, rounds, fused=True)
    yield _chain(device, MANY // 2, MANY, rounds, fused=True)
    yield _chain(device, MANY // 2, MANY, rounds, fused=False)


def _chain(
    device: torch.device, links: int, num_parameters: int, rounds: int, *, fused: bool
) -> Beyond:
    """Products, sums and activations one after the other, which take turns with the parameters."""
    parameters = [nn.Parameter(torch.rand(WIDTH, device=device)) for _ in range(num_parameters)]
    batch = torch.rand(2, WIDTH, device=device)

    def loss() -> Tensor:
        x = batch
        for link in range(links):
            x = x * parameters[2 * link % num_parameters]
            x = (x + parameters[(2 * link + 1) % num_parameters]).relu()
        return x.sum()

    optimizer = SGD(parameters, lr=0.01, momentum=0.9, fused=fused, foreach=False)
    return _beyond(loss, optimizer, device, rounds)


def _parts(path: str) -> list[str]:
    parts: list[str] = []
    for part in path.split(".") if path else ():
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts
