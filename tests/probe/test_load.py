"""What others take of a host, from made-up counters of the system, and which of it disturbs a measurement."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Ceiling, Quantity, Setting, host_load
from ridgeline.machine.host_load import HostLoad
from ridgeline.probe.host import load
from ridgeline.probe.host.control_groups import Periods, cpu_periods
from ridgeline.probe.host.load import Counters, Processors, between, processors

STAT = """cpu  900 0 300 9000 50 0 20 40 10 0
cpu0 100 20 50 800 10 5 15 0 7 0
cpu1 300 0 100 500 0 0 0 100 0 0
cpu10 5000 0 0 0 0 0 0 0 0 0
intr 12345 0 0
ctxt 9876
"""
NOTHING = Counters(0.0, None, None)
SHARES = st.none() | st.floats(0.0, 1.0)
LOADS = st.builds(HostLoad, others=SHARES, stolen=SHARES, throttled=SHARES, spread=SHARES)


def test_idle_waiting_and_stolen_seconds_are_not_busy() -> None:
    """Guests are counted as user already; the sum of all processors is not counted twice."""
    assert processors(STAT, [0], 100.0) == Processors(1.9, 0.0, 10.0)
    assert processors(STAT, [1], 100.0) == Processors(4.0, 1.0, 10.0)
    assert processors(STAT, [0, 1], 100.0) == Processors(5.9, 1.0, 20.0)


def test_other_cores_do_not_count() -> None:
    """Those that this process may not use are busy with what does not disturb it."""
    assert processors(STAT, [10], 100.0) == Processors(50.0, 0.0, 50.0)
    assert processors(STAT, [7], 100.0) is None
    assert processors("", [0], 100.0) is None


def test_old_systems_tell_less() -> None:
    """Without `steal` nothing is stolen. Source: proc_stat(5): since Linux 2.6.11."""
    assert processors("cpu0 100 0 0 300\n", [0], 100.0) == Processors(1.0, 0.0, 4.0)


@given(st.floats(0.0, 4.0), st.floats(0.0, 4.0), st.floats(0.0, 2.0))
def test_what_is_busy_is_own_or_others(own_s: float, others_s: float, stolen_s: float) -> None:
    """Of so many seconds of processors; never less than nothing."""
    whole_s = 10.0
    before = Counters(5.0, Processors(100.0, 7.0, 1000.0), None)
    after = Counters(
        5.0 + own_s,
        Processors(100.0 + own_s + others_s, 7.0 + stolen_s, 1000.0 + whole_s),
        None,
    )
    found = between(before, after)
    assert found.others == pytest.approx(others_s / whole_s)
    assert found.stolen == pytest.approx(stolen_s / whole_s)
    assert between(before, after._replace(own_s=50.0)).others == 0.0


def test_what_nobody_counts_is_unknown() -> None:
    """And disturbs nothing."""
    assert between(NOTHING, NOTHING) == HostLoad()
    still = Counters(1.0, Processors(1.0, 0.0, 2.0), None)
    assert between(still, still) == HostLoad()
    assert not HostLoad().is_disturbed
    assert str(HostLoad()) == "nothing disturbed it"


def test_throttled_periods_are_those_of_the_measurement() -> None:
    """None began in it: it stood still in none."""
    before, after = (Counters(0.0, None, Periods(*pair)) for pair in ((100, 40), (120, 50)))
    assert between(before, after).throttled == 0.5
    assert between(before, before).throttled == 0.0


def test_ceilings_tell_their_spread() -> None:
    """The median of all of them."""
    rates = [
        Quantity(value=2.0, unit="B/s", low=2.0 - d, high=2.0 + d, n=3, source="measured")
        for d in (0.0, 0.5, 1.0)
    ]
    setting = Setting(device="cpu", threads=1)
    ceilings = [
        Ceiling(setting=setting, family="memory", dtype="float32", rate=rate) for rate in rates
    ]
    assert between(NOTHING, NOTHING, ceilings).spread == 0.5


@pytest.mark.parametrize(
    ("one", "least", "words"),
    [
        ("others", host_load.MOST_BY_OTHERS, "other programs used 25.0 % of the processors"),
        (
            "stolen",
            host_load.MOST_STOLEN,
            "the host of this virtual machine took 10.0 % of its processors",
        ),
        (
            "throttled",
            host_load.MOST_THROTTLED,
            "the control group was throttled in 10.0 % of its periods",
        ),
        ("spread", host_load.MOST_SPREAD, "repeated samples had a spread of 50.0 %"),
    ],
)
def test_from_a_share_on_a_measurement_is_disturbed(one: str, least: float, words: str) -> None:
    """Each of the four is enough, and says so."""
    assert str(HostLoad(**{one: least})) == words
    assert not HostLoad(**{one: 0.99 * least}).is_disturbed


@given(LOADS, LOADS)
def test_the_worst_of_two_is_no_better_than_either(one: HostLoad, other: HostLoad) -> None:
    """What only one of them knows is known."""
    worst = one.worst(other)
    assert worst == other.worst(one)
    assert worst.worst(one) == worst
    assert one.worst(None) == one
    assert worst.is_disturbed is (one.is_disturbed or other.is_disturbed)
    assert msgspec.json.decode(msgspec.json.encode(worst), type=HostLoad) == worst


def make_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_periods_are_those_of_the_most_throttled_group(tmp_path: Path) -> None:
    """A group stands still with the one above it; one without a quota counts no periods."""
    make_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/mine\n",
            "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu.stat": "usage_usec 9\n",
            "sys/fs/cgroup/job/cpu.stat": "usage_usec 9\nnr_periods 100\nnr_throttled 30\n",
            "sys/fs/cgroup/job/mine/cpu.stat": "nr_periods 50\nnr_throttled 10\nthrottled_usec 7\n",
        },
    )
    assert cpu_periods(tmp_path) == Periods(100, 30)
    (tmp_path / "proc/stat").write_text("cpu0 100 0 0 300 0 0 0 0 0 0\n")
    assert load.counters(tmp_path, own_s=1.5)[::2] == (1.5, Periods(100, 30))


def test_nothing_is_throttled_without_groups(tmp_path: Path) -> None:
    """As on a host that is nobody's container."""
    assert cpu_periods(tmp_path) is None
    assert load.counters(tmp_path, own_s=0.0) == NOTHING
