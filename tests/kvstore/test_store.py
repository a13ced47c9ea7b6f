"""A store of one process: sums, order, what is refused, and what a file keeps."""

import doctest
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import EngineError, KVStoreError
from ridgeline.runtime.kvstore import KVStore, register_updater
from ridgeline.runtime.kvstore import store as store_module
from ridgeline.runtime.kvstore.values.merging import merged

KINDS = ("local", "device", "dist_sync", "dist_device_sync")
"""Those of several workers too: a worker alone is one."""


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    """A store of each kind."""
    with rl.kvstore.create(request.param) as made:
        yield made


def rows(ids: list[int], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor(ids)[None], values, shape, dtype=values.dtype, check_invariants=False
    )


def test_a_worker_alone(store: KVStore) -> None:
    """It is number 0 of 1."""
    assert (store.rank, store.num_workers) == (0, 1)
    assert store.type in KINDS
    store.barrier()


def test_the_example_holds() -> None:
    """As it stands in the documentation of `set_optimizer`."""
    ran = doctest.testmod(store_module)
    assert ran.attempted > 6
    assert ran.failed == 0


def test_pull_before_push_gives_the_first_value(store: KVStore) -> None:
    """In memory of its own, of the caller and of the store."""
    value = torch.arange(6.0).view(2, 3)
    store.init("w", value)
    value.zero_()
    found = store.pull("w").get()
    assert torch.equal(found, torch.arange(6.0).view(2, 3))
    found.zero_()
    assert torch.equal(store.pull("w").get(), torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("keys", [[3, 5], ["a", "b"]])
def test_lists_of_keys_and_of_devices(store: KVStore, keys: list[Any]) -> None:
    """What devices bring is added up; results go to a place for each of them."""
    store.init(keys, [torch.zeros(2), torch.zeros(3)])
    store.push(keys, [[torch.ones(2), torch.ones(2) * 2], torch.ones(3) * 5])
    outs = [[torch.empty(2), torch.empty(2)], torch.empty(3)]
    store.pull(keys, outs)
    assert torch.equal(outs[0][0], torch.full((2,), 3.0))
    assert torch.equal(outs[0][1], torch.full((2,), 3.0))
    assert torch.equal(outs[1], torch.full((3,), 5.0))


@given(
    numbers=st.lists(st.integers(-100, 100), min_size=1, max_size=30), priority=st.integers(-9, 9)
)
def test_what_a_key_is_pushed_is_worked_in_one_by_one(numbers: list[int], priority: int) -> None:
    """A pull between two pushes sees those before it, whatever the priorities of others."""
    register_updater("add", _add)
    with rl.kvstore.create("local") as made:
        made.init("w", torch.zeros(1, dtype=torch.int64))
        made.set_updater("add")
        readings = []
        for number in numbers:
            made.push("w", torch.tensor([number]), priority=priority * number)
            readings.append(made.pull("w", priority=-priority * number))
        totals = [sum(numbers[: n + 1]) for n in range(len(numbers))]
        assert [reading.get().item() for reading in readings] == totals


def _add(key: Any, total: Tensor, value: Tensor) -> None:
    value.add_(total)


def test_values_are_read_before_a_push_returns() -> None:
    """While the update waits, they are overwritten."""
    gate = threading.Event()

    def wait(key: Any, total: Tensor, value: Tensor) -> None:
        gate.wait()
        value.copy_(total)

    register_updater("wait", wait)
    with rl.kvstore.create("local") as made:
        made.init("w", torch.zeros(2))
        made.set_updater("wait")
        value = torch.ones(2)
        made.push("w", value)
        value.fill_(7.0)
        gate.set()
        assert torch.equal(made.pull("w").get(), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01}),
        ("adafactor", {"lr": 0.01}),
        ("adagrad", {"lr": 0.01}),
    ],
)
def test_an_optimizer_by_name_is_that_of_torch(
    store: KVStore, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """With a rate that changes and a state that goes through a file, bit for bit."""
    parameter = nn.Parameter(torch.randn(4, 5))
    made = next(v for k, v in vars(torch.optim).items() if k.lower() == name.lower())
    plain = made([parameter], **settings)
    store.init(0, parameter)
    store.set_optimizer(name, rescale_grad=0.5, **settings)
    for step in range(6):
        gradient = torch.randn(4, 5)
        parameter.grad = gradient * 0.5
        plain.step()
        store.push(0, gradient)
        if step == 2:
            plain.param_groups[0]["lr"] *= 0.1
            store.set_optimizer(name, rescale_grad=0.5, **{**settings, "lr": settings["lr"] * 0.1})
        if step == 3:
            store.save_optimizer_states(tmp_path / "states")
            store.load_optimizer_states(tmp_path / "states")
        assert torch.equal(store.pull(0).get(), parameter.detach())


def test_pushpull_and_broadcast(store: KVStore) -> None:
    """Results take the place of what was pushed where no other is given."""
    out = torch.empty(3)
    store.broadcast("w", torch.ones(3), out)
    assert torch.equal(out, torch.ones(3))
    values = [torch.ones(3), torch.ones(3) * 4]
    store.pushpull("w", values)
    assert all(torch.equal(value, torch.full((3,), 5.0)) for value in values)
    store.pushpull("w", torch.zeros(3), out)
    assert torch.equal(out, torch.zeros(3))


def test_sparse_rows(store: KVStore) -> None:
    """Rows that several devices bring, one twice, are added up; some rows are pulled, in any order."""
    store.init("words", torch.zeros(5, 2))
    one = rows([3, 1, 3], torch.ones(3, 2), (5, 2))
    other = rows([3], torch.ones(1, 2) * 10, (5, 2))
    store.push("words", [one, other])
    wanted = torch.tensor([0.0, 1.0, 0.0, 12.0, 0.0])[:, None].expand(5, 2)
    assert torch.equal(store.pull("words").get(), wanted)
    found = store.row_sparse_pull("words", row_ids=torch.tensor([3, 0, 3])).get()
    assert torch.equal(found, wanted[[3, 0, 3]])
    out = torch.empty(1, 2)
    store.row_sparse_pull("words", out, row_ids=torch.tensor([1]))
    assert torch.equal(out, torch.ones(1, 2))


@given(
    count=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_merging_adds_up_in_order_and_rounds_once(
    count: int, dtype: torch.dtype, seed: int
) -> None:
    """Sixteen bits in float32; sparse rows as the dense tensors that they stand for."""
    torch.manual_seed(seed)
    values = [(torch.randn(6, 2) * 50).to(dtype) for _ in range(count)]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    wanted = values[0].to(wide)
    for value in values[1:]:
        wanted = wanted + value.to(wide)
    cpu = torch.device("cpu")
    assert torch.equal(merged(values, cpu), wanted.to(dtype))
    sparse = [rows([5, 4, 3, 2, 1, 0], value.flip(0), (6, 2)) for value in values]
    assert torch.equal(merged(sparse, cpu).to_dense(), wanted.to(dtype))
    assert torch.equal(merged([*values[:1], *sparse[1:]], cpu), wanted.to(dtype))


def _fail(key: Any, total: Tensor, value: Tensor) -> None:
    raise ValueError("no luck")


def test_a_failed_update_is_told_to_who_reads() -> None:
    """Of that key, each time; other keys go on."""
    register_updater("fail", _fail)
    made = rl.kvstore.create("local")
    made.init(["bad", "good"], [torch.zeros(1), torch.zeros(1)])
    made.set_updater("fail")
    made.push("bad", torch.ones(1))
    for _ in range(2):
        with pytest.raises(EngineError, match="push bad"):
            made.pull("bad").get()
    assert torch.equal(made.pull("good").get(), torch.zeros(1))
    made.close()


def failing(error: Exception | None) -> None:
    """Leave a store in which a push has failed, which nobody has waited for; by an error of one's own, maybe."""
    register_updater("fail", _fail)
    with rl.kvstore.create("local") as made:
        made.init("w", torch.zeros(1))
        made.set_updater("fail")
        made.push("w", torch.ones(1))
        if error is not None:
            raise error


def test_an_error_on_its_way_is_not_hidden() -> None:
    """By a push that has failed meanwhile; alone, that is told at the end."""
    with pytest.raises(KeyError, match="mine"):
        failing(KeyError("mine"))
    with pytest.raises(EngineError, match="push w"):
        failing(None)


REFUSED: dict[str, tuple[Any, str]] = {
    "no key": (
        lambda s: s.push([], []),
        "wanted keys that are all int or all str for push, got none",
    ),
    "mixed keys": (
        lambda s: s.pull([1, "w"]),
        "wanted keys that are all int or all str for pull, got int, str",
    ),
    "a key of another type": (
        lambda s: s.pull(1.5),
        "wanted keys that are all int or all str for pull, got float",
    ),
    "twice": (
        lambda s: s.push(["w", "w"], [torch.ones(2)] * 2),
        (
            "wanted each key once for push, got 'w' twice; give the values of several devices as a list for "
            "the one key"
        ),
    ),
    "unknown": (
        lambda s: s.push("v", torch.ones(2)),
        "wanted a key with a value for push, got 'v'; call init first",
    ),
    "again": (
        lambda s: s.init("w", torch.ones(2)),
        "wanted a new key for init, got 'w', which has a value",
    ),
    "too few values": (
        lambda s: s.push(["w"], []),
        (
            "wanted a value for each of 1 keys for push, got 0; a list holds one entry a key, which is a "
            "tensor or a list of tensors"
        ),
    ),
    "no tensor": (
        lambda s: s.push("w", 3.0),
        "wanted a tensor, or a list of them, for key 'w' in push",
    ),
    "a tensor without elements in memory": (
        lambda s: s.push("w", torch.ones(2, device="meta")),
        "wanted a tensor with elements for key 'w' in push, got one of the device 'meta'; give it memory ",
    ),
    "another shape": (
        lambda s: s.push("w", torch.ones(3)),
        "wanted float32 [2] for key 'w' in push, as it was initialised, got float32 [3]",
    ),
    "another type": (
        lambda s: s.pull("w", torch.ones(2, dtype=torch.float64)),
        "wanted float32 [2] for key 'w' in pull, as it was initialised, got float64 [2]",
    ),
    "a sparse first value": (
        lambda s: s.init("e", rows([0], torch.ones(1, 2), (3, 2))),
        "wanted a dense value for key 'e' in init, got torch.sparse_coo; use to_dense()",
    ),
    "a type without sums": (
        lambda s: s.init("e", torch.ones(2).to(torch.float8_e4m3fn)),
        "wanted a type that is added up for key 'e' in init (float64, float32, float16, bfloat16, complex128, ",
    ),
    "versions of several": (
        lambda s: s.versions(["w", "m"]),
        "wanted one key for versions, got 1 more; ask for each",
    ),
    "a factor that is no number": (
        lambda s: s.set_optimizer("sgd", rescale_grad="1"),
        "wanted a finite rescale_grad, got '1'",
    ),
    "a type of compression that is none": (
        lambda s: s.set_gradient_compression({"type": ["2bit"]}),
        "wanted {'type': ...} of 1bit, 2bit, bf16, int8 to compress gradients, got {'type': ['2bit']}",
    ),
    "a row that is none": (
        lambda s: s.push("m", rows([3], torch.ones(1, 2), (3, 2))),
        "wanted row_ids of key 'm' from 0 to 2, got 3 to 3",
    ),
    "rows by numbers with a point": (
        lambda s: s.row_sparse_pull("m", row_ids=torch.ones(1)),
        "wanted row_ids as an int64 tensor for key 'm', got torch.float32",
    ),
    "no optimizer": (
        lambda s: s.set_optimizer("sgdd", lr=0.1),
        "wanted the name of an optimizer in torch.optim, got 'sgdd'; for example 'sgd', 'adam'; there are ",
    ),
    "settings": (
        lambda s: s.set_optimizer("sgd", lr=-1.0),
        "wanted settings of torch.optim.SGD, got Invalid learning rate: -1.0",
    ),
    "no updater": (
        lambda s: s.set_updater("unheard"),
        (
            "wanted a registered updater, got 'unheard'; call rl.kvstore.register_updater('unheard', "
            "function) in every process first"
        ),
    ),
    "compression": (
        lambda s: s.set_gradient_compression({"type": "3bit"}),
        "wanted {'type': ...} of 1bit, 2bit, bf16, int8 to compress gradients, got {'type': '3bit'}",
    ),
    "its option": (
        lambda s: s.set_gradient_compression({"type": "bf16", "threshold": 1}),
        "wanted the options of 'bf16' (none), got 'threshold'",
    ),
    "its threshold": (
        lambda s: s.set_gradient_compression({"type": "2bit", "threshold": 0}),
        "wanted a positive, finite threshold, got 0",
    ),
    "states without an optimizer": (
        lambda s: s.load_optimizer_states("states"),
        "wanted optimizer states that a store saved in states, got FileNotFoundError: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    """By a message that says what to do, and nothing has changed."""
    call, message = REFUSED[case]
    with rl.kvstore.create("local") as made:
        made.init(["w", "m"], [torch.zeros(2), torch.zeros(3, 2)])
        with pytest.raises(KVStoreError, match=f"^{re.escape(message)}"):
            call(made)
        assert torch.equal(made.pull("w").get(), torch.zeros(2))
        made.push("m", torch.ones(3, 2))
        assert torch.equal(made.pull("m").get(), torch.ones(3, 2))


def test_kinds_and_closed_stores_are_named() -> None:
    """What there is, and what is over."""
    kinds = ", ".join([*KINDS, "dist_async"])
    with pytest.raises(KVStoreError, match=rf"^wanted a kind of store \({kinds}\), got 'remote'$"):
        rl.kvstore.create("remote")
    made = rl.kvstore.create("local")
    made.init("w", torch.zeros(1))
    made.close()
    made.close()
    closed = "^wanted an open store, got one that was closed; create another$"
    calls = [
        lambda: made.push("w", torch.ones(1)),
        lambda: made.pull("w"),
        lambda: made.init("v", torch.ones(1)),
        made.barrier,
    ]
    for call in calls:
        with pytest.raises(KVStoreError, match=closed):
            call()


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_of_states_is_refused(damage: str, tmp_path: Path) -> None:
    """And the states that there are stay."""
    path = tmp_path / "states"
    with rl.kvstore.create("local") as made:
        made.init("w", torch.zeros(4))
        made.set_optimizer("sgd", lr=1.0, momentum=0.5)
        made.push("w", torch.ones(4))
        made.save_optimizer_states(path)
        path.write_bytes(path.read_bytes()[:-3] if damage == "cut" else b"{}" * 20)
        with pytest.raises(KVStoreError, match=r"^wanted optimizer states that a store saved in "):
            made.load_optimizer_states(path)
        made.push("w", torch.ones(4))
        assert torch.equal(made.pull("w").get(), torch.full((4,), -2.5))
        with pytest.raises(
            KVStoreError, match=r"^wanted to write optimizer states to .*; name a folder"
        ):
            made.save_optimizer_states(tmp_path)
