"""Seconds of one operator on one setting of a machine, and what limits it.

An exact timing of the same operator and shapes is used first, then the measured curve of its family,
then the roofline of the ceilings. What was not measured at the setting is taken from the nearest one
that was, and says so.
"""

import math
from collections.abc import Collection
from typing import Literal

from ridgeline.codec import Value
from ridgeline.errors import MachineError
from ridgeline.laws.curves import Point, interpolate
from ridgeline.machine import Ceiling, DispatchPhase, Machine, Setting
from ridgeline.plan import Precision
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.simulator.pricing.settings import resolve
from ridgeline.workload import Op

Bound = Literal["compute", "memory", "dispatch"]
CostSource = Literal["timing", "curve", "roofline", "assumed"]

COMPUTE_FAMILIES = ("matmul", "convolution", "attention")
"""Families whose ceilings are in FLOP/s; all others are limited by the bytes they move."""

_LIMITS = {
    "matmul": ("matmul",),
    "attention": ("attention", "matmul"),
    "convolution": ("convolution", "matmul"),
    "copy": ("memory", "elementwise"),
}
_BYTE_LIMITS = ("elementwise", "memory")
_PRECISION_DTYPES = {"bf16": "bfloat16", "tf32": "tf32", "fp16": "float16"}


class Cost(Value, frozen=True, kw_only=True):
    """What one operator costs.

    `seconds` is its time on the device (on the CPU: in the kernel); `ideal_s` the part that the FLOP
    take at the ceiling and `roofline_s` the least that FLOP and bytes allow, both at most `seconds`.
    A timing on the CPU contains the dispatch (`has_dispatch`), the other sources do not.
    """

    seconds: float
    bound: Bound
    source: CostSource
    ideal_s: float = 0.0
    roofline_s: float = 0.0
    has_dispatch: bool = False


def op_seconds(
    machine: Machine, op: Op, setting: Setting, *, precision: Precision = "as-is"
) -> Cost:
    """What `op` costs at `setting`.

    Args:
        machine: Measured ceilings and timings.
        op: The operator; views cost nothing on a device.
        setting: How the device is shared. Each GPU serves one worker, so there the number of workers
            does not matter.
        precision: `bf16` and `tf32` change the ceiling of operators that compute.

    Raises:
        MachineError: neither a timing nor a ceiling of the operator's kind was measured.

    Source: max(F / pi, Q / beta), Williams, Waterman, Patterson 2009, with the measured rate at the
        operator's size in place of pi and beta where there is a curve.
    """
    return prices(machine, setting, precision).op(op)


@kept_by_identity(64)
def prices(machine: Machine, setting: Setting, precision: Precision = "as-is") -> "Prices":
    """The price list of a machine at a setting; made once and kept."""
    return Prices(machine, setting, precision)


class Prices:
    """Costs at one setting of one machine, indexed for fast look-up.

    Attributes:
        notes: What had to be assumed, in the order in which it was first needed.
    """

    def __init__(self, machine: Machine, setting: Setting, precision: Precision) -> None:
        self.machine = machine
        self.setting = setting
        self.precision = precision
        self._notes: dict[str, None] = {}
        timed, self._timing_note = resolve(
            {entry.setting for entry in machine.timings}, setting, "operator timings"
        )
        rated, self._ceiling_note = resolve(
            {entry.setting for entry in machine.ceilings}, setting, "ceilings"
        )
        if self._timing_note and rated == setting:
            timed = None  # a curve of this very setting says more than a timing of another one
        mine = [entry for entry in machine.timings if entry.setting == timed]
        self._timings = {entry.key: entry.seconds.value for entry in mine}
        self._issue = {entry.key: entry.issue.value for entry in mine if entry.issue is not None}
        self._ceilings = {
            (entry.family, entry.dtype): _Limit(entry)
            for entry in machine.ceilings
            if entry.setting == rated
        }
        self._dispatch = {
            entry.phase: entry.seconds.value
            for entry in machine.dispatch
            if entry.device == setting.device
        }
        self._on_cpu = setting.device == "cpu"
        self._known: dict[tuple[object, ...], Cost] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be assumed so far, each once."""
        return tuple(self._notes)

    def dispatch(self, phase: DispatchPhase) -> float:
        """Host seconds to issue an operator of `phase`; 0, with a note, when nobody measured it."""
        if phase not in self._dispatch:
            self._notes[f"dispatch of {phase} was not measured: assumed to take no time"] = None
        return self._dispatch.get(phase, 0.0)

    def issue(self, op: Op) -> float | None:
        """Host seconds to issue exactly this op on a GPU; None when they were not measured."""
        return self._issue.get(op.key)

    def copy_seconds(self, num_bytes: float) -> float:
        """Seconds to read and write `num_bytes` in all, as an elementwise operator does.

        Raises:
            MachineError: no ceiling in bytes per second was measured.
        """
        limit, _ = self._byte_limit(_BYTE_LIMITS)
        return num_bytes / limit.at(num_bytes) if num_bytes else 0.0

    def least_copy_seconds(self, num_bytes: float) -> float:
        """Seconds to read and write `num_bytes` in all at the best measured bandwidth.

        Raises:
            MachineError: no ceiling in bytes per second was measured.
        """
        return num_bytes / self._byte_limit(_BYTE_LIMITS)[1]

    def by_curve(self, op: Op) -> float:
        """Seconds at the measured rate of the op's family for its size, whatever was timed of the op itself.

        Raises:
            MachineError: no ceiling of its kind was measured.
        """
        return max(self._compute(op, op.dtype)[0], self._memory(op, op.bytes_moved)[0])

    def op(self, op: Op) -> Cost:
        """What `op` costs; see `op_seconds`."""
        # The phase and the counted work tell apart equal calls that are priced differently.
        known = (op.key, op.phase, op.family, op.dtype, op.flops, op.bytes_moved)
        cost = self._known.get(known)
        if cost is None:
            cost = self._known[known] = self._price(op, known[0])
        return cost

    def _price(self, op: Op, key: str) -> Cost:
        dtype = self._dtype(op)
        # A timing is of the traced dtype, and says nothing of another precision.
        seconds = self._timings.get(key) if dtype == op.dtype else None
        num_bytes = op.bytes_moved
        if dtype in ("bfloat16", "float16") and op.dtype == "float32":
            # Traced in float32: under autocast the operands of the kernel have half the bytes.
            num_bytes //= 2
        try:
            compute_s, peak_s, has_curve, note = self._compute(op, dtype)
            memory_s, least_s, byte_curve = self._memory(op, num_bytes)
        # A timing needs no ceiling; only what limits the operator stays unknown then.
        except MachineError:
            if seconds is None and op.family != "view":
                raise
            compute_s = peak_s = memory_s = least_s = 0.0
            has_curve = byte_curve = False
            note = ""
        source: CostSource
        if seconds is not None:
            source = "assumed" if self._timing_note else "timing"
            self._note(self._timing_note)
        else:
            # A view moves nothing on a device; only issuing it costs.
            seconds = 0.0 if op.family == "view" else max(compute_s, memory_s)
            source = "curve" if has_curve or byte_curve else "roofline"
            if op.family != "view" and (note or self._ceiling_note):
                source = "assumed"
                self._note(note)
                self._note(self._ceiling_note)
        has_dispatch = self._on_cpu and key in self._timings and dtype == op.dtype
        dispatch_s = self._dispatch.get(op.phase, 0.0)
        limits: tuple[tuple[float, Bound], ...] = (
            (compute_s, "compute"), (memory_s, "memory"), (dispatch_s, "dispatch"),
        )  # fmt: skip
        bound = max(limits)[1] if op.family != "view" else "dispatch"
        return Cost(
            seconds=seconds,
            bound=bound,
            source=source,
            ideal_s=min(peak_s, seconds),
            roofline_s=min(max(peak_s, least_s), seconds),
            has_dispatch=has_dispatch,
        )

    def _dtype(self, op: Op) -> str:
        # Autocast narrows products and convolutions; other operators keep the dtype that they were traced in.
        is_cast = op.family in COMPUTE_FAMILIES and op.dtype == "float32"
        return _PRECISION_DTYPES.get(self.precision, op.dtype) if is_cast else op.dtype

    def _compute(self, op: Op, dtype: str) -> tuple[float, float, bool, str]:
        """(seconds by curve, seconds at the ceiling, is there a curve, what was assumed)."""
        if op.family not in COMPUTE_FAMILIES or not op.flops:
            return 0.0, 0.0, False, ""
        wanted = _LIMITS[op.family]
        limit, note = self._compute_limit(op.family, wanted, dtype)
        return op.flops / limit.at(op.flops), op.flops / limit.rate, limit.has_curve, note

    def _memory(self, op: Op, num_bytes: int) -> tuple[float, float, bool]:
        if not num_bytes or op.family == "view":
            return 0.0, 0.0, False
        names = _LIMITS["copy"] if op.family == "copy" else _BYTE_LIMITS
        limit, best = self._byte_limit(names, num_bytes)
        if op.family in COMPUTE_FAMILIES:
            # The curve of a computing family already contains what small sizes lose.
            return num_bytes / best, num_bytes / best, False
        return num_bytes / limit.at(num_bytes), num_bytes / best, limit.has_curve

    def _compute_limit(
        self, family: str, names: Collection[str], dtype: str
    ) -> tuple["_Limit", str]:
        # Of another dtype rather than of another family: rates of families differ by more.
        for candidate in dict.fromkeys((dtype, "float32")):
            for name in names:
                limit = self._ceilings.get((name, candidate))
                if limit is not None:
                    if candidate == dtype and (family != "convolution" or name == family):
                        return limit, ""
                    missing = f"{family} in {dtype} was not measured"
                    return limit, f"{missing}: assumed as {name} in {candidate}"
        raise self._missing(family, dtype)

    def _byte_limit(
        self, names: Collection[str], num_bytes: float = math.inf
    ) -> tuple["_Limit", float]:
        """The ceiling in B/s (any dtype: bytes are bytes) and the best rate of all of them."""
        known = self._ceilings.items()
        found = [limit for name in names for (family, _), limit in known if family == name]
        if not found:
            raise self._missing("elementwise", "float32")
        best = max(limit.rate for limit in found)
        if self._on_cpu:
            return found[0], best
        # A kernel takes some seconds however small it is, which a curve of large copies does not show.
        down = (limit for limit in found if limit.least <= num_bytes)
        return next(down, min(found, key=lambda limit: limit.least)), best

    def _missing(self, family: str, dtype: str) -> MachineError:
        try:
            self.machine.ceiling(self.setting, family, dtype)
        except MachineError as error:
            return error
        return MachineError(f"wanted the {family} ceiling for {dtype} at {self.setting}, got none")

    def _note(self, text: str) -> None:
        if text:
            self._notes[text] = None


class _Limit:
    """A ceiling with its curve as plain numbers."""

    __slots__ = ("has_curve", "least", "points", "rate")

    def __init__(self, ceiling: Ceiling) -> None:
        self.rate = ceiling.rate.value
        self.points: tuple[Point, ...] = tuple((p.work, p.rate) for p in ceiling.curve)
        self.has_curve = bool(self.points)
        self.least = self.points[0][0] if self.points else 0.0

    def at(self, work: float) -> float:
        """Rate reached by one operation of `work`; never above the ceiling."""
        if not self.points:
            return self.rate
        return min(self.rate, interpolate(self.points, work))
