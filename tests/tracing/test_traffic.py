"""Least bytes of operators: what is read once, twice, in part, or not at all."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.tracing.operators.family import family
from ridgeline.tracing.operators.operands import operands
from ridgeline.tracing.operators.traffic import tensor_bytes, traffic

aten = torch.ops.aten


def moved(func: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """(bytes read, bytes written) of one call on tensors that exist."""
    return traffic(func, args, kwargs, operands(func, args, kwargs, func(*args, **kwargs)))


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_pointwise_reads_and_writes_once() -> None:
    """Two inputs are read, one result is written; the same input twice is read once."""
    assert moved(aten.add.Tensor, f32(4, 5), f32(4, 5)) == (160, 80)
    same = f32(4, 5)
    assert moved(aten.add.Tensor, same, same) == (80, 80)
    assert moved(aten.add.Tensor, same, same.view(4, 5)) == (80, 80)
    assert moved(aten.add.Tensor, same[:2], same[2:]) == (80, 40)


def test_in_place_reads_and_writes() -> None:
    """In place reads and writes its target; filling and copying do not read it."""
    assert moved(aten.add_.Tensor, f32(10), f32(10)) == (80, 40)
    assert moved(aten.fill_.Scalar, f32(10), 1.0) == (0, 40)
    assert moved(aten.zero_.default, f32(10)) == (0, 40)
    assert moved(aten.copy_.default, f32(10), f32(10)) == (40, 40)
    assert moved(aten.mul.out, f32(10), f32(10), out=f32(10)) == (80, 40)
    assert moved(aten._foreach_mul_.Scalar, [f32(10), f32(5)], 0.9) == (60, 60)


def test_views_and_allocations_move_nothing() -> None:
    """Views and empty tensors move nothing; constants are written only."""
    assert moved(aten.t.default, f32(4, 5)) == (0, 0)
    assert moved(aten.expand.default, f32(4, 1), [4, 9]) == (0, 0)
    assert moved(aten._unsafe_view.default, f32(4, 5), [20]) == (0, 0)
    assert moved(aten.empty.memory_format, [9]) == (0, 0)
    assert moved(aten.empty_like.default, f32(9)) == (0, 0)
    assert moved(aten.zeros_like.default, f32(9)) == (0, 36)


def test_expanded_tensors_are_as_large_as_their_elements() -> None:
    """A dimension of stride 0 is read once."""
    assert moved(aten.mul.Tensor, f32(4, 5), f32(4, 1).expand(4, 5)) == (80 + 16, 80)


def test_gathering_touches_rows() -> None:
    """An embedding reads the rows it returns and the indices, at most the whole table."""
    table, few, many = f32(100, 8), torch.tensor([1, 2]), torch.zeros(500, dtype=torch.long)
    assert moved(aten.embedding.default, table, few) == (2 * 32 + 16, 2 * 32)
    assert moved(aten.embedding.default, table, many) == (3200 + 4000, 500 * 32)
    gradient = moved(aten.embedding_dense_backward.default, f32(2, 8), few, 100, -1, False)
    assert gradient == (2 * 32 + 16, 3200)


def test_scattering_touches_rows() -> None:
    """Adding rows in place reads and writes those rows, not the target."""
    index = torch.tensor([1, 2])
    assert moved(aten.index_add_.default, f32(100, 8), 0, index, f32(2, 8)) == (64 + 64 + 16, 64)
    assert moved(aten.index_put_.default, f32(100, 8), [index], f32(2, 8)) == (64 + 64 + 16, 64)


def test_batch_statistics_need_a_second_pass() -> None:
    """Batch norm reads its input twice in training and once in evaluation."""
    x, weight, statistics = f32(8, 4, 5), f32(4), f32(4)
    shared = (weight, f32(4), statistics, f32(4))
    small = 4 * 16
    training = moved(aten.native_batch_norm.default, x, *shared, True, 0.1, 1e-5)
    assert training == (2 * 640 + small, 640 + 2 * 16 + 2 * 16)
    evaluation = moved(aten.native_batch_norm.default, x, *shared, False, 0.1, 1e-5)
    assert evaluation == (640 + small, 640)
    saved = (weight, statistics, f32(4), f32(4), f32(4))
    backward = moved(
        aten.native_batch_norm_backward.default, x, f32(8, 4, 5), *saved, True, 1e-5, [True] * 3
    )
    assert backward == (4 * 640 + 5 * 16, 640 + 2 * 16)


@settings(max_examples=50)
@given(shape=st.lists(st.integers(0, 5), max_size=4))
def test_bytes_of_plain_tensors(shape: list[int]) -> None:
    """A contiguous tensor has elements times element size bytes."""
    tensor = torch.zeros(shape, dtype=torch.float64)
    assert tensor_bytes(tensor) == tensor.numel() * 8


@pytest.mark.parametrize(
    ("func", "wanted"),
    [
        (aten.mm.default, "matmul"),
        (aten.convolution_backward.default, "convolution"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"),
        (aten.gelu_backward.default, "elementwise"),
        (aten._foreach_add_.List, "elementwise"),
        (aten._fused_adamw_.default, "elementwise"),
        (aten.native_layer_norm.default, "normalization"),
        (aten._softmax.default, "normalization"),
        (aten.sum.dim_IntList, "reduction"),
        (aten.linalg_vector_norm.default, "reduction"),
        (aten.max_pool2d_with_indices.default, "reduction"),
        (aten.embedding_dense_backward.default, "gather"),
        (aten.clone.default, "copy"),
        (aten.cat.default, "copy"),
        (aten.empty.memory_format, "other"),
        (aten._local_scalar_dense.default, "other"),
        (aten.set_.source_Storage_storage_offset, "view"),
    ],
)
def test_families(func: Any, wanted: str) -> None:
    """Operators are filed under the family whose efficiency they share."""
    assert family(func, is_view=False) == wanted
    assert family(func, is_view=True) == "view"
