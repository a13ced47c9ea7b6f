"""The layers of a step: modules with parameters, what they compute, and what splitting them would send.

A layer is a module together with the parameters of its name. Modules that use the same parameter (tied
weights) are one layer, and a parameter whose module computes nothing by itself (what `nn.MultiheadAttention`
reads of its projection) belongs to the nearest module above that does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ridgeline.codec import Value
from ridgeline.simulator.layers.layer_traffic import LayerTraffic, traffic_of
from ridgeline.workload import Workload

ROOT = "(model)"
"""Name of a layer whose parameters the model holds itself."""


class Layer(Value, frozen=True, kw_only=True):
    """One layer in the step of one worker.

    `family` is that of the operator that does most of its work, `recurrent` where that goes through time.
    `gradient_bytes` are of its parameters, `gathered_bytes` and `reduced_bytes` of this worker's samples,
    as `laws.model_parallel_bytes` takes them.
    """

    modules: tuple[str, ...]
    family: str
    dtype: str
    flops: int
    gradient_bytes: int
    gathered_bytes: int
    reduced_bytes: int

    @property
    def name(self) -> str:
        """The modules that it consists of."""
        return " + ".join(module or ROOT for module in self.modules)

    @property
    def is_split(self) -> bool:
        """Whether there are weights to split: norms have none, and follow the layer before."""
        return bool(self.flops or self.gathered_bytes)


class Layers(NamedTuple):
    """The layers in the order in which they are used, and the FLOP of the step that are in none."""

    layers: tuple[Layer, ...]
    other_flops: int


def layers_of(workload: Workload) -> Layers:
    """The layers of a step.

    The FLOP of all layers and `other_flops` (attention between projections, an optimizer that multiplies
    matrices) add up to those of the workload, the gradients to its gradients.

    The workload is that of one worker; one that does not tell where tensors lie has no traffic.
    """
    traffic = traffic_of(workload)
    owners = _owners(workload, traffic)
    groups = _joined(owners, traffic)
    flops: Counter[str] = Counter()
    for op in workload.ops:
        if op.phase != "optimizer":
            flops[op.module] += op.flops
    gradients = {parameter.name: parameter.num_bytes for parameter in workload.gradients}
    order = {module: number for number, module in enumerate(traffic.modules)}
    found: list[Layer] = []
    for group in groups:
        modules = sorted(group, key=lambda module: order.get(module, len(order)))
        names = [name for name, module in owners.items() if module in group]
        family, dtype = _kind(workload, group, traffic)
        found.append(
            Layer(
                modules=tuple(modules),
                family=family,
                dtype=dtype,
                flops=sum(flops[module] for module in modules),
                gradient_bytes=sum(gradients.get(name, 0) for name in names),
                gathered_bytes=sum(traffic.gathered[module] for module in modules),
                reduced_bytes=sum(traffic.reduced[module] for module in modules),
            )
        )
    found.sort(key=lambda layer: order.get(layer.modules[0], len(order)))
    return Layers(tuple(found), workload.flops - sum(layer.flops for layer in found))


def _owners(workload: Workload, traffic: LayerTraffic) -> dict[str, str]:
    """Parameter to the module that uses it: its own, else the nearest above that reads parameters."""
    readers = {module for modules in traffic.readers.values() for module in modules}
    return {
        parameter.name: next(
            (module for module in _upwards(parameter.name) if module in readers),
            parameter.name.rpartition(".")[0],
        )
        for parameter in workload.parameters
    }


def _upwards(name: str) -> Iterator[str]:
    """The module of a parameter, and those around it, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _joined(owners: Mapping[str, str], traffic: LayerTraffic) -> list[frozenset[str]]:
    """The modules with parameters, those together that read the same ones."""
    groups: dict[str, frozenset[str]] = {
        module: frozenset((module,)) for module in dict.fromkeys(owners.values())
    }
    for modules in traffic.readers.values():
        if not any(module in groups for module in modules):
            continue  # of a parameter that is read under another name
        whole = frozenset(modules).union(*(groups.get(module, ()) for module in modules))
        groups.update(dict.fromkeys(whole, whole))
    return list(dict.fromkeys(groups.values()))


def _kind(workload: Workload, group: frozenset[str], traffic: LayerTraffic) -> tuple[str, str]:
    """Family and dtype of the operator that does most, by FLOP, then by bytes."""
    mine = [op for op in workload.ops if op.phase == "forward" and op.module in group]
    op = max(mine, key=lambda op: (op.flops, op.bytes_moved), default=None)
    if op is None:
        return "other", "float32"
    is_recurrent = any(module in traffic.recurrent for module in group)
    return "recurrent" if is_recurrent else op.family, op.dtype


def names_of(layers: Sequence[Layer]) -> str:
    """The first of some layers, and how many more."""
    more = len(layers) - 1
    return f"{layers[0].name} and {more} more" if more else layers[0].name
