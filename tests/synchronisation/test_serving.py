"""Stores in plans: what their links carry by the law of the parameter server, and what no plan may have."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.execution import check_plan
from ridgeline.laws.collectives import parameter_server_seconds, ring_all_reduce_seconds
from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.planner.exchanges.exchanges import exchanges, uncompared
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import (
    ALGORITHMS,
    link_bytes,
    sends_buffers,
    serving_bytes,
    state_parts,
)
from strategies import make_machine, make_workload

STORE = "kvstore"
SERVERS = {"kind": "dist_async"}
REASON = (
    "its servers are the workers, so that it sends the bytes of a ring: it gains where some need not wait "
    "for others, and by sparse rows"
)


def plan_of(workers: int = 2, *, execution: Any = "eager", **fields: Any) -> Plan:
    return Plan(workers=workers, execution=execution, sync=Sync(algorithm=STORE, **fields))


@given(workers=st.integers(2, 64), servers=st.integers(0, 64), megabytes=st.integers(1, 1000))
def test_links_carry_what_the_law_says(workers: int, servers: int, megabytes: int) -> None:
    """As much as a ring with a server beside each worker, and more with fewer."""
    options = {**SERVERS, "servers": min(servers, workers)}
    num_bytes = megabytes << 20
    found = link_bytes(Sync(algorithm=STORE, options=options), num_bytes // 4, 4, workers)
    law = parameter_server_seconds(
        num_bytes, workers, 1.0, servers=options["servers"] or workers, colocated=True
    )
    assert found == pytest.approx(law, rel=1e-6)
    ring = ring_all_reduce_seconds(num_bytes, workers, 1.0)
    plain = link_bytes(Sync(algorithm=STORE), num_bytes // 4, 4, workers)
    assert plain == pytest.approx(ring, rel=1e-6)
    assert found >= plain * (1 - 1e-6)


def test_what_a_store_holds_and_moves() -> None:
    """State is parted where all take the same step; a worker alone has no store."""
    plain = Sync(algorithm=STORE)
    assert (state_parts(plain, 4), state_parts(Sync(algorithm=STORE, options=SERVERS), 4)) == (4, 1)
    assert (serving_bytes(plain, 100, 1), serving_bytes(plain, 100, 2)) == (0, 850)
    assert serving_bytes(Sync(), 100, 2) == 0
    assert sends_buffers(plain)
    assert not sends_buffers(Sync(algorithm=STORE, options=SERVERS))
    assert step_frames(workers=1, num_buckets=0, sync=plain) == step_frames(
        workers=1, num_buckets=0
    )


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 1 / 4),
        (SERVERS, 1.0),
        ({**SERVERS, "servers": 2}, 2.0),
        ({**SERVERS, "servers": 2, "staleness": 0}, 1 / 2),
    ],
    ids=str,
)
def test_the_update_takes_time_where_it_is_made(options: dict[str, Any], times: float) -> None:
    """Pulls wait for what servers make of it, each its part; a worker brings the values into its parameters."""
    workload, free = (make_workload(optimizer=(flops,)) for flops in (1 << 30, 0))
    machine, plan = make_machine(), plan_of(4, options=options)
    stored, without = (simulate(machine, load, plan) for load in (workload, free))
    plain = simulate(machine, workload, Plan(workers=4))
    # Without work it is still called.
    update_ns = plain.total_ns("optimizer") - simulate(machine, free, Plan(workers=4)).total_ns(
        "optimizer"
    )
    served_ns = stored.total_ns(STORE) - without.total_ns(STORE)
    assert served_ns == pytest.approx(times * update_ns, rel=1e-3)
    assert stored.total_ns("optimizer") == without.total_ns("optimizer") < update_ns / 4


@pytest.mark.parametrize("workers", [2, 8])
def test_no_search_compares_it(workers: int) -> None:
    """It says why; whoever names it gets it, with servers as well."""
    assert all(sync.algorithm != STORE for sync in exchanges({}, ("compression",), "cpu", workers))
    (reason,) = uncompared({}, "cpu", workers)
    assert reason.endswith(f"key-value store ({REASON})")
    named = {"algorithm": STORE, "options": SERVERS}
    assert exchanges(named, (), "cpu", workers) == [Sync(algorithm=STORE, options=SERVERS)]


def test_a_search_takes_the_modes_that_go_with_it() -> None:
    """What is compiled is checked, so that it wants workers who take the same step."""
    machine = make_machine(latency_s=1e-3)
    for options, modes in ({}, {"eager", "compiled"}), (SERVERS, {"eager"}):
        fixed = {"algorithm": STORE, "options": options}
        ranking = choose(machine, make_workload(), world_size=2, fixed=fixed)
        assert {c.plan.execution for c in ranking.candidates} == modes
        assert all(c.plan.sync.algorithm == STORE for c in ranking.candidates)


@pytest.mark.parametrize(
    ("fields", "device", "message"),
    [
        (
            {"execution": "graph"},
            "cuda",
            (
                "wanted sync.algorithm to be one of 'all_reduce', 'ring', 'rings', 'tree', 'hierarchical', "
                "'two_shot', 'copy_engine', 'sharded' on cuda, got 'kvstore' in the plan; this release runs "
                "no other there"
            ),
        ),
        (
            {"execution": "compiled", "options": SERVERS},
            "cpu",
            (
                "wanted execution='eager' for workers that need not wait for each other, got 'compiled' in "
                "the plan; no two steps of theirs are the same, as its check requires: use that, or let "
                "them wait"
            ),
        ),
        (
            {"every": 4},
            "cpu",
            (
                "wanted sync.every=1 for sync.algorithm='kvstore', got 4 in the plan; a worker has no "
                "optimizer state to train alone with: exchange in every step, or use another algorithm"
            ),
        ),
        (
            {"compression": "int8"},
            "cpu",
            (
                "wanted sync.compression='none' for sync.algorithm='kvstore', got 'int8' in the plan; "
                "codecs bring the mean to all workers, not to who updates: leave it out, or use another "
                "algorithm"
            ),
        ),
        (
            {"options": {**SERVERS, "servers": 3}},
            "cpu",
            (
                "wanted sync.options['servers'] <= workers=2, got 3 in the plan; a worker has one server "
                "beside it at most: lower it"
            ),
        ),
        (
            {"options": {"snapshots": "folder"}},
            "cpu",
            (
                "wanted sync.options['kind']='dist_async' for sync.options['snapshots'], got 'dist_sync' in "
                "the plan; set it, or leave the option out"
            ),
        ),
    ],
)
def test_what_does_not_go_with_a_store(fields: dict[str, Any], device: str, message: str) -> None:
    """It is refused before the first step, with what to do instead."""
    with pytest.raises(PlanError) as error:
        check_plan(plan_of(**fields), device)
    assert str(error.value) == message


def test_an_update_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a store is offered."""
    monkeypatch.setitem(ALGORITHMS, STORE, ALGORITHMS[STORE]._replace(devices=("cpu", "cuda")))
    with pytest.raises(PlanError) as error:
        check_plan(plan_of(execution="graph"), "cuda")
    assert str(error.value) == (
        "wanted another execution for sync.algorithm='kvstore', got 'graph' in the plan; the update that it "
        "captures is not made by the worker there: use another mode, or another algorithm"
    )
