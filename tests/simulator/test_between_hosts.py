"""Collectives over a described cluster: closed forms where hosts hold one device, and laws elsewhere."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.errors import LawError, MachineError
from ridgeline.laws.curves import table_seconds
from ridgeline.machine import Machine, Setting
from ridgeline.machine.cluster import Level, crossings, parse_cluster
from ridgeline.plan import Plan
from ridgeline.simulator.curves.scaling import scaling_curve
from ridgeline.simulator.curves.what_if import what_if
from ridgeline.simulator.exchange.between_hosts import SIZES, points_between_hosts
from ridgeline.simulator.exchange.communication import collective_seconds
from ridgeline.simulator.model import setting_of
from strategies import make_machine, make_workload

LEVELS = st.builds(
    Level,
    size=st.integers(1, 16),
    rate_bytes_per_s=st.floats(1e6, 1e12),
    latency_s=st.floats(0.0, 1e-3),
    other_jobs=st.integers(0, 3),
)
BUSY = st.builds(
    msgspec.structs.replace, LEVELS, other_bytes_per_s=st.just(0.0) | st.floats(1e5, 1e12)
)
CLUSTERS = st.lists(LEVELS, min_size=1, max_size=3).map(tuple)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def on(cluster: tuple[Level, ...], **machine: float) -> Machine:
    return msgspec.structs.replace(make_machine(**machine), cluster=cluster)


def seconds(machine: Machine, operation: str, num_bytes: float, workers: int) -> float:
    setting = Setting(device="cpu", workers=workers, threads=1)
    return collective_seconds(machine, operation, num_bytes, setting).seconds  # type: ignore[arg-type]


@given(
    workers=st.integers(2, 5000),
    rate=st.floats(1e6, 1e12),
    latency_s=st.floats(0.0, 1e-3),
)
def test_hosts_of_one_device_are_rings_and_trees(
    workers: int, rate: float, latency_s: float
) -> None:
    """The faster of a ring and a tree whose links are those of the hosts, whatever was measured inside of one."""
    crossed = crossings((Level(size=1, rate_bytes_per_s=rate, latency_s=latency_s),), workers)
    (first, *_) = points_between_hosts("all_reduce", workers, crossed, (), 1, 0.0)
    num_bytes, found = first
    ring = laws.ring_all_reduce_seconds(num_bytes, workers, rate, hop_s=latency_s)
    moving = laws.ring_all_reduce_seconds(num_bytes, workers, rate)
    tree = moving + 2 * math.ceil(math.log2(workers)) * latency_s
    assert found == pytest.approx(min(ring, tree))
    gathered = points_between_hosts("all_gather", workers, crossed, (), 1, 0.0)[0][1]
    assert gathered == pytest.approx(
        laws.all_gather_seconds(num_bytes, workers, rate, hop_s=latency_s)
    )


def test_a_host_sends_what_its_devices_have_for_others() -> None:
    """All-to-all over two hosts of four: each of four sends half of its tensor to the other host."""
    crossed = crossings((Level(size=4, rate_bytes_per_s=1e9),), 8)
    found = dict(points_between_hosts("all_to_all", 8, crossed, ((1e9, 1e-3),), 4, 0.0))
    assert found[1e9] == pytest.approx(4 * 1e9 / 2 / 1e9)


def test_links_of_racks_are_shared_by_their_hosts() -> None:
    """The slowest of the links that a ring passes decides; a level that all fit into is not passed."""
    host = Level(size=2, rate_bytes_per_s=1e9)
    rack = Level(size=4, rate_bytes_per_s=1e8)
    machine = on((host, rack), latency_s=0.0, bandwidth=1e12)
    assert seconds(machine, "all_reduce", 1e9, 8) == pytest.approx(2 * 7 / 8, rel=0.01)
    assert seconds(machine, "all_reduce", 1e9, 16) == pytest.approx(20 * 15 / 16, rel=0.01)


@given(cluster=CLUSTERS, workers=st.integers(2, 2000), num_bytes=st.floats(1.0, 1e10))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_faster_links_are_never_slower(
    operation: str, cluster: tuple[Level, ...], workers: int, num_bytes: float
) -> None:
    """Each level's rate, and its latency; and no level is faster than having none around one host."""
    machine = on(cluster)
    now = seconds(machine, operation, num_bytes, workers)
    assert now > 0.0
    for index, level in enumerate(cluster):
        for faster in (
            msgspec.structs.replace(level, rate_bytes_per_s=2 * level.rate_bytes_per_s),
            msgspec.structs.replace(level, latency_s=level.latency_s / 2),
            msgspec.structs.replace(level, other_jobs=0),
        ):
            other = on((*cluster[:index], faster, *cluster[index + 1 :]))
            assert seconds(other, operation, num_bytes, workers) <= now * (1 + 1e-9)


@given(cluster=CLUSTERS, workers=st.integers(2, 2000), factor=st.floats(0.1, 100.0))
@pytest.mark.parametrize("part", ["links", "communication"])
def test_faster_communication_is_as_much_faster(
    part: str, cluster: tuple[Level, ...], workers: int, factor: float
) -> None:
    """Also between hosts: the whole collective takes a `factor`th."""
    machine = on(cluster)
    then = seconds(what_if(machine, {part: factor}), "all_reduce", 1e7, workers)
    assert then == pytest.approx(seconds(machine, "all_reduce", 1e7, workers) / factor, rel=1e-6)


@given(
    levels=st.lists(BUSY, min_size=1, max_size=3),
    workers=st.integers(2, 500),
    operation=st.sampled_from(("all_reduce", "all_gather", "broadcast")),
    num_bytes=st.floats(SIZES[0], SIZES[-1]),
)
def test_links_are_shared_fairly_with_others(
    levels: list[Level], workers: int, operation: str, num_bytes: float
) -> None:
    """As where this job's flow passes all links at once, and others' never end on each of them."""
    bare = [msgspec.structs.replace(level, size=1, latency_s=0.0) for level in levels]
    crossed = crossings(bare, workers)
    assert len(crossed) == len(levels)
    names = tuple(map(str, range(len(levels))))
    others = [
        laws.Flow((name,), most_bytes_per_s=most)
        for name, level in zip(names, levels, strict=True)
        for most in (*[math.inf] * level.other_jobs, level.other_bytes_per_s)
        if most
    ]
    sent = laws.bus_bandwidth_factor(operation, workers) * num_bytes  # type: ignore[arg-type]
    capacities = {n: level.rate_bytes_per_s for n, level in zip(names, levels, strict=True)}
    ends = laws.fair_finish_seconds([laws.Flow(names, sent), *others], capacities)
    points = points_between_hosts(operation, workers, crossed, (), 1, 0.0)  # type: ignore[arg-type]
    assert table_seconds(points, num_bytes) == pytest.approx(ends[0], rel=1e-9)


@pytest.mark.parametrize(
    ("others", "share", "words"),
    [
        ({}, 5e10, ""),
        ({"other_jobs": 1}, 2.5e10, ", beside 1 other job: 200 Gbit/s left"),
        ({"other_jobs": 3}, 1.25e10, ", beside 3 other jobs: 100 Gbit/s left"),
        (
            {"other_bytes_per_s": 1.25e10},
            3.75e10,
            ", beside 100 Gbit/s of others: 300 Gbit/s left",
        ),
        (
            {"other_jobs": 2, "other_bytes_per_s": 1.25e9},
            1.625e10,
            ", beside 2 other jobs and 10.0 Gbit/s of others: 130 Gbit/s left",
        ),
        (
            {"other_bytes_per_s": 1e13},
            2.5e10,
            ", beside 80.0 Tbit/s of others: 200 Gbit/s left",
        ),
    ],
)
def test_what_others_leave(others: dict[str, float], share: float, words: str) -> None:
    """An equal part where all want more, and all that they do not want; that is said."""
    level = Level(size=8, rate_bytes_per_s=5e10, latency_s=5e-6, **others)
    assert level.share_bytes_per_s == pytest.approx(share)
    assert str(level) == f"8 behind 400 Gbit/s, 5.00 us{words}"


def test_a_host_is_as_it_was_measured() -> None:
    """Where all workers fit into one, the cluster around it changes nothing."""
    machine = make_machine()
    inside = on((Level(size=2, rate_bytes_per_s=1.0, latency_s=1.0),))
    assert seconds(inside, "all_reduce", 1e6, 2) == seconds(machine, "all_reduce", 1e6, 2)
    assert seconds(inside, "all_reduce", 1e6, 3) > 1.0


def test_a_table_over_more_devices_than_a_host_has_still_counts() -> None:
    """It is the nearest that is known of what is inside of hosts, which otherwise would take no time."""
    level = Level(size=2, rate_bytes_per_s=1e12)
    four = Setting(device="cpu", workers=4, threads=1)
    found = tuple(
        msgspec.structs.replace(entry, setting=four) for entry in make_machine().collectives
    )
    machine = msgspec.structs.replace(on((level,)), collectives=found)
    setting = Setting(device="cpu", workers=8, threads=1)
    cost = collective_seconds(machine, "all_reduce", 1e9, setting)
    assert "from hosts measured over 4 workers" in cost.note
    assert cost.seconds > 1.0


def test_what_was_assumed_is_said() -> None:
    """The note names the operation, what was measured and the levels that are passed."""
    machine = on((Level(size=2, rate_bytes_per_s=1.25e9, latency_s=5e-6),))
    setting = Setting(device="cpu", workers=8, threads=1)
    assert collective_seconds(machine, "all_reduce", 1e6, setting).note == (
        "all_reduce over 8 workers: by the laws of rings and trees from hosts measured over 2 workers, and the "
        "cluster as described (2 behind 10.0 Gbit/s, 5.00 us)"
    )
    gathered = collective_seconds(machine, "all_gather", 1e6, setting)
    assert gathered.note.endswith("; all_gather was not measured: assumed as all_reduce")
    with pytest.raises(MachineError, match="wanted the time of all_reduce over 8 workers"):
        collective_seconds(
            msgspec.structs.replace(machine, collectives=()), "all_reduce", 1e6, setting
        )


def test_cores_are_those_of_one_host() -> None:
    """Workers of a CPU share the cores of the host that they are on, not those of all hosts."""
    machine = on((Level(size=2, rate_bytes_per_s=1e9),))
    cores = machine.host.cores
    workload = make_workload()
    assert setting_of(machine, workload, Plan(workers=64)).threads == max(1, cores // 2)
    assert setting_of(make_machine(), workload, Plan(workers=64)).threads == max(1, cores // 64)


def test_ten_thousand_workers_cost_as_many_predictions_as_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is simulated worker by worker; intervals hold the prediction."""
    from ridgeline.simulator.curves import scaling

    predict, asked = scaling.simulate, []

    def counted(*args: object, **given: object) -> object:
        asked.append(given["world_size"])
        return predict(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(scaling, "simulate", counted)
    machine = on((Level(size=2, rate_bytes_per_s=1e9, latency_s=1e-6),))
    points = scaling_curve(
        machine, make_workload(gradient_bytes=[4] * 4), Plan(), (2, 10_000), with_intervals=True
    )
    assert asked.count(10_000) == asked.count(2) == 21
    for point in points:
        assert point.low_s is not None
        assert point.high_s is not None
        assert point.low_s <= point.step_s <= point.high_s


@pytest.mark.parametrize(
    ("text", "rate_bytes_per_s", "latency_s"),
    [
        ("8:400Gbit/s:5us", 5e10, 5e-6),
        ("8 : 400 Gbit/s : 5 us", 5e10, 5e-6),
        ("8:1.6Tbit:500ns", 2e11, 5e-7),
        ("8:100MBIT:0.001s", 1.25e7, 1e-3),
    ],
)
def test_clusters_are_read_as_they_are_shown(
    text: str, rate_bytes_per_s: float, latency_s: float
) -> None:
    """`400 Gbit/s` is what predictions print; bytes, which `Gb` and `GB` may be, are refused."""
    wanted = Level(size=8, rate_bytes_per_s=rate_bytes_per_s, latency_s=latency_s)
    assert parse_cluster(text) == (wanted,)
    with pytest.raises(MachineError):
        parse_cluster("8:50GB:5us")


def test_clusters_are_written_and_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """In `machine.json`, and as text; what cannot be is refused with an example."""
    machine = on(parse_cluster("8:400gbit:5us,16:1600gbit:0.1ms"))
    assert machine.cluster == (
        Level(size=8, rate_bytes_per_s=5e10, latency_s=5e-6),
        Level(size=16, rate_bytes_per_s=2e11, latency_s=1e-4),
    )
    assert Machine.load(machine.save(tmp_path / "machine.json")) == machine
    machine = on(parse_cluster("8:400gbit:1job,16:1600gbit:8us:2jobs:100gbit"))
    assert machine.cluster == (
        Level(size=8, rate_bytes_per_s=5e10, other_jobs=1),
        Level(
            size=16,
            rate_bytes_per_s=2e11,
            latency_s=8e-6,
            other_jobs=2,
            other_bytes_per_s=1.25e10,
        ),
    )
    assert Machine.load(machine.save(tmp_path / "machine.json")) == machine
    for text in (
        "8",
        "0:1gbit",
        "8:0gbit",
        "8:1gb",
        "8:1gbit:5",
        "",
        "8:1gbit,",
        "8:1gbit:jobs",
        "8:1gbit:-1jobs",
        "8:1gbit:1mbit:1job",
    ):
        with pytest.raises(MachineError) as caught:
            parse_cluster(text)
        last = text.rpartition(",")[2]
        assert str(caught.value) == (
            f"wanted SIZE:RATE:LATENCY for each level of a cluster, got {last!r}; for example 8:400gbit:5us, hosts "
            "of 8 devices that are joined by 400 Gbit/s, 5 us apart, or 8:400gbit:5us:2jobs:100gbit, where two "
            "other jobs use those links, and traffic of 100 Gbit/s"
        )
    with pytest.raises(MachineError) as caught:
        parse_cluster("8:100gbit:5us:200gbit")
    assert str(caught.value) == (
        "wanted other traffic that the link can carry, 100 Gbit/s at most, got 200 Gbit/s in "
        "'8:100gbit:5us:200gbit'; write what would take all of it as jobs, such as 2jobs"
    )
    with pytest.raises(LawError, match="wanted a finite other_jobs >= 0 and <= 1000, got 1001"):
        parse_cluster("8:100gbit:1001jobs")
    with pytest.raises(LawError, match="size of a place in a cluster"):
        Level(size=0, rate_bytes_per_s=1.0)
