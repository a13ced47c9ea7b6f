"""`Machine`: what the hardware can do, number by number, each with its spread and its source.

A CPU is described per *setting*: how many worker processes run at once and how many threads each has, because
cores, caches and memory bandwidth are shared. On GPUs `threads` is 0 and `workers` counts the GPUs in use.

What is read from a file is held to the ranges in which the laws mean something; see `codec.decode`.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ridgeline.codec import Noun, Value
from ridgeline.errors import MachineError
from ridgeline.laws.arguments import check, check_ascending
from ridgeline.laws.curves import table_seconds
from ridgeline.machine.cluster import Level
from ridgeline.machine.contention import Contention, Overlap
from ridgeline.machine.gpu_levels import GpuLevels
from ridgeline.machine.host_load import HostLoad
from ridgeline.machine.limits import Limit
from ridgeline.machine.microarchitecture import Microarchitecture
from ridgeline.machine.operator_dispatch import OperatorDispatch
from ridgeline.machine.quantity import LEAST, MOST, Amount, Quantity, check_unit
from ridgeline.machine.setting import Setting
from ridgeline.machine.stairs import Stair
from ridgeline.machine.storage import Storage
from ridgeline.machine.stragglers import Stragglers

UNIT_OF_FAMILY = {
    "matmul": "FLOP/s",
    "convolution": "FLOP/s",
    "elementwise": "B/s",
    "memory": "B/s",
}
LEAST_RATE = 1.0
"""FLOP/s or B/s: no device is slower, and no prediction at this rate leaves the range of numbers."""


class Host(Value, frozen=True, kw_only=True):
    """The computer around the devices. `cores` are those this process may use."""

    name: str
    processor: str
    cores: Annotated[int, Meta(ge=1)]
    memory_bytes: Annotated[int, Meta(ge=0)]
    cache_bytes: Annotated[int, Meta(ge=0)]
    """Size of the last-level cache; 0 when the system does not say."""
    system: str
    python: str
    torch: str


class Device(Value, frozen=True, kw_only=True):
    """One computing device: `cpu`, or one `cuda` GPU."""

    kind: Literal["cpu", "cuda"]
    index: int
    name: str
    memory_bytes: Annotated[int, Meta(ge=0)]
    capability: str = ""


class CurvePoint(Value, frozen=True, kw_only=True):
    """Rate reached (`rate`, FLOP/s or bytes/s) by one operation of size `work` (FLOP or bytes)."""

    work: float
    rate: float

    def __post_init__(self) -> None:
        """Reject what has no logarithm, or is no rate, by a `LawError`."""
        # Both ends are read by their logarithms, and a rate near 0 would make a prediction endless.
        check("work", self.work, least=LEAST, most=MOST)
        check("rate", self.rate, least=LEAST_RATE, most=MOST)


class Ceiling(Value, frozen=True, kw_only=True):
    """The best rate one worker reaches in a family of operators, while all workers of the setting run.

    Families: `matmul` and `convolution` in FLOP/s; `elementwise` and `memory` (plain copy, bytes read
    plus bytes written) in B/s. `curve` holds the rates at smaller sizes, ascending in `work`.
    """

    setting: Setting
    family: str
    dtype: str
    rate: Quantity
    curve: tuple[CurvePoint, ...] = ()

    def __post_init__(self) -> None:
        """Reject another unit, endless rates and unreadable curves, by a `LawError`."""
        unit = UNIT_OF_FAMILY.get(self.family)
        check_unit(
            f"the rate of {self.family}", self.rate, *((unit,) if unit else ("FLOP/s", "B/s"))
        )
        check(f"rate in {self.rate.unit}", self.rate.value, least=LEAST_RATE, most=MOST)
        # Curves are read between neighbours, which a search finds only in order.
        check_ascending("work", [point.work for point in self.curve])


DispatchPhase = Literal[
    "forward", "backward", "optimizer", "launch", "graph_replay", "graph_start", "graph_kernel"
]


class Dispatch(Value, frozen=True, kw_only=True):
    """Host seconds to issue one operator of a phase, whatever its size."""

    device: Literal["cpu", "cuda"]
    phase: DispatchPhase
    """`launch`: an eager kernel launch; `graph_replay`: issuing a whole CUDA graph; on the device,
    `graph_start`: what passes before its first kernel, `graph_kernel`: the gap that each kernel in it still
    costs."""
    seconds: Quantity

    def __post_init__(self) -> None:
        """Reject what is no duration by a `LawError`."""
        check_unit(f"the dispatch of {self.phase}", self.seconds, "s")


class SizePoint(Value, frozen=True, kw_only=True):
    """Measured seconds to move or reduce `num_bytes`."""

    num_bytes: int
    seconds: Quantity

    def __post_init__(self) -> None:
        """Reject what has no logarithm, or is no duration, by a `LawError`."""
        check_unit("the time of a transfer", self.seconds, "s")
        check("num_bytes", self.num_bytes, least=1, most=MOST)
        check("number of seconds", self.seconds.value, least=LEAST, most=MOST)


Operation = Literal["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
"""Collectives of which a machine has size tables."""


class Collective(Value, frozen=True, kw_only=True):
    """Size table of one collective operation over `setting.workers` ranks; sizes ascending."""

    setting: Setting
    operation: Operation
    backend: str
    table: tuple[SizePoint, ...]

    def __post_init__(self) -> None:
        """Reject a worker alone, and a table that is empty or cannot be read, by a `LawError`."""
        check("number of workers of a collective", self.setting.workers, least=2)
        # Unlike a link's, whose absence is kept: predictions take any table that is there.
        check("number of points of a size table", len(self.table), least=1)
        check_ascending("num_bytes", [point.num_bytes for point in self.table])


Direction = Literal["host_to_device", "device_to_host", "device_to_device"]


class Link(Value, frozen=True, kw_only=True):
    """Size table of copies over one link; sizes ascending.

    A link leads from pinned host memory to a GPU, back, or from one GPU to another. `source` and `target`
    are the indexes of the GPUs at its ends; the host has none, so there it is 0 and means nothing.
    """

    direction: Direction
    source: int = 0
    target: int = 0
    table: tuple[SizePoint, ...]

    def __post_init__(self) -> None:
        """Reject a table that cannot be read by a `LawError`; an empty one: the link was not measured."""
        check_ascending("num_bytes", [point.num_bytes for point in self.table])

    @property
    def ends(self) -> tuple[str, str]:
        """Where it leads from and to: `cpu` or `cuda:0` and on."""
        source = "cpu" if self.direction == "host_to_device" else f"cuda:{self.source}"
        target = "cpu" if self.direction == "device_to_host" else f"cuda:{self.target}"
        return source, target

    def seconds(self, num_bytes: float) -> float:
        """Seconds to copy `num_bytes`, read from the table; see `laws.curves.table_seconds`."""
        # The median, as copies that others disturbed are no property of the link.
        points = [(float(point.num_bytes), point.seconds.value) for point in self.table]
        return table_seconds(points, num_bytes)


class CodecTiming(Value, frozen=True, kw_only=True):
    """Seconds to encode and decode a bucket, exchanges apart, while all workers of the setting do so.

    `table` is of one square float32 matrix. `parameter` is what each further parameter of a bucket costs,
    `shape` each further shape of matrices. The slowdowns are of computing and encoding beside each other.
    """

    setting: Setting
    compression: str
    table: Annotated[tuple[SizePoint, ...], Meta(min_length=1)]
    parameter: Quantity
    shape: Quantity
    compute_slowdown: Quantity
    codec_slowdown: Quantity

    def __post_init__(self) -> None:
        """Reject numbers in other units by a `LawError`."""
        check_unit("the encoding of a parameter", self.parameter, "s")
        check_unit("the encoding of a shape", self.shape, "s")
        check_unit("the slowdown of computing", self.compute_slowdown, "x")
        check_unit("the slowdown of encoding", self.codec_slowdown, "x")


class Workspace(Value, frozen=True, kw_only=True):
    """Bytes that one call of an operator takes beside its inputs and what a trace knows of its outputs.

    `passing_bytes` are the most that it held at once and gave back: copies of operands, partial sums.
    `kept_bytes` are those of outputs whose size only the kernel knows, such as what a recurrent layer keeps
    for its backward pass. `library_bytes` stay with its library, for all later calls of the same thread.
    """

    passing_bytes: Annotated[int, Meta(ge=0)] = 0
    kept_bytes: Annotated[int, Meta(ge=0)] = 0
    library_bytes: Annotated[int, Meta(ge=0)] = 0


class OperatorTiming(Value, frozen=True, kw_only=True):
    """Measured seconds of one operator with exact shapes; `key` is `Op.key` of the workload.

    On a GPU `seconds` are those of its kernels (0 for a view), and `issue` those that the host needs to
    issue it, module and autograd included. `workspace` is None where it was not measured.
    """

    setting: Setting
    key: str
    seconds: Quantity
    issue: Quantity | None = None
    workspace: Workspace | None = None

    def __post_init__(self) -> None:
        """Reject what is no duration by a `LawError`."""
        check_unit("the time of an operator", self.seconds, "s")
        if self.issue is not None:
            check_unit("the issue of an operator", self.issue, "s")


class StepCheck(Value, frozen=True, kw_only=True):
    """The operators' timings held against whole passes over the same step, without a mark between them.

    `ops_s` is the sum of the timings before it was corrected by this check, `whole` what a pass took; on a
    GPU both are seconds of its kernels. `missed` names the families of operators that make up the
    difference where it is more than a few percent, `untimed` counts operators without a timing.
    """

    setting: Setting
    workload: str
    precision: str
    memory_format: str = "as-is"
    ops_s: Amount
    whole: Quantity | None = None
    missed: tuple[str, ...] = ()
    untimed: Annotated[int, Meta(ge=0)] = 0

    @property
    def ratio(self) -> float | None:
        """Sum of the timings over the whole pass; None where no whole pass was timed."""
        # A pass without work takes no time, and nothing can be held against that.
        if self.whole is None or not self.whole.value:
            return None
        return self.ops_s / self.whole.value


class Machine(Noun, frozen=True, kw_only=True):
    """What the hardware can do; made by `rl.measure()`, saved as `machine.json`.

    `fingerprint` names hardware and software it was measured on: a profile with another is not used unasked.
    `effort` says how thoroughly. `cluster` and `stragglers` are not measured: users write how more such
    hosts are joined, and how much devices that do the same differ.
    `caches` are bytes by level, of one core; `stairs` rise by size; `storage` has one entry for each file
    system. These, `microarchitecture`, `operator_dispatch`, `gpu` and `contention` come with a full
    measurement. `limits` are those of the process that measured last.
    `host_load` is the worst that others did while it was measured. `suspect` says how trials contradict it,
    `retakes` how often it was measured again for either: see `planner.doubted`.
    """

    kind: ClassVar[str] = "machine"

    fingerprint: str
    measured_at: str
    effort: Literal["quick", "full"] = "quick"
    host: Host
    devices: tuple[Device, ...]
    ceilings: tuple[Ceiling, ...] = ()
    dispatch: tuple[Dispatch, ...] = ()
    collectives: tuple[Collective, ...] = ()
    links: tuple[Link, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    codecs: tuple[CodecTiming, ...] = ()
    timings: tuple[OperatorTiming, ...] = ()
    checks: tuple[StepCheck, ...] = ()
    cluster: tuple[Level, ...] = ()
    stragglers: Stragglers = Stragglers()
    caches: dict[str, int] = {}
    stairs: tuple[Stair, ...] = ()
    microarchitecture: Microarchitecture = Microarchitecture()
    operator_dispatch: tuple[OperatorDispatch, ...] = ()
    gpu: GpuLevels = GpuLevels()
    contention: tuple[Contention, ...] = ()
    storage: tuple[Storage, ...] = ()
    limits: tuple[Limit, ...] = ()
    host_load: HostLoad | None = None
    suspect: str = ""
    retakes: Annotated[int, Meta(ge=0)] = 0
    warnings: tuple[str, ...] = ()

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """`cuda` when the machine has a GPU, else `cpu`."""
        # Where there is a GPU the host only issues its work.
        return "cuda" if any(device.kind == "cuda" for device in self.devices) else "cpu"

    @property
    def num_gpus(self) -> int:
        """Number of CUDA devices."""
        return sum(device.kind == "cuda" for device in self.devices)

    @property
    def num_places(self) -> int:
        """Workers that do not share a device, or on a CPU a core."""
        return self.num_gpus or self.host.cores

    def ceiling(self, setting: Setting, family: str, dtype: str) -> Ceiling:
        """The measured ceiling for exactly this setting, family and dtype.

        Raises:
            MachineError: it was not measured; the message lists what was.
        """
        for entry in self.ceilings:
            if (entry.setting, entry.family, entry.dtype) == (setting, family, dtype):
                return entry
        # Sorted, so that the message is the same whatever the order of measuring.
        known = sorted({f"{c.family}/{c.dtype} at {c.setting}" for c in self.ceilings})
        raise MachineError(
            f"wanted the {family} ceiling for {dtype} at {setting}, got a profile that has only "
            f"{', '.join(known) or 'nothing'} ({self.fingerprint}); run `ridgeline measure`"
        )

    def link(self, source: str, target: str) -> Link:
        """The measured link from `source` to `target`: `cpu`, or `cuda:0` and on.

        Raises:
            MachineError: it was not measured; the message lists what was.
        """
        for entry in self.links:
            # A link that could not be measured is kept without a table.
            if entry.ends == (source, target) and entry.table:
                return entry
        known = ", ".join(" -> ".join(entry.ends) for entry in self.links if entry.table)
        raise MachineError(
            f"wanted the link {source} -> {target}, got a profile that has only "
            f"{known or 'no links'} ({self.fingerprint}); run `ridgeline measure` where both devices are"
        )

    def link_seconds(self, source: str, target: str, num_bytes: float) -> float:
        """Seconds to copy `num_bytes` between two devices; 0 from a device to itself. See `Link.seconds`.

        Args:
            source: `cpu` (pinned memory), or `cuda:0` and on.
            target: Alike.
            num_bytes: Size of the copy.

        Raises:
            MachineError: this link was not measured.
        """
        # Nothing is copied then, while a table has its latency for every size.
        if source == target:
            return 0.0
        return self.link(source, target).seconds(num_bytes)

    def __repr__(self) -> str:
        gpus = f", {self.num_gpus} GPU" if self.num_gpus else ""
        return (
            f"Machine({self.host.processor}, {self.host.cores} cores{gpus}: {len(self.ceilings)} ceilings, "
            f"{len(self.collectives)} collectives, {len(self.timings)} operator timings, "
            f"fingerprint {self.fingerprint})"
        )
