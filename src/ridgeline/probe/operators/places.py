"""Which tensor each input of each op is: what an op before has made, or one that persists."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from ridgeline.probe.operators.valid_inputs import Made
from ridgeline.workload import Op, TensorSpec

Place = tuple[str, TensorSpec, int, Made | None]
"""A persistent tensor: role, spec, which of the equal ones (or its storage), and values asked for."""

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
    """Decides for every input of every op which tensor it is.

    Where the trace says what shares memory, that decides. Otherwise equal parameters are as many as one
    kind of op meets in one phase, and the result of an op is recognised by shape, stride and dtype.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._looks: dict[tuple[Any, ...], Output] = {}
        self._holders: dict[int, list[Output]] = defaultdict(list)
        self._entered = 0
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._copies: dict[tuple[str, TensorSpec], int] = defaultdict(lambda: 1)
        counts: Counter[tuple[Any, ...]] = Counter()
        for op in ops:
            for spec in op.inputs:
                counts[op.phase, op.name, spec] += 1
        for (_phase, _name, spec), count in counts.items():
            if spec.role in ("parameter", "state", "gradient", "buffer"):
                self._copies[spec.role, spec] = max(self._copies[spec.role, spec], count)

    def source(self, index: int, position: int) -> InputSource:
        """Source of input `position` of op `index`; to be asked once for each, in order."""
        op = self._ops[index]
        spec = op.inputs[position]
        # The trace's own word, where it has one: everything below is a guess by shapes.
        if op.memory and op.memory[position][0] >= 0:  # sparse tensors have no storage
            return self._at(index, position)
        found = self._made_by(op, position)
        if found is not None:
            return found
        turn = self._seen[op.phase, op.name, spec]
        self._seen[op.phase, op.name, spec] += 1
        copies = self._copies[spec.role, spec]
        which = turn % copies
        if op.phase == "backward":
            which = copies - 1 - which  # backward meets them in the opposite order
        return InputSource(-1, 0, (spec.role, spec, which, None))

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

    def _made_by(self, op: Op, position: int) -> InputSource | None:
        """The output of a dependency that this input is, by shape, stride and dtype.

        Parameters, states and batches are made by no op, only viewed or changed in place.
        """
        spec = op.inputs[position]
        is_lasting = spec.role in ("parameter", "state", "buffer", "batch")
        # Two equal inputs are two tensors, mostly: the first match is taken already.
        twin = sum(_same(spec, other) for other in op.inputs[:position])
        # The latest first, which is most likely still alive.
        outputs = [
            (made, output, candidate)
            for made in sorted(op.dependencies, reverse=True)
            for output, candidate in enumerate(self._ops[made].outputs)
        ]
        matches = [
            InputSource(made, output, is_whole=True)
            for made, output, candidate in outputs
            if _same(spec, candidate) and (not is_lasting or candidate.role == spec.role)
        ]
        if matches or is_lasting:
            return matches[min(twin, len(matches) - 1)] if matches else None
        shown = (InputSource(made, o) for made, o, whole in outputs if _could_show(whole, spec))
        return next(shown, None)


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
