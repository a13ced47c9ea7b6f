"""How much families and transfers slow each other, as people read it."""

import msgspec
from sample_machine import make_machine, sampled

from ridgeline.machine import Setting
from ridgeline.machine.contention import ComputeFamily, Contention, TransferKind
from ridgeline.reporting.effects.contention_effects import contention_effects
from ridgeline.reporting.page.page_machine import machine_section


def entry(
    family: ComputeFamily, transfer: TransferKind, compute: float, slowed: float, workers: int
) -> Contention:
    return Contention(
        setting=Setting(device="cuda", workers=workers),
        family=family,
        call=f"{family} of 1 MiB",
        transfer=transfer,
        message_bytes=4 << 20,
        compute_slowdown=sampled(compute, "x"),
        transfer_slowdown=sampled(slowed, "x"),
    )


KNOWN = (
    entry("matmul", "host_to_device", 1.0, 1.25, 1),
    entry("elementwise", "device_to_host", 1.6, 1.6, 1),
    entry("matmul", "collective", 1.1, 4.0, 2),
)


def test_both_ways_and_what_is_gained() -> None:
    """Each pair in a row; the sentence names the worst of either way, and the pair that gains least."""
    (effect,) = contention_effects(KNOWN)
    assert effect.rows == (
        (
            "matmul of 1 MiB beside copies to the GPU of 4.00 MiB, 1 x cuda",
            *("1.00 x", "10.0 %", "1.25 x", "10.0 %", "1.80 x", "5"),
        ),
        (
            "elementwise of 1 MiB beside copies to the host of 4.00 MiB, 1 x cuda",
            *("1.60 x", "10.0 %", "1.60 x", "10.0 %", "1.25 x", "5"),
        ),
        (
            "matmul of 1 MiB beside all-reduces of 4.00 MiB, 2 x cuda",
            *("1.10 x", "10.0 %", "4.00 x", "10.0 %", "1.16 x", "5"),
        ),
    )
    assert effect.reading == (
        "While both run, computing takes up to 1.60 x as long as alone (elementwise beside copies to the host, 1 x cuda), "
        "transfers up to 4.00 x (all-reduces beside matmul, 2 x cuda). The gain over one after the other is 2 where "
        "neither slows and 1 where overlapping is worth nothing; it is least for matmul beside all-reduces, 2 x cuda: "
        "1.16 x."
    )


def test_the_page_shows_it_where_it_was_measured() -> None:
    """And nothing where it was not."""
    assert contention_effects(()) == ()
    machine = msgspec.structs.replace(make_machine(), contention=KNOWN)
    assert "Computing beside transfers" in str(machine_section(machine, None))
    assert "beside transfers" not in str(machine_section(make_machine(), None))
