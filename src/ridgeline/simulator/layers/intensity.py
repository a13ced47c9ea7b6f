"""Intensity of each layer on the wire, under data and under model parallelism, and what its link carries."""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from ridgeline.codec import Noun, Value
from ridgeline.errors import MachineError, PlanError
from ridgeline.laws.collectives import bus_bandwidth_factor
from ridgeline.laws.intensity import (
    SUM,
    data_parallel_bytes,
    model_parallel_bytes,
    samples_of_equal_bytes,
    wire_intensity,
)
from ridgeline.laws.roofline import ridge_point
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan
from ridgeline.simulator.exchange.communication import find_table, table_cost
from ridgeline.simulator.layers.layers import Layer, layers_of
from ridgeline.simulator.model import setting_of
from ridgeline.simulator.pricing.settings import resolve
from ridgeline.workload import Workload

Way = Literal["data", "model"]


class Intensity(Value, frozen=True, kw_only=True):
    """What a worker sends for a layer in a step, and FLOP per byte of that; None where it sends nothing.

    `samples` are those of all workers from which on data parallelism sends less; None where the layer sends
    nothing when it is split. `ridge` is the FLOP per byte below which the link decides; None where nothing
    was measured.
    """

    layer: Layer
    data_bytes: float
    model_bytes: float
    data_intensity: float | None
    model_intensity: float | None
    samples: float | None
    ridge: float | None = None

    @property
    def better(self) -> Way | None:
        """The way with the higher intensity; None if both send the same, or nothing can be split."""
        if not self.layer.is_split or self.data_bytes == self.model_bytes:
            return None
        return "data" if self.data_bytes < self.model_bytes else "model"

    @property
    def ratio(self) -> float:
        """The higher intensity over the lower one; 1 where nothing is sent."""
        low, high = sorted((self.data_bytes, self.model_bytes))
        return high / low if low else 1.0

    def is_link_bound(self, way: Way) -> bool:
        """Whether sending takes longer than computing, by a known ridge point."""
        intensity = self.data_intensity if way == "data" else self.model_intensity
        return self.ridge is not None and intensity is not None and intensity < self.ridge


class Intensities(Noun, frozen=True, kw_only=True):
    """The layers of a step with their intensities; made by `intensities`.

    `flops` are those of a worker, `other_flops` the part of them in no layer; `samples` those of all workers.
    `rates` are the FLOP/s of a worker by family, `link_bytes_per_s` what its link carries.
    """

    kind: ClassVar[str] = "intensities"

    title: str
    workers: int
    samples: int
    flops: int
    other_flops: int
    layers: tuple[Intensity, ...]
    rates: dict[str, float] = {}
    link_bytes_per_s: float | None = None
    notes: tuple[str, ...] = ()

    def sent(self, way: Way | None) -> float:
        """Bytes that a worker sends for all layers in one way; None: each in the better one."""
        if way is None:
            return sum(min(one.data_bytes, one.model_bytes) for one in self.layers)
        return sum(one.data_bytes if way == "data" else one.model_bytes for one in self.layers)


def intensities(workload: Workload, workers: int, machine: Machine | None = None) -> Intensities:
    """The intensity of each layer on the wire, for workers that share its samples, or its columns.

    Both ways are of the same batch: that of all workers, each of which has the workload's samples under data
    parallelism, and all of them but a share of each layer's columns under model parallelism. Latencies are
    left out, as in every roofline.

    Args:
        workload: The step of one worker under data parallelism.
        workers: At least two.
        machine: For the ridge points; its clusters are heeded.

    Raises:
        PlanError: fewer than two workers.

    Source: see `laws.intensity`.
    """
    if workers < 2:
        raise PlanError(
            f"wanted at least 2 workers to share layers, got {workers}; a worker alone sends nothing"
        )
    found = layers_of(workload)
    limits = _limits(machine, workload, workers, found.layers)
    notes = list(limits.notes)
    if not any(op.memory for op in workload.ops):
        notes.append(
            "the workload does not say where tensors lie: what splitting layers sends is not known; trace "
            "the step again"
        )
    return Intensities(
        title=workload.name,
        workers=workers,
        samples=workers * workload.samples,
        flops=workload.flops,
        other_flops=found.other_flops,
        layers=tuple(_intensity(layer, workload, workers, limits) for layer in found.layers),
        rates={family: rate for (family, _), rate in limits.rates.items()},
        link_bytes_per_s=limits.link_bytes_per_s,
        notes=tuple(notes),
    )


class _Limits(NamedTuple):
    """What was measured of a worker while this many work; rates by family and dtype."""

    rates: dict[tuple[str, str], float]
    link_bytes_per_s: float | None
    notes: tuple[str, ...]


def _intensity(layer: Layer, workload: Workload, workers: int, limits: _Limits) -> Intensity:
    data = data_parallel_bytes(layer.gradient_bytes, workers)
    # All workers' samples, since each has the whole batch where columns are split.
    model = model_parallel_bytes(
        workers * layer.gathered_bytes, workers * layer.reduced_bytes, workers
    )
    rate, link = limits.rates.get((layer.family, layer.dtype)), limits.link_bytes_per_s
    return Intensity(
        layer=layer,
        data_bytes=data,
        model_bytes=model,
        data_intensity=wire_intensity(layer.flops, data) if data else None,
        model_intensity=wire_intensity(layer.flops, model) if model else None,
        samples=samples_of_equal_bytes(workers * workload.samples, data, model) if model else None,
        ridge=ridge_point(rate, link) if rate and link else None,
    )


def _limits(
    machine: Machine | None, workload: Workload, workers: int, layers: Sequence[Layer]
) -> _Limits:
    """The ceilings of the layers' families, and the rate of the link at the largest size measured."""
    if machine is None:
        return _Limits({}, None, ())
    setting = setting_of(machine, workload, Plan(workers=workers))
    known = {entry.setting for entry in machine.ceilings}
    rated, note = resolve(known, setting, "ceilings")
    notes = [note] if note else []
    rates: dict[tuple[str, str], float] = {}
    for family, dtype in dict.fromkeys((one.family, one.dtype) for one in layers if one.flops):
        rate = _rate(machine, rated, family, dtype)
        if rate is None:
            notes.append(f"no ceiling of {family} in {dtype} was measured: it has no ridge point")
        else:
            rates[family, dtype] = rate
    link, note = _link_rate(machine, setting)
    return _Limits(rates, link, tuple(filter(None, (*notes, note))))


def _rate(machine: Machine, setting: Setting | None, family: str, dtype: str) -> float | None:
    """The ceiling of a family, or of matrix multiplication, of which all others consist."""
    known = {(c.family, c.dtype): c.rate.value for c in machine.ceilings if c.setting == setting}
    return known.get((family, dtype), known.get(("matmul", dtype)))


def _link_rate(machine: Machine, setting: Setting) -> tuple[float | None, str]:
    """Most bytes per second that an all-reduce puts on each worker's link, and what was assumed."""
    try:
        table = find_table(machine, SUM, setting)
    except MachineError as error:
        return None, f"there is no ridge point: {error}"
    factor = bus_bandwidth_factor(SUM, setting.workers)
    rates = [factor * size / table_cost(table, size).seconds for size, _ in table.points]
    # The largest rate, since a roofline leaves latencies out.
    return max(rates), table.note
