"""Which tensor each input of each op is: what an op before has made, or one that persists."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from ridgeline.probe.operators.valid_inputs import Made
from ridgeline.workload import Op, TensorSpec

Place = tuple[str, TensorSpec, int, Made | None]
"""A persistent tensor: role, spec, number of its storage, and values asked for."""

Output = tuple[int, int]
"""A tensor of this step: index of the op that makes it, and which of its outputs it is."""


@dataclass(frozen=True)
class InputSource:
    """Where an input comes from: output `output` of op `op`, or, when `op` is -1, the pool.

    `is_whole`: the input is that very output and no other look at it. `else_place` is where to turn when
    the op was not issued.
    """

    op: int
    output: int
    place: Place | None = None
    is_whole: bool = False
    else_place: Place | None = None


class Places:
    """Decides for every input of every op which tensor it is, by what the trace says of shared memory.

    Of what has no storage there, as sparse tensors, the result of an op is recognised by shape and dtype.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._looks: dict[tuple[Any, ...], Output] = {}
        self._holders: dict[int, list[Output]] = defaultdict(list)
        self._entered = 0

    def source(self, index: int, position: int) -> InputSource:
        """Source of input `position` of op `index`; to be asked once for each, in order."""
        op = self._ops[index]
        spec = op.inputs[position]
        if op.memory and op.memory[position][0] >= 0:
            return self._at(index, position)
        # The latest first, which is most likely still alive.
        for made in sorted(op.dependencies, reverse=True):
            for output, candidate in enumerate(self._ops[made].outputs):
                if _same(spec, candidate):
                    return InputSource(made, output, is_whole=True)
        return InputSource(-1, 0, (spec.role, spec, 0, None))

    def _at(self, index: int, position: int) -> InputSource:
        """The source by memory: the same look at the same storage, else one that reaches as far."""
        while self._entered < index:
            self._enter(self._entered)
            self._entered += 1
        op = self._ops[index]
        spec, (storage, offset) = op.inputs[position], op.memory[position]
        look = self._looks.get(_look(spec, storage, offset))
        if look is not None:
            return InputSource(*look, is_whole=True)
        # The latest first: it is what the storage holds now.
        for made, output in reversed(self._holders[storage]):
            if _could_show(self._ops[made].outputs[output], spec):
                return InputSource(made, output)
        return InputSource(-1, 0, (spec.role, spec, storage, None))

    def _enter(self, index: int) -> None:
        """Note where the outputs of an op are; a storage with no number is of no use."""
        op = self._ops[index]
        for output, spec in enumerate(op.outputs):
            storage, offset = op.memory[len(op.inputs) + output] if op.memory else (-1, 0)
            if storage >= 0:
                self._looks[_look(spec, storage, offset)] = (index, output)
                self._holders[storage].append((index, output))


def valid(source: InputSource, spec: TensorSpec, made: Made | None) -> InputSource:
    """The source of an input that must hold certain values: made up, unless an op's own may be trusted."""
    if made is None:
        return source
    place: Place = ("made up", spec, 0, made)
    if made.trusts_ops and source.op >= 0:
        return InputSource(source.op, source.output, is_whole=source.is_whole, else_place=place)
    return InputSource(-1, 0, place)


def is_only_issued(spec: TensorSpec) -> bool:
    """Whether only the operator itself can make a tensor: nothing made up can stand in for it.

    A workspace is bytes for a later kernel, of a size that only the kernel knows: traced as none. A kernel
    that is handed an empty one reads past its end. A sparse tensor has no strides.
    """
    is_workspace = spec.shape == (0,) and spec.dtype == "uint8"
    return is_workspace or len(spec.stride) != len(spec.shape)


def _look(spec: TensorSpec, storage: int, offset: int) -> tuple[Any, ...]:
    return storage, offset, spec.shape, spec.stride, spec.dtype


def _same(one: TensorSpec, other: TensorSpec) -> bool:
    # Whatever their roles are.
    return one == structs.replace(other, role=one.role)


def _could_show(whole: TensorSpec, part: TensorSpec) -> bool:
    """Whether a tensor reaches as far as one that may be a look at it; a sparse one shows none."""
    if any(len(spec.stride) != len(spec.shape) for spec in (whole, part)):
        return False
    is_alike = (whole.dtype, whole.on_host) == (part.dtype, part.on_host)
    return is_alike and _extent(whole) >= _extent(part)


def _extent(spec: TensorSpec) -> int:
    """Elements of storage that a tensor reaches over."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
