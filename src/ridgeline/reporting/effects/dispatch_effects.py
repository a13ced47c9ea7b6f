"""What calls of each class cost the host, as a table and a sentence."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine.operator_dispatch import OperatorDispatch
from ridgeline.reporting.effects.cells import seconds
from ridgeline.reporting.grid import Grid

HEAD = (
    "Class",
    "Alone",
    "Spread",
    "Recorded",
    "Spread",
    "Backward",
    "Spread",
    "Backward's share",
    "Samples",
)


def dispatch_effects(known: Sequence[OperatorDispatch]) -> tuple[Grid, ...]:
    """A table for each device; none where nothing was measured."""
    devices = dict.fromkeys(entry.device for entry in known)
    return tuple(
        _effect(device, [entry for entry in known if entry.device == device]) for device in devices
    )


def _effect(device: str, known: Sequence[OperatorDispatch]) -> Grid:
    rows = tuple(
        (
            f"{entry.kind}: {entry.call}",
            *seconds(entry.plain),
            *seconds(entry.recorded),
            *seconds(entry.backward),
            "" if entry.backward_share is None else units.percent(entry.backward_share.value),
            str(entry.plain.n),
        )
        for entry in known
    )
    return Grid(f"Dispatch by class of operator ({device})", HEAD, rows, _reading(known))


def _reading(known: Sequence[OperatorDispatch]) -> str:
    by_cost = sorted(known, key=lambda entry: entry.plain.value)
    least, most = by_cost[0], by_cost[-1]
    text = (
        f"A call that computes next to nothing takes the host {units.seconds(least.plain.value)} "
        f"({least.kind}) to {units.seconds(most.plain.value)} ({most.kind})"
    )
    both = [
        (recording.value, share.value)
        for entry in known
        if (recording := entry.recording) and (share := entry.backward_share)
    ]
    if both:
        added, shares = zip(*both, strict=True)
        text += (
            f"; the record for backward adds up to {units.seconds(max(added))} to that, and backward is "
            f"{units.percent(min(shares))} to {units.percent(max(shares))} of what a trained call costs"
        )
    return (
        f"{text}. Operators that take less on the device than this wait for the host, unless a compiler "
        "merges them or a graph is replayed."
    )
