"""What each module would send if its weights were split by columns, read off the forward pass.

Outputs of a multiplication with weights are parts, and so is what follows from them inside the module, until
they leave it or are multiplied by weights again: then they are gathered. What is multiplied by weights has a
gradient that is a sum over all columns, where it is wanted.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.simulator.pricing.dataflow import spec_bytes
from ridgeline.workload import Op, TensorSpec, Workload

_SPLIT = ("matmul", "convolution", "gather", "attention")
"""Families of operators whose weights have columns."""
_OVER_COLUMNS = ("normalization", "reduction")
"""Families of which a loss consists. It runs outside of modules, as the model's own operators do."""
_GROUPS = 8
"""Place of the number of groups among the arguments of `aten.convolution`."""


_Placed = Sequence[tuple[TensorSpec, tuple[int, int]]]
"""Tensors with where they are: number of the storage, and offset in it."""


class LayerTraffic(NamedTuple):
    """Bytes by module, of one worker's samples.

    `modules` are those that do something, in their order; `readers` the modules that use a parameter, by the
    number of its storage; `recurrent` those that multiply by the same weights what they made with them.
    """

    modules: tuple[str, ...]
    readers: dict[int, tuple[str, ...]]
    gathered: Counter[str]
    reduced: Counter[str]
    recurrent: frozenset[str]


def traffic_of(workload: Workload) -> LayerTraffic:
    """The traffic of each module; none of a workload that does not tell where tensors lie."""
    walk = _Walk(workload)
    for op in workload.phase("forward"):
        # Without places the parts cannot be followed; such operators are left out, and a note says so.
        if len(op.memory) == len(op.inputs) + len(op.outputs):
            walk.pass_by(op)
    return LayerTraffic(
        modules=tuple(dict.fromkeys(op.module for op in workload.phase("forward"))),
        readers={storage: tuple(modules) for storage, modules in walk.readers.items()},
        gathered=walk.gathered,
        reduced=walk.reduced,
        recurrent=frozenset(walk.recurrent),
    )


class _Part(NamedTuple):
    """A tensor that a module made with its weights: `num_bytes`, of which `whole` are with every worker."""

    module: str
    num_bytes: int
    whole: int
    weights: frozenset[int]


class _Walk:
    """Goes through the forward pass; storages are known by their numbers."""

    def __init__(self, workload: Workload) -> None:
        self.readers: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self.gathered: Counter[str] = Counter()
        self.reduced: Counter[str] = Counter()
        self.recurrent: set[str] = set()
        self._weights: dict[int, frozenset[int]] = {}
        self._parts: dict[int, _Part] = {}
        self._has_gradient = _trained(workload)
        self._seen: set[tuple[str, int, int]] = set()

    def pass_by(self, op: Op) -> None:
        """Account for one operator of the forward pass."""
        inputs = list(zip(op.inputs, op.memory, strict=False))
        outputs = list(zip(op.outputs, op.memory[len(inputs) :], strict=True))
        for spec, (storage, _) in inputs:
            if spec.role == "parameter":
                self._weights.setdefault(storage, frozenset((storage,)))
        used = {s: self._weights[s] for _, (s, _) in inputs if s in self._weights}
        weights = frozenset().union(*used.values())
        for origin in weights:
            self.readers[origin][op.module] = None
        data = [(spec, place) for spec, place in inputs if place[0] not in used]
        self._leave(op, data)
        if any(place[0] in self._has_gradient for _, place in inputs):
            self._has_gradient.update(storage for _, (storage, _) in outputs)
        if not data and used:  # computed from weights alone, such as a cast or a norm of them
            self._weights.update({storage: weights for _, (storage, _) in outputs})
        elif op.family in _SPLIT and any(
            len(spec.shape) > 1 for spec, (storage, _) in inputs if storage in used
        ):
            self._multiply(op, data, outputs, weights)
        else:
            self._follow(op, data, outputs)

    def _leave(self, op: Op, data: _Placed) -> None:
        """Parts that another module takes are gathered, and those of the model itself that the loss takes."""
        is_loss = not op.module and op.family in _OVER_COLUMNS
        for _, (storage, _) in data:
            part = self._parts.get(storage)
            if part is not None and (part.module != op.module or is_loss):
                self._gather(self._parts.pop(storage))

    def _multiply(self, op: Op, data: _Placed, outputs: _Placed, weights: frozenset[int]) -> None:
        """The operator takes its input whole, and gives each worker its columns of the output."""
        module = op.module
        for spec, (storage, offset) in data:
            part = self._parts.get(storage)
            if part is not None:
                self._gather(part)
                self._parts[storage] = part._replace(whole=part.num_bytes)
                if part.weights & weights:
                    self.recurrent.add(module)
            # One tensor that is multiplied several times (query, key, value) has one gradient to sum up.
            is_new = (module, storage, offset) not in self._seen
            if is_new and storage in self._has_gradient and not _is_grouped(op):
                self.reduced[module] += spec_bytes(spec)
            self._seen.add((module, storage, offset))
        if "rnn" not in op.name:
            for spec, (storage, _) in outputs:
                self._parts[storage] = _Part(module, spec_bytes(spec), 0, weights)
            return
        # Each step's state is gathered for the next one, and its gradient summed up from there.
        self.recurrent.add(module)
        spec, (storage, _) = outputs[0]
        num_bytes, layers = spec_bytes(spec), _layers_within(op)
        self.gathered[module] += layers * num_bytes
        self.reduced[module] += (2 * layers - 1) * num_bytes
        self._parts[storage] = _Part(module, num_bytes, num_bytes, weights)

    def _follow(self, op: Op, data: _Placed, outputs: _Placed) -> None:
        """What follows from parts is in parts, and what follows from what every worker has is whole."""
        parts = {s: self._parts[s] for _, (s, _) in data if s in self._parts}
        if not parts or op.family == "view":
            return
        weights = frozenset().union(*(part.weights for part in parts.values()))
        whole = sum(part.whole for part in parts.values())
        is_whole = all(part.whole == part.num_bytes for part in parts.values())
        for spec, (storage, _) in outputs:
            if storage not in parts:  # what is written in place stays what it was
                num_bytes = spec_bytes(spec)
                known = num_bytes if is_whole else min(whole, num_bytes) * (op.family == "copy")
                self._parts[storage] = _Part(op.module, num_bytes, known, weights)

    def _gather(self, part: _Part) -> None:
        self.gathered[part.module] += part.num_bytes - part.whole


def _trained(workload: Workload) -> set[int]:
    """Storages of the parameters that an optimizer changes; without one, of all."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for op in workload.ops:
        places = zip(op.inputs, op.memory, strict=False)
        found[op.phase] |= {storage for spec, (storage, _) in places if spec.role == "parameter"}
    return found["optimizer"] or found["forward"]


def _is_grouped(op: Op) -> bool:
    """Whether a convolution has groups: dealt out whole to the workers, no input is shared by two of them."""
    if op.name != "aten.convolution.default":
        return False
    return int(json.loads(op.arguments)["args"][_GROUPS]) > 1


def _layers_within(op: Op) -> int:
    """Layers on top of each other in one recurrent operator, as cuDNN has them: two matrices a direction."""
    matrices = [spec for spec in op.inputs if spec.role == "parameter" and len(spec.shape) == 2]
    if len(matrices) < 2:
        return 1
    directions = max(1, op.outputs[0].shape[-1] // matrices[1].shape[-1])
    return max(1, len(matrices) // (2 * directions))
