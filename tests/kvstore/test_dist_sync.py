"""Stores of several workers: their sums are exact, and training through them is that of one process."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import store_worker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asked_workers import Workers
from ridgeline.runtime.kvstore.compression import KeyedCompression
from sums_by_rank import total

SIZES = (2, 3, 4)
DTYPES = ("float32", "float64", "bfloat16", "float16", "int16", "int32", "int64")
SHAPES = st.lists(
    st.one_of(
        st.just([]),
        st.lists(st.integers(0, 40), min_size=1, max_size=1),
        st.lists(st.integers(1, 12), min_size=2, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(store_worker.__file__)) as started:
        yield started


def same(told: list[Any], wanted: Tensor) -> bool:
    return all(one == wanted.double().tolist() for one in told)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=25)
@given(
    shapes=SHAPES,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 20),
    at_once=st.booleans(),
)
def test_sums_are_exact(
    workers: Workers, size: int, *, shapes: list[list[int]], dtype: str, seed: int, at_once: bool
) -> None:
    """Before a push there is what worker 0 gave; after it the sum, on all workers, by ranks."""
    told = workers.ask("sums", size, shapes=shapes, dtype=dtype, seed=seed, at_once=at_once)
    for number, shape in enumerate(shapes):
        values = [store_worker.values_of(rank, seed + number, shape, dtype) for rank in range(size)]
        assert same([one["begun"][number] for one in told], values[0])
        assert same([one["found"][number] for one in told], total(values))


TRAINED: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"lr": 0.01},
    "rmsprop": {"lr": 0.01},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("optimizer", TRAINED)
def test_training_is_that_of_one_process(
    workers: Workers, optimizer: str, size: int, tmp_path: Path
) -> None:
    """Bit for bit, with values divided among workers and the optimizer's state through a file."""
    path = str(tmp_path / "states")
    told = workers.ask("trained", size, optimizer=optimizer, settings=TRAINED[optimizer], path=path)
    torch.manual_seed(0)
    model = store_worker.Net()
    made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    plain = made[optimizer](model.parameters(), **TRAINED[optimizer])
    for step in range(store_worker.STEPS):
        brought = [store_worker.gradients(model, rank, step) for rank in range(size)]
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = total([one[number] for one in brought]) * (1 / size)
        plain.step()
    for number, parameter in enumerate(model.parameters()):
        assert same([one["parameters"][number] for one in told], parameter.detach())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("", {}),
        ("sgd", {"lr": 0.5}),
        ("adagrad", {"lr": 0.5}),
        ("sgd", {"lr": 0.5, "momentum": 0.5}),
    ],
)
def test_sparse_rows_are_those_of_one_process(
    workers: Workers, optimizer: str, settings: dict[str, Any], size: int
) -> None:
    """Rows of several workers, some the same; only one of the optimizers changes rows that nobody pushed."""
    told = workers.ask("sparse", size, optimizer=optimizer, settings=settings)
    value = store_worker.values_of(0, 7, [store_worker.ROWS, store_worker.WIDTH], "float32")
    parameter = nn.Parameter(value)
    made = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}.get(optimizer)
    plain = made([parameter], **settings) if made else None
    for step in range(2):
        brought = [store_worker.rows_of(rank, step).coalesce().to_dense() for rank in range(size)]
        summed = total(brought)
        if plain is None:
            parameter.data = summed
        else:
            touched = summed.abs().sum(1).nonzero()[:, 0]
            with torch.sparse.check_sparse_tensor_invariants():
                rows = torch.sparse_coo_tensor(touched[None], summed[touched], summed.shape)
                parameter.grad = rows
                plain.step()
    for one in told:
        torch.testing.assert_close(
            torch.tensor(one["found"]), parameter.detach().double(), atol=1e-6, rtol=1e-6,
            check_dtype=False,
        )  # fmt: skip
    assert all(one["found"] == told[0]["found"] for one in told)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "params",
    [{"type": "1bit"}, {"type": "2bit", "threshold": 0.4}, {"type": "bf16"}, {"type": "int8"}],
)
@pytest.mark.parametrize("shape", [[7], [11, 5], [300]])
def test_what_is_compressed_is_decoded_and_summed(
    workers: Workers, shape: list[int], params: dict[str, Any], size: int
) -> None:
    """A value is the sum of what each worker's codec makes of its parts; `init` is never compressed."""
    told = workers.ask("compressed", size, shape=shape, params=params)
    codecs = [KeyedCompression(params) for _ in range(size)]
    rows = shape[0]
    numel = int(torch.tensor(shape).prod())
    bounds = [rows * place // size for place in range(size + 1)] if numel >= 30 else [0, rows]
    for step in range(store_worker.STEPS):
        sent = []
        for rank, codec in enumerate(codecs):
            value = store_worker.values_of(rank, step, shape, "float32") / 8
            parts = [
                codec.passed(begin, value[begin:end]) for begin, end in itertools.pairwise(bounds)
            ]
            sent.append(torch.cat(parts))
        assert same([one["found"][step] for one in told], total(sent))


@pytest.mark.parametrize(
    ("what", "got"), [("shape", "'w': float32 [3]"), ("key", "'v': float32 [2]")]
)
def test_workers_that_differ_are_refused(workers: Workers, what: str, got: str) -> None:
    """On all of them, before anything is sent."""
    told = workers.ask("refused", 3, what=what)
    assert [one["message"] for one in told] == [
        "KVStoreError: wanted the same init on all workers, got on worker 0: 'w': float32 [2]; on worker 2: "
        + got
    ] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ["order", "settings", "rows"])
def test_a_push_that_another_worker_makes_otherwise_is_refused(
    workers: Workers, what: str, size: int
) -> None:
    """On all of them, where sums were taken for each other's, or each key updated by its server's settings."""
    told = workers.ask("unlike", size, what=what)
    by = "by sgd {'lr': 0.25}, rescale_grad=1.0"
    usual = f"'a', 'b', 'c', 'd' {by}"
    other = {
        "order": f"'d', 'c', 'b', 'a' {by}",
        "settings": usual.replace("0.25", "0.5"),
        "rows": f"rows of 'a', rows of 'b', rows of 'c', rows of 'd' {by}",
    }[what]
    message = (
        f"KVStoreError: wanted the same push on all workers, got on worker 0: {usual}; on worker {size - 1}: "
        f"{other}; make the same calls with the same settings, in the same order, on all workers"
    )
    assert [one["message"] for one in told] == [message] * size
    assert [one["found"] for one in told] == [1.0 - size] * size


@pytest.mark.parametrize(
    ("what", "cause", "key", "server"),
    [
        ("function", "wanted updater 'fail' to update key 'w', got ValueError: no luck", "w", 0),
        # The sparse value is divided, so that its update fails everywhere.
        (
            "sparse",
            "wanted Adam to update key 'w' by a sparse gradient, got RuntimeError: Adam does not support ",
            "w",
            None,
        ),
        (
            "whole numbers",
            "wanted SGD to update key 'n' by a dense gradient, got RuntimeError: Only Tensors of floating ",
            "n",
            1,
        ),
    ],
)
def test_an_update_that_fails_where_it_is_served_is_told_to_all(
    workers: Workers, what: str, cause: str, key: str, server: int | None
) -> None:
    """Nobody waits for who has failed, and other keys go on."""
    told = [one["messages"] for one in workers.ask("failing", 3, what=what)]
    assert all(len(messages) == 1 for messages in told)
    assert sum(messages[0].startswith(cause) for messages in told) == (3 if server is None else 1)
    message = (
        f"wanted the updates of keys {key!r} to work, got a failure on worker {server}, which serves one of "
        "them; its own error says what"
    )
    others = {messages[0] for messages in told if not messages[0].startswith(cause)}
    assert others == (set() if server is None else {message})
