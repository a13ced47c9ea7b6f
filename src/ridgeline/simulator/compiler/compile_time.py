"""How long torch's compiler takes for a step, before anything was compiled."""

from collections.abc import Collection

from ridgeline.execution import MODES
from ridgeline.plan import Execution
from ridgeline.simulator.compiler.fusion import blocks_of, parts_of
from ridgeline.simulator.compiler.untranslated import translated_in_pieces
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, Workload

START_S = {"cuda": 5.0, "cpu": 6.0}
"""Seconds that the first compilation of a process takes whatever its size, by device: imports, compilers
warming up, and for a CPU the headers that its C++ compiler reads.

Source: measured, see `KIND_S`.
"""
OP_S = {"cuda": 0.02, "cpu": 0.03}
"""Seconds for each operator that is not a view, by device."""
KIND_S = {"cuda": 0.22, "cpu": 0.22}
"""Seconds more for each that differs from those before in operator, shapes or types, by device: kernels are
made, and on a GPU timed, once for all that are alike.

Source: for a GPU fitted to first steps of `torch.compile` with an empty cache on the hosts of
H200s (torch 2.11), as operators, kinds and seconds: ResNet-50 461, 114, 45 to 70; VGG-16 95, 62, 15 to 36;
ViT-B/16 546, 53, 25 to 50; EfficientNet-B0 732, 322, 86 to 99; BEiT-base 738, 68, 24; Perceiver 557, 116, 30;
DLA 387, 102, 35; all within 1.6 times. For a CPU fitted to
those on two quiet cores of an AMD EPYC (torch 2.13): Llama 461, 77, 26; GPT-2 370, 79, 30; BERT 350, 84, 26;
ResNet-18 183, 61, 31; VGG-11 75, 58, 23; ShuffleNet 487, 105, 65; MobileNet-V2 453, 161, 62; Swin-T 997, 340,
108; EfficientNet-B0 732, 322, 88; a U-Net 80, 48, 28; a perceptron 20, 17, 10; all within 1.6 times.
Other hosts take twice as long (20 networks of up to 450 operators, torch 2.11: 50 to 153 s). What was
measured on a host scales them there, see `choose`.
"""


@kept_by_identity(64)
def compile_seconds(workload: Workload, execution: Execution) -> float:
    """Seconds until a step is compiled for the first time; 0 for modes that compile nothing.

    What was compiled before comes from torch's cache on disk and is faster. Blocks with the same operators
    and shapes are compiled once.

    The workload is that of one worker; all workers compile at once.

    Source: `START_S[device] + OP_S[device] x operators + KIND_S[device] x kinds of operators`, see there.
    """
    form = MODES[execution].form
    part = parts_of(workload, form)
    # A step as one program is translated whole or not at all.
    in_pieces = translated_in_pieces(workload) if form == "compiled" else lambda op: False
    ops = [
        op
        for op in workload.ops
        if part(op) is not None or (op.phase != "optimizer" and in_pieces(op))
    ]
    # Equal blocks share a compiled program, so of each kind one counts.
    if form == "regional":
        ops = _of_distinct_blocks(workload)
    device = workload.device
    num_kinds = len({op.key for op in ops if op.family != "view"})
    seconds = START_S[device] + OP_S[device] * _num_translated(ops) + KIND_S[device] * num_kinds
    return seconds if ops else 0.0


def _of_distinct_blocks(workload: Workload) -> list[Op]:
    """The operators of one block of every kind."""
    kinds: dict[tuple[str, ...], tuple[int, ...]] = {}
    for members in blocks_of(workload).values():
        # By the sorted keys, as the order of independent operators may differ between equal blocks.
        kinds.setdefault(tuple(sorted(workload.ops[i].key for i in members)), members)
    return [workload.ops[index] for members in kinds.values() for index in members]


def _num_translated(ops: Collection[Op]) -> int:
    """Operators to translate; one over a list of tensors counts for each result."""
    return sum(
        max(1, len(op.outputs)) if op.phase == "optimizer" else 1
        for op in ops
        if op.family != "view"
    )
