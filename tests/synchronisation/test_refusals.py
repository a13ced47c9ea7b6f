"""Words and options that no plan can name, and those that it can and this release does not run."""

from typing import Any

import pytest

import ridgeline as rl
from chained_workloads import make_chain
from ridgeline.codec import decode, encode
from ridgeline.errors import FileFormatError, PlanError
from ridgeline.execution import check_plan
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.model import resized
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    Algorithm,
    Compression,
    check_sync,
    offered,
)
from strategies import make_machine

KNOWN = {
    "algorithm": ", ".join(repr(word) for word in ALGORITHMS),
    "compression": ", ".join(repr(word) for word in COMPRESSIONS),
}
PLAIN = "with algorithm='all_reduce' and compression='none'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"algorithm": "gossip"},
            (
                f"wanted sync.algorithm to be one of {KNOWN['algorithm']}, got 'gossip' in the plan; choose one of "
                "those"
            ),
        ),
        (
            {"algorithm": ["ring"]},
            (
                f"wanted sync.algorithm to be one of {KNOWN['algorithm']}, got ['ring'] in the plan; choose one of "
                "those"
            ),
        ),
        (
            {"compression": "zip"},
            (
                f"wanted sync.compression to be one of {KNOWN['compression']}, got 'zip' in the plan; choose one "
                "of those"
            ),
        ),
        (
            {"options": {"rank": 4}},
            f"wanted sync.options to be one of 'held' {PLAIN}, got 'rank' in the plan; leave it out",
        ),
        (
            {"options": None},
            "wanted sync.options as a dictionary, got None in the plan; for example {}",
        ),
        (
            {"compression": "topk", "options": {"rank": 4}},
            (
                "wanted sync.options to be one of 'held', 'density', 'momentum', 'warmup_steps' with "
                "algorithm='all_reduce' and compression='topk', got 'rank' in the plan; leave it out"
            ),
        ),
        (
            {"compression": "powersgd", "options": {"rank": 1.5}},
            "wanted sync.options['rank'] as a whole number, got 1.5 in the plan; for example 4",
        ),
        (
            {"compression": "powersgd", "options": {"rank": True}},
            "wanted sync.options['rank'] as a whole number, got True in the plan; for example 4",
        ),
        (
            {"compression": "powersgd", "options": {"rank": 0}},
            "wanted sync.options['rank'] >= 1, got 0 in the plan; for example 4",
        ),
        (
            {"compression": "topk", "options": {"density": "all"}},
            "wanted sync.options['density'] as a number, got 'all' in the plan; for example 0.01",
        ),
        (
            {"compression": "topk", "options": {"density": 1.5}},
            "wanted sync.options['density'] <= 1, got 1.5 in the plan; for example 0.01",
        ),
        (
            {"compression": "topk", "options": {"density": float("nan")}},
            "wanted sync.options['density'] >= 0, got nan in the plan; for example 0.01",
        ),
        (
            {"algorithm": "kvstore", "options": {"kind": "dist"}},
            (
                "wanted sync.options['kind'] to be one of 'dist_sync', 'dist_async', got 'dist' in the plan; choose "
                "one of those"
            ),
        ),
        (
            {"algorithm": "kvstore", "options": {"staleness": -2}},
            "wanted sync.options['staleness'] >= -1, got -2 in the plan; for example -1",
        ),
    ],
)
def test_what_no_plan_can_say(fields: dict[str, Any], message: str) -> None:
    """It is refused where it is written: the field, what it may be, and what it was."""
    with pytest.raises(PlanError) as error:
        Plan(sync=Sync(**fields))
    assert str(error.value) == message


def test_an_unknown_word_in_a_file() -> None:
    """A file is held to the same tables."""
    data = encode(Plan()).replace(b'"all_reduce"', b'"gossip"')
    with pytest.raises(FileFormatError, match=r"one of 'all_reduce', .*, got 'gossip' in the plan"):
        decode(Plan, data, where="plan.json")


@pytest.mark.parametrize(
    "options", [{"rank": 8}, {"density": 1}, {"density": 0.5}, {"kind": "dist_async"}], ids=str
)
def test_options_survive_their_file(options: dict[str, Any]) -> None:
    """Every kind of option is read as it was written, a whole number where a number is wanted as well."""
    known = [(a, c) for a in ALGORITHMS for c in COMPRESSIONS]
    for algorithm, compression in known:
        entries = ALGORITHMS[algorithm], COMPRESSIONS[compression]
        if options.keys() <= {option.name for entry in entries for option in entry.options}:
            plan = Plan(sync=Sync(algorithm=algorithm, compression=compression, options=options))
            read = decode(Plan, encode(plan), where="plan.json")
            assert read == plan
            assert [type(v) for v in read.sync.options.values()] == [
                type(v) for v in options.values()
            ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("workers", [1, 2])
def test_known_words_that_do_not_run_are_refused_by_name(
    device: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal lists what runs, whatever the device and the number of workers."""
    monkeypatch.setitem(COMPRESSIONS, "bits", Compression("bits", "bits", lambda *_: 0))
    monkeypatch.setitem(ALGORITHMS, "cube", Algorithm("cube", "cube", "cube"))
    for field, table in (("algorithm", ALGORITHMS), ("compression", COMPRESSIONS)):
        running = ", ".join(repr(name) for name, entry in table.items() if entry.runs)
        others = [name for name, entry in table.items() if not entry.runs]
        assert others
        for word in others:
            with pytest.raises(PlanError) as error:
                check_plan(Plan(workers=workers, sync=Sync(**{field: word})), device)
            assert str(error.value) == (
                f"wanted sync.{field} to be one of {running}, got {word!r} in the plan; this release runs "
                "no other"
            )


def test_refusals_of_a_device_and_of_a_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm of GPUs is not offered on a CPU; one for many workers takes many, or one alone."""
    sync = Sync(algorithm="cube")
    entry = Algorithm("cube", "cube", "cube", "some.module:Cube", ("cuda",), least_workers=4)
    monkeypatch.setitem(ALGORITHMS, "cube", entry)
    with pytest.raises(PlanError) as error:
        check_sync(sync, 4, "cpu")
    assert str(error.value) == (
        f"wanted sync.algorithm to be one of {', '.join(map(repr, offered('cpu')))} on cpu, got 'cube' in the "
        "plan; this release runs no other there"
    )
    with pytest.raises(PlanError) as error:
        check_sync(sync, 2, "cuda")
    assert str(error.value) == (
        "wanted workers >= 4 for sync.algorithm='cube', got workers=2 in the plan; use more, or another "
        "algorithm"
    )
    check_sync(sync, 1, "cuda")
    check_sync(sync, 4, "cuda")


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (
            Sync(algorithm="rings", options={"orders": "0,1,2"}),
            (
                "wanted sync.options['orders'] as orders of all 4 workers and their parts, got '0,1,2' in the "
                "plan; for example '0,1,2,3:1;0,3,2,1:1'"
            ),
        ),
        (
            Sync(algorithm="hierarchical", options={"local": 3}),
            (
                "wanted as many workers on each host for sync.algorithm='hierarchical', got 3, 1; use "
                "sync.algorithm='all_reduce', or say options={'local': workers of a host}"
            ),
        ),
    ],
    ids=["orders", "local"],
)
def test_places_of_workers_are_refused_before_anything_is_predicted(
    sync: Sync, message: str
) -> None:
    """Not only where a transport is made; a worker alone sends nothing, and other numbers have other rings."""
    plan = Plan(workers=4, threads=1, sync=sync)
    with pytest.raises(PlanError) as caught:
        check_plan(plan, "cpu")
    assert str(caught.value) == message
    with pytest.raises(PlanError) as caught:
        rl.simulate(make_machine(), make_chain((4,)), plan)
    assert str(caught.value) == message
    check_sync(sync, 1, "cpu")
    # Written out, the usual rings of so many workers would fill the memory.
    check_sync(Sync(algorithm="rings"), 10**30, "cuda")
    fitting = Sync(algorithm="rings", options={"orders": "0,1,2,3", "pieces": 2})
    check_sync(fitting, 4, "cpu")
    assert resized(Plan(workers=4, sync=fitting), 8).sync.options == {"pieces": 2}
    assert resized(Plan(workers=4, sync=fitting), 4).sync is fitting


@pytest.mark.parametrize(("workers", "density"), [(8, 0.125), (8, 1), (64, 0.5), (128, 0.01)])
def test_a_density_that_sends_more_than_a_ring(workers: int, density: float) -> None:
    """Refused with the bytes of both, whoever names it; half of it is taken."""
    sync = Sync(compression="topk", options={"density": density})
    sent, plain = 8 * (workers - 1) * density, 8 * (workers - 1) / workers
    with pytest.raises(PlanError) as error:
        check_sync(sync, workers, "cpu")
    assert str(error.value) == (
        f"wanted sync.options['density'] < 1/{workers} = {1 / workers:.4g} with {workers} workers, got "
        f"{density!r} in the plan: each worker would receive {sent:.4g} bytes for an element of a gradient, "
        f"where {plain:.4g} do without compression; lower it, or leave the compression out"
    )
    check_sync(sync, 1, "cpu")
    check_sync(Sync(compression="topk", options={"density": 0.5 / workers}), workers, "cpu")


def test_a_warm_up_of_density_cannot_be_captured() -> None:
    """Its shapes change: modes that replay the step refuse it, others and one worker do not."""
    sync = Sync(compression="topk", options={"warmup_steps": 100})
    with pytest.raises(PlanError) as error:
        check_plan(Plan(workers=2, execution="compiled+graph", sync=sync), "cuda")
    assert str(error.value) == (
        "wanted sync.options['warmup_steps'] left out for execution='compiled+graph', got 100 in the plan; "
        "what is sent would change its shape, which a captured step cannot: use another mode, or train the "
        "first steps under a plan of their own"
    )
    check_plan(Plan(workers=2, execution="compiled", sync=sync), "cuda")
    check_plan(Plan(workers=1, execution="graph", sync=sync), "cuda")


def test_blocks_of_signs_are_whole_bytes_of_whole_cache_lines() -> None:
    """Other sizes would reach over two parameters."""
    with pytest.raises(PlanError) as error:
        check_sync(Sync(compression="sign", options={"block": 100}), 2, "cpu")
    assert str(error.value) == (
        "wanted sync.options['block'] as a multiple of 32, got 100 in the plan; for example 64"
    )
    check_sync(Sync(compression="sign", options={"block": 96}), 2, "cpu")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            Plan(workers=2, sync=Sync(algorithm="sharded", every=4)),
            (
                "wanted sync.every=1 for sync.algorithm='sharded', got 4 in the plan; each worker has the "
                "optimizer's state of its part alone, and cannot train alone: exchange in every step, or use "
                "another algorithm"
            ),
        ),
        (
            Plan(workers=2, sync=Sync(algorithm="sharded", compression="int8")),
            (
                "wanted sync.compression='none' for sync.algorithm='sharded', got 'int8' in the plan; codecs "
                "bring the whole mean to all workers: leave it out, or use another algorithm"
            ),
        ),
        (
            Plan(workers=2, sync=Sync(algorithm="sharded"), execution="compiled+graph"),
            (
                "wanted another execution for sync.algorithm='sharded', got 'compiled+graph' in the plan; this "
                "release captures no update that is divided among workers: use another mode, or another "
                "algorithm"
            ),
        ),
    ],
)
def test_what_no_divided_update_goes_with(plan: Plan, message: str) -> None:
    """Neither other rhythms nor codecs nor captured steps; a worker alone divides nothing."""
    with pytest.raises(PlanError) as caught:
        check_plan(plan, "cuda")
    assert str(caught.value) == message
    check_plan(Plan(sync=Sync(algorithm="sharded"), execution="compiled+graph"), "cuda")
