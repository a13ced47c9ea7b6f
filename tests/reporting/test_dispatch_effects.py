"""What calls of each class cost the host, as people read it."""

import msgspec
from sample_machine import make_machine, sampled

from ridgeline.machine.operator_dispatch import OperatorClass, OperatorDispatch
from ridgeline.reporting.effects.dispatch_effects import dispatch_effects
from ridgeline.reporting.page.page_machine import machine_section


def entry(
    kind: OperatorClass, call: str, plain: float, recorded: float = 0.0, backward: float = 0.0
) -> OperatorDispatch:
    return OperatorDispatch(
        device="cpu",
        kind=kind,
        call=call,
        plain=sampled(plain, "s"),
        recorded=sampled(recorded, "s") if recorded else None,
        backward=sampled(backward, "s") if backward else None,
    )


KNOWN = (
    entry("view", "t of 8 x 8", 1e-6, 1.25e-6, 1.25e-6),
    entry("matmul", "mm of 8 x 8", 2e-6, 3e-6, 9e-6),
    entry("optimizer", "_foreach_add_ to 8 of 8 x 8", 4e-6),
)


def test_classes_side_by_side() -> None:
    """Alone, with a record, backward, and what backward is of the latter two."""
    (effect,) = dispatch_effects(KNOWN)
    assert effect.title == "Dispatch by class of operator (cpu)"
    assert effect.rows == (
        ("view: t of 8 x 8", "1.00 us", "10.0 %", "1.25 us", "10.0 %", "1.25 us", "10.0 %", "50.0 %", "5"),
        ("matmul: mm of 8 x 8", "2.00 us", "10.0 %", "3.00 us", "10.0 %", "9.00 us", "10.0 %", "75.0 %", "5"),
        ("optimizer: _foreach_add_ to 8 of 8 x 8", "4.00 us", "10.0 %", "", "", "", "", "", "5"),
    )  # fmt: skip
    assert effect.reading == (
        "A call that computes next to nothing takes the host 1.00 us (view) to 4.00 us (optimizer); the record for "
        "backward adds up to 1.00 us to that, and backward is 50.0 % to 75.0 % of what a trained call costs. Operators "
        "that take less on the device than this wait for the host, unless a compiler merges them or a graph is replayed."
    )


def test_calls_without_backward_say_nothing_of_it() -> None:
    """One class alone is its own least and most."""
    (effect,) = dispatch_effects(KNOWN[2:])
    assert effect.reading.startswith(
        "A call that computes next to nothing takes the host 4.00 us (optimizer) to 4.00 us (optimizer). Operators "
    )


def test_the_page_shows_it_where_it_was_measured() -> None:
    """And says nothing where it was not."""
    machine = msgspec.structs.replace(make_machine(), operator_dispatch=KNOWN)
    assert "Dispatch by class of operator (cpu)" in str(machine_section(machine, None))
    assert "by class of operator" not in str(machine_section(make_machine(), None))
