"""The time below which no program can go: the case's matrix products at the measured rate of this machine."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import units
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.entrant import Entrant, Inputs
from ridgeline.experiments.ways.result import LowerBound
from ridgeline.probe.timing import sample
from ridgeline.tracing.operators.flops import flops

SIDE = {"cuda": 4096, "cpu": 768}
"""Of the square matrices whose product gives the rate: large enough for the peak, and still quick."""
RATE_S = 0.1


class CountFlops(TorchDispatchMode):
    """Adds up the FLOP of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, result)
        return result


def limit_of(case: HybridCase, entrant: Entrant, batch: Inputs) -> LowerBound | None:
    """The limit of a case, from one more eager call; None for a program without matrix products.

    Source: time >= FLOP / peak rate, the roofline's compute bound (Williams et al., 2009); convolutions
    and attention cannot be faster than matrix products of the same FLOP.

    Cost: One call, and about a tenth of a second of matrix products.
    """
    with CountFlops() as counted:
        entrant.run(batch)
    # Without FLOP the limit would be 0 s, which says nothing.
    if not counted.total:
        return None
    rate = matmul_rate(case.device, torch.bfloat16 if case.precision == "bf16" else torch.float32)
    what = "matrix products and convolutions at the measured rate of matrix products"
    reason = f"{units.quantity(counted.total, 'FLOP')} of {what}, {units.quantity(rate, 'FLOP/s')}"
    return LowerBound(seconds=counted.total / rate, reason=reason)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, the best of some samples."""
    side = SIDE[device]
    # Random values: hardware runs faster and cooler on zeros.
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # The best sample, since a limit is what the machine can do and not what it usually does.
    return 2.0 * side**3 / min(sample(lambda: torch.mm(a, b, out=out), seconds=RATE_S))
