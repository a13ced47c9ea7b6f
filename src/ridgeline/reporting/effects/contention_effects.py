"""How much families of operators and transfers slow each other, as a table and a sentence."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine.contention import Contention
from ridgeline.machine.quantity import Quantity
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import spread, times

NAMES = {
    "collective": "all-reduces",
    "host_to_device": "copies to the GPU",
    "device_to_host": "copies to the host",
}
HEAD = (
    "What runs at once",
    "Computing slows",
    "Spread",
    "Transfers slow",
    "Spread",
    "Gain",
    "Samples",
)


def contention_effects(known: Sequence[Contention]) -> tuple[Grid, ...]:
    """One table of all settings; none where nothing was measured."""
    if not known:
        return ()
    rows = tuple(
        (
            f"{entry.call} beside {_transfers(entry)}, {entry.setting}",
            *_slowed(entry.compute_slowdown),
            *_slowed(entry.transfer_slowdown),
            times(entry.gain),
            str(entry.compute_slowdown.n),
        )
        for entry in known
    )
    return (Grid("Computing beside transfers", HEAD, rows, _reading(known)),)


def _transfers(entry: Contention) -> str:
    return f"{NAMES[entry.transfer]} of {units.num_bytes(entry.message_bytes)}"


def _slowed(slowdown: Quantity) -> tuple[str, str]:
    return times(slowdown.value), spread(slowdown)


def _reading(known: Sequence[Contention]) -> str:
    computing = max(known, key=lambda entry: entry.compute_slowdown.value)
    transfers = max(known, key=lambda entry: entry.transfer_slowdown.value)
    least = min(known, key=lambda entry: entry.gain)
    return (
        f"While both run, computing takes up to {times(computing.compute_slowdown.value)} as long as alone "
        f"({computing.family} beside {NAMES[computing.transfer]}, {computing.setting}), transfers up to "
        f"{times(transfers.transfer_slowdown.value)} ({NAMES[transfers.transfer]} beside {transfers.family}, "
        f"{transfers.setting}). The gain over one after the other is 2 where neither slows and 1 where "
        f"overlapping is worth nothing; it is least for {least.family} beside {NAMES[least.transfer]}, "
        f"{least.setting}: {times(least.gain)}."
    )
