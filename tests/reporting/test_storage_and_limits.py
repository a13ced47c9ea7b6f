"""Storage and limits, on the terminal and on the page; and profiles of before there were any."""

import json

import msgspec
from sample_machine import make_machine, measured_quantity

from printed import as_text
from ridgeline.codec import decode, encode
from ridgeline.machine import Machine
from ridgeline.machine.limits import Limit
from ridgeline.machine.storage import Access, Storage
from ridgeline.reporting.effects.system_effects import limits_effects, storage_effects
from ridgeline.reporting.page.page_machine import machine_section
from ridgeline.reporting.terminal.text import grid_text

STORAGE = Storage(
    folder="~/runs",
    mount="/home",
    kind="ext4",
    is_direct=True,
    is_compiled=True,
    file_bytes=1 << 30,
    accesses=(
        Access(
            operation="read at random",
            block_bytes=4096,
            depth=16,
            seconds=measured_quantity(2e-4, "s"),
            rate=measured_quantity(4.096e8, "B/s", 0.1),
        ),
    ),
)
LIMITS = (
    Limit(what="cores", granted=2, whole=64, by="cgroup cpu.max", follows="planned for 2"),
    Limit(what="memory", granted=8 << 30, whole=1 << 37, unit="B", by="cgroup memory.max"),
)


def test_storage_is_shown() -> None:
    """Where, what the figures mean, and each way with what a block takes and all together move."""
    (shown,) = storage_effects((STORAGE,))
    text = as_text(grid_text(shown))
    place = (
        "A file of 1.00 GiB in ~/runs, on ext4 at /home; direct: past the system's cache of files."
    )
    assert place in text
    (row,) = [line for line in text.splitlines() if line.startswith("read of")]
    assert row.split() == [
        *["read", "of", "4.00", "KiB", "at", "random,", "16", "at", "once"],
        *["200", "us", "3.0", "%", "410", "MB/s", "10.0", "%", "100000", "9"],
    ]
    page = str(
        machine_section(msgspec.structs.replace(make_machine(), storage=(STORAGE,)), None)
    ).replace("\xa0", " ")
    assert "<h3>Storage</h3>" in page
    assert place.replace("'", "&#x27;") in page
    assert "read of 4.00 KiB at random, 16 at once" in page
    assert '410 MB/s</td><td class="n">10.0 %' in page


def test_limits_are_shown() -> None:
    """How much of how much, by whom, and what follows."""
    (shown,) = limits_effects(LIMITS)
    text = as_text(grid_text(shown))
    lines = [line.split() for line in text.splitlines()]
    assert ["cores", "2", "of", "64", "cgroup", "cpu.max", "planned", "for", "2"] in lines
    assert ["memory", "8.00", "GiB", "of", "128", "GiB", "cgroup", "memory.max"] in lines
    page = str(machine_section(msgspec.structs.replace(make_machine(), limits=LIMITS), None))
    for part in sum(shown.rows, ()):
        assert part in page


def test_profiles_come_back_and_old_ones_still_load() -> None:
    """What is in the file is what was saved; a file without the new fields has none of it."""
    machine = msgspec.structs.replace(make_machine(), storage=(STORAGE,), limits=LIMITS)
    data = encode(machine)
    assert decode(Machine, data, where="file") == machine
    document = json.loads(data)
    del document["sha256"]
    for name in ("storage", "limits"):
        del document["value"][name]
    old = decode(Machine, json.dumps(document).encode(), where="file")
    assert old == make_machine()
    page = str(machine_section(old, None))
    assert "Storage" not in page
    assert "Limits" not in page
