"""`benchmarks/repeated_probes.py`: which numbers of repeated runs lie within what other runs state."""

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from ridgeline.machine import Dispatch, Machine, Quantity
from strategies import make_machine

ROOT = Path(__file__).parents[2]


def driver() -> ModuleType:
    """The program as a module."""
    path = ROOT / "benchmarks/repeated_probes.py"
    spec = importlib.util.spec_from_file_location("repeated_probes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def profile(forward: Quantity, backward: Quantity) -> Machine:
    """A profile of two numbers."""
    return Machine(
        fingerprint="0" * 16,
        measured_at="2026-11-29T00:00:00+00:00",
        host=make_machine().host,
        devices=(),
        dispatch=(
            Dispatch(device="cpu", phase="forward", seconds=forward),
            Dispatch(device="cpu", phase="backward", seconds=backward),
        ),
    )


def number(value: float, reach: float | None) -> Quantity:
    """A median with quartiles 1 % around it, and perhaps a range."""
    found = Quantity.measured([0.98 * value, value, 1.02 * value], "s")
    if reach is None:
        return found
    return msgspec.structs.replace(
        found, repeat_low=(1 - reach) * value, repeat_high=(1 + reach) * value
    )


def test_shares_are_of_all_ordered_pairs(tmp_path: Path) -> None:
    """A number that nobody gives a range counts for quartiles alone; what is assumed is no measurement."""
    program = driver()
    machines = [
        profile(number(1.0, 0.1), number(5.0, None)),
        profile(number(1.05, 0.02), number(5.0, None)),
        profile(number(1.3, 0.2), number(5.0, None)),
    ]
    overall, by_kind = program.compared(machines)
    assert by_kind == {"dispatch": overall}
    assert overall.numbers == 2
    assert overall.within_quartiles == pytest.approx(6 / 12)
    # 1.0 +- 0.1 holds 1.05; 1.3 +- 0.26 holds 1.05; nothing else.
    assert overall.within_range == pytest.approx(2 / 6)
    assert overall.range_reach == pytest.approx(0.1)
    paths = [machine.save(tmp_path / f"{n}.json") for n, machine in enumerate(machines)]
    assert program.compared([Machine.load(path) for path in paths])[0] == overall
    assumed = profile(number(1.0, 0.1), Quantity.assumed(1.0, "s"))
    assert len(program.numbers_of(assumed)) == 1


def test_each_number_of_a_profile_has_a_place_of_its_own() -> None:
    """Sizes of a table and settings are told apart; of a whole profile none is lost."""
    machine = make_machine()
    text = msgspec.json.encode(machine)
    found = driver().numbers_of(machine)
    assert len(found) == text.count(b'"source":"measured"') > 5
