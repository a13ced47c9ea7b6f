"""The entries of both tables keep the laws that everybody who reads them relies on."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Operation
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    algorithm_of,
    bucket_of,
    codec_bytes,
    frame_names,
    gathering_of,
    handed_bytes,
    is_bucket_frame,
    is_exact,
    link_bytes,
    num_shards,
    offered,
    offered_compressions,
    operations,
    state_bytes,
    traffic_of,
    update_shard_elements,
    uses_kernels,
    why_losing,
    wire_bytes,
    words_of,
)

syncs = st.builds(
    Sync,
    algorithm=st.sampled_from(list(ALGORITHMS)),
    compression=st.sampled_from(list(COMPRESSIONS)),
)
elements = st.integers(0, 1 << 30)
several = st.integers(2, 64)


@given(syncs, elements, elements, st.sampled_from((2, 4, 8)), several)
def test_more_elements_are_no_fewer_bytes(
    sync: Sync, one: int, other: int, element_bytes: int, workers: int
) -> None:
    """Bytes on the wire, in the codec and remembered never fall as a bucket grows, and are none of nothing."""
    small, large = sorted((one, other))
    assert wire_bytes(sync, 0, element_bytes, workers) == 0
    assert wire_bytes(sync, small, element_bytes, workers) <= wire_bytes(
        sync, large, element_bytes, workers
    )
    assert state_bytes(sync, small, element_bytes) <= state_bytes(sync, large, element_bytes)
    assert codec_bytes(sync, small, workers) <= codec_bytes(sync, large, workers)


@given(syncs, elements, st.sampled_from((2, 4, 8)), several)
def test_traffic_is_made_of_measurable_collectives(
    sync: Sync, num_elements: int, element_bytes: int, workers: int
) -> None:
    """Every collective that a bucket costs has a size table in machines, and moves no negative bytes."""
    parts = traffic_of(sync, num_elements, element_bytes, workers)
    assert parts
    assert all(part.operation in get_args(Operation) and part.num_bytes >= 0 for part in parts)


@given(syncs, elements)
def test_a_worker_alone_exchanges_nothing(sync: Sync, num_elements: int) -> None:
    """One worker sends and encodes nothing, whatever its plan says."""
    assert wire_bytes(sync, num_elements, 4, 1) == 0
    assert traffic_of(sync, num_elements, 4, 1) == ()
    assert codec_bytes(sync, 4 * num_elements, 1) == (0, 0)


@given(elements, st.sampled_from((2, 4, 8)), several)
def test_the_default_is_one_all_reduce_of_the_gradients(
    num_elements: int, element_bytes: int, workers: int
) -> None:
    """Nothing is encoded, and the payload is the bucket."""
    num_bytes = num_elements * element_bytes
    assert traffic_of(Sync(), num_elements, element_bytes, workers) == (("all_reduce", num_bytes),)
    assert codec_bytes(Sync(), num_bytes, workers) == (0, 0)
    assert state_bytes(Sync(), num_elements, element_bytes) == 0


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_what_is_lossy_sends_less(name: str) -> None:
    """A compression that loses something of a large float32 bucket gains bytes by it; an exact one may not."""
    sent = wire_bytes(Sync(compression=name), 1 << 20, 4, 2)
    assert sent < 4 << 20 or COMPRESSIONS[name].is_exact
    assert sent <= 4 << 20


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("none", 4000),
        ("fp16", 2000 + 2 * 4),
        ("bf16", 2000),
        ("fp8", 1000 + 2 * 4),
        ("int8", 1000 + 2 * 4),
        ("topk", 10 * (4 + 4)),
        ("powersgd", 2 * 32 * 4 * 4),
        ("sign", 125 + 4 * 16),
    ],
)
def test_payloads_of_a_thousand_elements(name: str, num_bytes: int) -> None:
    """Worked out by hand: 1 % of them, rank 4 of 32 by 32, one bit each, and a scale for each of two shares."""
    assert wire_bytes(Sync(compression=name), 1000, 4, 2) == num_bytes


def test_payloads_are_exchanged_as_the_entry_says() -> None:
    """Added up by the algorithm; scattered, added up and gathered; or gathered and decoded each."""
    scattered, gathered, added = (Sync(compression=c) for c in ("int8", "sign", "powersgd"))
    passes = {name: COMPRESSIONS[name].codec_passes for name in ("int8", "sign", "powersgd")}
    assert traffic_of(scattered, 1000, 4, 4) == (("all_to_all", 1016), ("all_gather", 1016))
    each = passes["int8"]
    assert codec_bytes(scattered, 4000, 4) == (5000 * each.encode, 3 * 4000 * each.decode)
    assert traffic_of(gathered, 1000, 4, 4) == (("all_gather", 4 * (125 + 4 * 16)),)
    each = passes["sign"]
    assert codec_bytes(gathered, 4000, 4) == (4000 * each.encode, 4 * 4000 * each.decode)
    assert traffic_of(added, 1024, 4, 4) == (("all_reduce", 2 * 32 * 4 * 4 // 2),) * 2
    each = passes["powersgd"]
    assert codec_bytes(added, 4000, 4) == (4000 * each.encode, 4000 * each.decode)


@pytest.mark.parametrize(
    "sync", [Sync(algorithm=name) for name in ALGORITHMS], ids=lambda s: s.algorithm
)
@pytest.mark.parametrize("num_buckets", [0, 1, 12])
def test_frames_of_a_step_are_those_of_the_algorithm(sync: Sync, num_buckets: int) -> None:
    """The frames on the communication lane are `frame_names`, and nothing else is taken for one."""
    frames = step_frames(
        workers=2, num_buckets=num_buckets, accumulate=2, has_buffers=True, sync=sync
    )
    names = frame_names(sync, num_buckets)
    assert tuple(f.name for f in frames if is_bucket_frame(f.name)) == names
    assert [bucket_of(name) for name in names] == list(range(num_buckets))
    assert {f.lane for f in frames if f.name in names} <= {"communication"}
    assert all(algorithm_of(name) == ALGORITHMS[sync.algorithm] for name in names)


@pytest.mark.parametrize(
    "name",
    ["backward/0", "micro/1", "all_reduce", "all_reduce/", "all_reduce/x", "all_reduce/²", "wait"],
)
def test_other_frames_reduce_no_bucket(name: str) -> None:
    """A head alone, or a number of something else, is no bucket."""
    assert bucket_of(name) is None
    assert not is_bucket_frame(name)


def test_entries_stand_under_their_names_with_heads_of_their_own() -> None:
    """Keys are names, and no two algorithms share the name of a frame."""
    assert [entry.name for entry in ALGORITHMS.values()] == list(ALGORITHMS)
    assert [entry.name for entry in COMPRESSIONS.values()] == list(COMPRESSIONS)
    assert len({entry.frame for entry in ALGORITHMS.values()}) == len(ALGORITHMS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_offered_now(device: str) -> None:
    """Exact algorithms and every compression run everywhere, and need four collectives."""
    everywhere = (DEFAULT_ALGORITHM, "ring", "rings", "tree", "hierarchical")
    others = ("two_shot", "copy_engine", "sharded") if device == "cuda" else ("sharded", "kvstore")
    assert offered(device) == (*everywhere, *others)
    assert offered_compressions(device) == tuple(COMPRESSIONS)
    assert operations(device) == ("all_reduce", "broadcast", "all_to_all", "all_gather")


def test_copies_wait_for_three_barriers() -> None:
    """Beside a ring's bytes; all other exact algorithms but the key-value store and trees send these alone."""
    ring, copies = (
        traffic_of(Sync(algorithm=name), 1 << 20, 4, 4)
        for name in (DEFAULT_ALGORITHM, "copy_engine")
    )
    assert copies[: len(ring)] == ring
    assert [part.num_bytes for part in copies[len(ring) :]] == [4, 4, 4]
    assert [name for name in offered("cuda") if not uses_kernels(Sync(algorithm=name))] == [
        "copy_engine"
    ]


def test_payloads_by_shape() -> None:
    """Factors of the matrices that they are smaller than, and a scale for each parameter."""
    shapes = ((64, 32), (64,), (16, 4, 3, 3), (3, 4))
    num_elements = 64 * 32 + 64 + 16 * 36 + 16  # 12 of the last, aligned
    low = Sync(compression="powersgd", options={"rank": 2})
    wanted = 4 * (2 * (64 + 32) + 64 + 2 * (16 + 36) + 12)
    assert wire_bytes(low, num_elements, 4, 2, shapes) == wanted
    assert handed_bytes(low, num_elements, 4, 2, shapes) == wanted
    signs = Sync(compression="sign")
    assert wire_bytes(signs, num_elements, 4, 2, shapes) == num_elements // 8 + 4 * (32 + 1 + 9 + 1)


@given(elements, st.sampled_from((2, 4, 8)), several)
def test_a_divided_update_moves_the_bytes_of_an_all_reduce(
    num_elements: int, element_bytes: int, workers: int
) -> None:
    """In two halves, one of them behind the optimizer; what is handed over is filled up to equal parts."""
    sync, plain = Sync(algorithm="sharded"), Sync()
    num_bytes = num_elements * element_bytes
    assert len(gathering_of(sync, num_bytes, workers)) == 1
    assert gathering_of(plain, num_bytes, workers) == ()
    moved = link_bytes(sync, num_elements, element_bytes, workers)
    wanted = link_bytes(plain, num_elements, element_bytes, workers)
    assert wanted <= moved <= wanted + 4
    part = update_shard_elements(num_elements, element_bytes, workers) * element_bytes
    handed = handed_bytes(sync, num_elements, element_bytes, workers)
    assert handed == part * workers + part
    assert num_bytes <= part * workers < num_bytes + workers * max(64, 16 * element_bytes)
    assert handed_bytes(sync, num_elements, element_bytes, 1) == 0
    assert (num_shards(sync, workers), num_shards(plain, workers)) == (workers, 1)


def test_what_is_scattered_hands_over_its_share_as_well() -> None:
    """A worker alone sends nothing; others the payload, and the mean of their share."""
    sync = Sync(compression="int8", options={"block": 256})
    assert wire_bytes(sync, 4096, 4, 4) == 4096 + 4 * 4 * 4
    assert handed_bytes(sync, 4096, 4, 4) == 4160 + 4160 // 4
    assert handed_bytes(sync, 4096, 4, 1) == 0


@pytest.mark.parametrize(
    ("name", "element_bytes", "workers", "loses"),
    [
        ("bf16", 4, 64, False),
        ("bf16", 2, 64, True),
        ("int8", 4, 64, False),
        ("int8", 2, 64, False),
        ("topk", 4, 99, False),
        ("topk", 4, 100, True),
        ("topk", 2, 50, True),
        ("sign", 4, 42, False),
        ("sign", 4, 43, True),
        ("powersgd", 4, 64, False),
        ("none", 4, 64, False),
    ],
)
def test_where_arithmetic_says_that_a_compression_loses(
    name: str, element_bytes: int, workers: int, loses: bool
) -> None:
    """What all gather grows with the workers; 16 bits are no fewer than 16. Never for a worker alone."""
    sync = Sync(compression=name)
    reason = why_losing(sync, 1 << 22, element_bytes, workers)
    assert bool(reason) == loses
    if name == "sign" and loses:
        assert reason == (
            "moves 31.5 MiB through each worker's link as sign gradients, and no more than 31.3 MiB uncompressed"
        )
    assert why_losing(sync, 1 << 22, element_bytes, 1) == ""
    assert why_losing(sync, 0, element_bytes, workers) == ""


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_state_is_what_an_entry_says(name: str) -> None:
    """What has state remembers bytes of large gradients, and nothing else does."""
    remembered = state_bytes(Sync(compression=name), 1 << 20, 4)
    assert (remembered > 0) == COMPRESSIONS[name].has_state


@given(syncs)
def test_a_plan_is_exact_if_its_entries_are(sync: Sync) -> None:
    """Plans ask the entries, and nothing else about their words."""
    exact = ALGORITHMS[sync.algorithm].is_exact and COMPRESSIONS[sync.compression].is_exact
    assert Plan(workers=2, sync=sync).exact == is_exact(sync) == exact


def test_options_and_intervals_may_change_the_maths() -> None:
    """An option that is not exact is one at its default; steps without exchange never are."""
    store = Sync(algorithm="kvstore", options={"kind": "dist_sync"})
    assert Plan(sync=store).exact
    assert not Plan(sync=Sync(algorithm="kvstore", options={"kind": "dist_async"})).exact
    assert not Plan(sync=Sync(every=2)).exact


def test_words_for_people() -> None:
    """The plainest is left out; options stand with what they belong to."""
    sync = Sync(algorithm="two_shot", compression="powersgd", options={"rank": 2}, every=4)
    assert words_of(Sync()) == {}
    assert words_of(sync) == {
        "algorithm": "two-shot",
        "compression": "PowerSGD gradients (rank 2)",
        "interval": "every 4 steps",
    }
