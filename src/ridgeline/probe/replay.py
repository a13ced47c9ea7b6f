"""Issue a workload's ops in their order, on tensors that live as long as they do in the real step.

An operator timed in a loop by itself finds its inputs in cache and its output's memory just freed
and mapped. In a step it finds neither: activations written long ago come from memory, and fresh
outputs cost page faults. Replaying the step keeps all of that: each input is the output of the op
that made it, outputs die after their last reader, parameters and optimizer state persist.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import WorkloadError
from ridgeline.probe import rebuild
from ridgeline.workload import Op, TensorSpec

Place = tuple[str, TensorSpec, int]
"""A persistent tensor: role, spec, and which of the equal ones."""

Output = tuple[int, int]
"""A tensor of this step: index of the op that makes it, and which of its outputs it is."""

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError)

_WITH_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators that make the workspace of their backward only where gradients are on, as in a real step."""


@dataclass(frozen=True)
class Source:
    """Where an input comes from: output `output` of op `op`, or, when `op` is -1, the pool."""

    op: int
    output: int
    place: Place | None = None


@dataclass(frozen=True)
class Instruction:
    """One op, ready to be issued; `workspaces` are the sources that only a real run can fill."""

    op: Op
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    sources: tuple[Source, ...]
    workspaces: tuple[Source, ...]


class Replay:
    """A workload's ops with their tensors, ready to run again and again.

    Args:
        ops: All ops of the step, in order.
        device: Where to run them.

    Attributes:
        failures: Keys of ops that could not be rebuilt or issued, with the reason.
    """

    def __init__(self, ops: Sequence[Op], device: torch.device) -> None:
        self.failures: dict[str, str] = {}
        self._ops = tuple(ops)
        self._device = device
        self._limit = rebuild.index_limit(ops)
        self._pool: dict[Place, Tensor] = {}
        self._values: dict[Output, Tensor] = {}
        self._read: dict[int, list[int]] = defaultdict(list)
        self._dead: dict[int, list[Output]] = defaultdict(list)
        self._program = self._compile(ops)

    def run(
        self,
        wanted: Callable[[int], bool],
        mark: Callable[[], Any] = time.perf_counter_ns,
        pace: Callable[[], None] | None = None,
    ) -> dict[int, tuple[Any, Any]]:
        """One pass over the step: the marks before and after each op that was issued, by its index.

        Args:
            wanted: Whether to issue op `index`; otherwise its outputs are made without it.
            mark: The clock in ns, or on GPUs a recorded event.
            pace: Called before every op that is issued.
        """
        taken: dict[int, tuple[Any, Any]] = {}
        values = self._values
        for index, step in enumerate(self._program):
            if step is None or not self._can_issue(step) or not wanted(index):
                self._stand_in(index)
                continue
            try:
                args, kwargs = self._arguments(step)
                if pace is not None:
                    pace()
                begin = mark()
                result = step.call(*args, **kwargs)
                args.clear()
                kwargs.clear()
                # Freeing is part of a step's time, so it is part of the op after which it happens.
                for dead in self._dead[index]:
                    values.pop(dead, None)
                end = mark()
                made = _tensors(result)
                if index in self._read and len(made) < len(step.op.outputs):
                    raise ValueError(
                        f"{len(step.op.outputs)} tensors were traced, {len(made)} made"
                    )
            except _FAILURES as error:
                self.failures[step.op.key] = f"{type(error).__name__}: {error}".splitlines()[0]
                self._stand_in(index)
                continue
            taken[index] = (begin, end)
            for output in self._read.get(index, ()):
                values[index, output] = made[output]
            del made, result
        values.clear()
        return taken

    def _can_issue(self, step: Instruction) -> bool:
        """Whether the op did not fail before, and the workspaces that it reads are filled."""
        if step.op.key in self.failures:
            return False
        for source in step.workspaces:
            if source.op < 0 or self._ops[source.op].key in self.failures:
                self.failures[step.op.key] = "the op that fills its workspace cannot be issued"
                return False
        return all((source.op, source.output) in self._values for source in step.workspaces)

    def _stand_in(self, index: int) -> None:
        """Outputs of an op that is not issued; nothing can stand in for a workspace."""
        for output in self._read.get(index, ()):
            spec = self._ops[index].outputs[output]
            if not _is_workspace(spec):
                self._values[index, output] = rebuild.empty(spec, self._device)
        for dead in self._dead[index]:
            self._values.pop(dead, None)

    def _arguments(self, step: Instruction) -> tuple[list[Any], dict[str, Any]]:
        tensors = [
            self._tensor(source, spec)
            for source, spec in zip(step.sources, step.op.inputs, strict=True)
        ]
        return (
            [rebuild.fill(value, tensors, self._device) for value in step.args],
            {k: rebuild.fill(value, tensors, self._device) for k, value in step.kwargs.items()},
        )

    def _tensor(self, source: Source, spec: TensorSpec) -> Tensor:
        if source.place is not None:
            tensor = self._pool.get(source.place)
            if tensor is None:
                tensor = rebuild.random(spec, self._device, self._limit)
                self._pool[source.place] = tensor
            return tensor
        tensor = self._values[source.op, source.output]
        if tuple(tensor.shape) == spec.shape and tuple(tensor.stride()) == spec.stride:
            return tensor
        if _is_workspace(spec):
            return tensor
        return tensor.as_strided(spec.shape, spec.stride)

    def _compile(self, ops: Sequence[Op]) -> list[Instruction | None]:
        places = _Places(ops)
        program: list[Instruction | None] = []
        last_read: dict[Output, int] = {}
        for index, op in enumerate(ops):
            try:
                args, kwargs = rebuild.parse(op)
                call = rebuild.resolve(op.name)
                if op.name in _WITH_GRAD_MODE:
                    call = torch.enable_grad()(call)
            except WorkloadError as error:
                self.failures[op.key] = str(error)
                program.append(None)
                continue
            sources = tuple(
                places.source(ops, index, position) for position in range(len(op.inputs))
            )
            for source in sources:
                if source.op >= 0:
                    last_read[source.op, source.output] = index
            workspaces = tuple(
                source
                for source, spec in zip(sources, op.inputs, strict=True)
                if _is_workspace(spec)
            )
            program.append(Instruction(op, call, args, kwargs, sources, workspaces))
        for made, reader in last_read.items():
            self._read[made[0]].append(made[1])
            self._dead[reader].append(made)
        return program


class _Places:
    """Decides for every input of every op which tensor it is."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._copies: dict[tuple[str, TensorSpec], int] = defaultdict(lambda: 1)
        counts: Counter[tuple[Any, ...]] = Counter()
        for op in ops:
            for spec in op.inputs:
                counts[op.phase, op.name, spec] += 1
        for (_phase, _name, spec), count in counts.items():
            # Equal parameters are as many as one kind of op meets in one phase.
            if spec.role in ("parameter", "state", "gradient", "buffer"):
                self._copies[spec.role, spec] = max(self._copies[spec.role, spec], count)

    def source(self, ops: Sequence[Op], index: int, position: int) -> Source:
        """Source of input `position` of op `index`."""
        op = ops[index]
        spec = op.inputs[position]
        found = self._made_by(ops, op, position)
        if found is not None:
            return found
        turn = self._seen[op.phase, op.name, spec]
        self._seen[op.phase, op.name, spec] += 1
        copies = self._copies[spec.role, spec]
        which = turn % copies
        if op.phase == "backward":
            which = copies - 1 - which  # backward meets them in the opposite order
        return Source(-1, 0, (spec.role, spec, which))

    def _made_by(self, ops: Sequence[Op], op: Op, position: int) -> Source | None:
        """The output of a dependency that this input is, by shape, stride and dtype.

        Parameters, states and batches are made by no op, only viewed or changed in place.
        """
        spec = op.inputs[position]
        is_lasting = spec.role in ("parameter", "state", "buffer", "batch")
        twin = sum(_same(spec, other) for other in op.inputs[:position])
        matches = [
            Source(made, output)
            for made in sorted(op.dependencies, reverse=True)
            for output, candidate in enumerate(ops[made].outputs)
            if _same(spec, candidate) and (not is_lasting or candidate.role == spec.role)
        ]
        if matches or is_lasting:
            return matches[min(twin, len(matches) - 1)] if matches else None
        for made in sorted(op.dependencies, reverse=True):
            for output, candidate in enumerate(ops[made].outputs):
                if candidate.dtype == spec.dtype and _extent(candidate) >= _extent(spec):
                    return Source(made, output)
        return None


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result in the order in which tracing lists them."""
    if isinstance(result, (tuple, list)):
        return [tensor for value in result for tensor in _tensors(value)]
    return [result] if isinstance(result, Tensor) else []


def _is_workspace(spec: TensorSpec) -> bool:
    """Whether a tensor is bytes for a later kernel, of a size that only the kernel knows: traced as none.

    A kernel that is handed an empty one reads past its end.
    """
    return spec.shape == (0,) and spec.dtype == "uint8"


def _same(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.shape, one.stride, one.dtype) == (other.shape, other.stride, other.dtype)


def _extent(spec: TensorSpec) -> int:
    """Elements of storage that a tensor reaches over."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
