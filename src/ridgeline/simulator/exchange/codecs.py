"""What encoding and decoding a bucket takes, by what was measured of the codec or else by the bytes it moves.

On a CPU a codec works in the thread of the communication lane, beside the backward pass, before and behind
the collectives of its bucket; on a GPU its kernels stand in the stream of the step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.laws.curves import table_seconds
from ridgeline.machine import CodecTiming, Machine, Setting
from ridgeline.plan import Sync
from ridgeline.simulator.pricing.costs import prices
from ridgeline.simulator.pricing.settings import nearest_setting
from ridgeline.synchronisation import COMPRESSIONS, codec_bytes, values_of
from ridgeline.synchronisation.entries import Shape
from ridgeline.timeline import Lane

SHARED_SLOWDOWN = 2.0
"""Of computing and encoding where nobody measured it: both in turns on one core, as where all are busy."""


class CodecCost(NamedTuple):
    """What a codec takes of a CPU around a bucket's collectives; how it and computing slow each other."""

    before_s: float
    after_s: float
    slowdown: dict[Lane, float]


class CodecPrices:
    """Seconds of a plan's codec on a CPU, by bucket.

    Attributes:
        slowdown: How many times as long computing and encoding take beside each other.
        notes: What is assumed.
    """

    def __init__(self, machine: Machine, sync: Sync, setting: Setting) -> None:
        self._machine, self._sync, self._setting = machine, sync, setting
        self.is_needed = bool(COMPRESSIONS[sync.compression].encodes) and setting.workers > 1
        self._timing = _timing(machine, sync, setting) if self.is_needed else None
        self.notes = _notes(self._timing, sync, setting) if self.is_needed else ()
        compute = codec = SHARED_SLOWDOWN
        if self._timing is not None:
            compute = max(1.0, self._timing.compute_slowdown.value)
            codec = max(1.0, self._timing.codec_slowdown.value)
        self.slowdown: dict[Lane, float] = {"compute": compute, "communication": codec}

    def seconds(self, num_bytes: int, shapes: Sequence[Shape] = ()) -> float:
        """Seconds to encode and decode a bucket with nothing beside it; 0 without a codec.

        `num_bytes` are gradients, of parameters of these shapes; none stand for one parameter.

        Raises:
            MachineError: neither the codec nor a ceiling in bytes per second was measured.
        """
        if not self.is_needed or not num_bytes:
            return 0.0
        timing, workers = self._timing, self._setting.workers
        moved = sum(codec_bytes(self._sync, num_bytes, workers))
        if timing is None:
            list_ = prices(self._machine, self._setting)
            # One call to encode and one to decode, at least.
            return list_.copy_seconds(moved) + 2 * list_.dispatch("backward")
        table = [(float(p.num_bytes), p.seconds.value) for p in timing.table]
        # Codecs that work on matrices take those of one shape together.
        matrices = {(s[0], math.prod(s[1:])) for s in shapes if len(s) > 1}
        found = table_seconds(table, num_bytes)
        found += timing.parameter.value * max(0, len(shapes) - 1)
        found += timing.shape.value * max(0, len(matrices) - 1)
        # By bytes moved, as with more workers more shares, or whole payloads, are decoded.
        known = sum(codec_bytes(self._sync, num_bytes, timing.setting.workers))
        return found * moved / max(1, known)

    def encoding(self, num_bytes: int, shapes: Sequence[Shape] = ()) -> CodecCost:
        """The same, divided by the bytes that each half moves."""
        before, after = codec_bytes(self._sync, num_bytes, self._setting.workers)
        seconds = self.seconds(num_bytes, shapes)
        # Only the sum was timed; its halves follow from what each moves.
        before_s = seconds * before / max(1, before + after)
        return CodecCost(before_s, seconds - before_s, self.slowdown)


def _timing(machine: Machine, sync: Sync, setting: Setting) -> CodecTiming | None:
    """What was measured of the codec at the setting that is most like this one."""
    # The last of several for one setting: what was measured again stands behind.
    known = {t.setting: t for t in machine.codecs if t.compression == sync.compression}
    nearest = nearest_setting(known, setting)
    return None if nearest is None else known[nearest]


def _notes(timing: CodecTiming | None, sync: Sync, setting: Setting) -> tuple[str, ...]:
    label = COMPRESSIONS[sync.compression].label
    if timing is None:
        return (
            f"encoding {label} gradients was not measured: assumed to take what the bytes that it moves do",
        )
    found = []
    if timing.setting != setting:
        found.append(
            f"encoding {label} gradients at {setting} was not measured: assumed as at {timing.setting}"
        )
    values = values_of(sync)
    changed = [
        f"{option.name}={values[option.name]!r}"
        for option in COMPRESSIONS[sync.compression].options
        if values[option.name] != option.default
    ]
    if changed:
        found.append(
            f"encoding {label} gradients was measured with default options: assumed to take as long with "
            f"{', '.join(changed)}"
        )
    return tuple(found)
