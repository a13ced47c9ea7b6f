"""How long torch's compiler takes for a step, before anything was compiled."""

from collections.abc import Collection
from functools import lru_cache

from ridgeline.execution import MODES, Form
from ridgeline.plan import Execution
from ridgeline.simulator.costs import Identity
from ridgeline.simulator.fusion import blocks_of, parts_of
from ridgeline.workload import Op, Workload

START_S = {"cuda": 5.0, "cpu": 10.0}
"""Seconds that the first compilation of a process takes whatever its size, by device: imports, compilers
warming up, and for a CPU the headers that its C++ compiler reads.

Source: measured; for a CPU the lower end of what the hosts at `OP_S` take: a first trial tells the rest.
"""
OP_S = {"cuda": 0.08, "cpu": 0.2}
"""Seconds for each operator that is not a view, by device.

Source: both assumed from what was measured with an empty cache. On the host of an H200 (torch 2.11): ViT-B/16
25 to 50 s, BERT-base 46 s, GPT-2 35 to 48 s, VGG-16 15 to 36 s, ResNet-50 45 to 70 s, EfficientNet-B0 86 to
99 s, an LSTM 6 s. On two busy CPU cores (torch 2.13): a ResNet-18 with some 210 operators 86 s, small
networks with 20 operators 10 to 30 s. On two cores of an Intel Xeon (torch 2.11): 20 networks of up to 450
operators 50 to 153 s, about 50 s and 0.17 to 0.47 s an operator. What was measured on a host scales them
there, see `choose`.
"""


def compile_seconds(workload: Workload, execution: Execution) -> float:
    """Seconds until a step is compiled for the first time; 0 for modes that compile nothing.

    What was compiled before comes from torch's cache on disk and is faster. Blocks with the same operators
    and shapes are compiled once.

    Args:
        workload: The step of one worker; all workers compile at once.
        execution: The mode.

    Source: `START_S[device] + OP_S[device] x operators`, see there.
    """
    return _compile_seconds(Identity(workload), MODES[execution].form)


@lru_cache(maxsize=64)
def _compile_seconds(workload: Identity[Workload], form: Form) -> float:
    part = parts_of(workload.value, form)
    ops = [op for op in workload.value.ops if part(op) is not None]
    if form == "regional":
        ops = _of_distinct_blocks(workload.value)
    device = workload.value.device
    return START_S[device] + OP_S[device] * _num_translated(ops) if ops else 0.0


def _of_distinct_blocks(workload: Workload) -> list[Op]:
    """The operators of one block of every kind."""
    kinds: dict[tuple[str, ...], tuple[int, ...]] = {}
    for members in blocks_of(workload).values():
        kinds.setdefault(tuple(sorted(workload.ops[i].key for i in members)), members)
    return [workload.ops[index] for members in kinds.values() for index in members]


def _num_translated(ops: Collection[Op]) -> int:
    """Operators to translate; one over a list of tensors counts for each result."""
    return sum(
        max(1, len(op.outputs)) if op.phase == "optimizer" else 1
        for op in ops
        if op.family != "view"
    )
