"""FLOP: published networks to the digit, laws for the operators, and torch's own counter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import (
    TiedLanguageModel,
    ViT,
    alexnet,
    image_batch,
    image_loss,
    language_batch,
    language_loss,
    resnet,
    sgd,
    vgg16,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import ridgeline as rl
from ridgeline.tracing.operators.flops import flops

aten = torch.ops.aten

# FLOP of one sample at 224 x 224, a multiply-add counted as 2: (forward, forward and backward). The
# images need no gradient, so the first convolution has one product less in backward.
PUBLISHED = {
    "alexnet": (alexnet, 1_428_376_960, 4_144_577_280),
    "resnet18": (lambda: resnet((2, 2, 2, 2), bottleneck=False), 3_628_146_688, 10_648_412_160),
    "resnet50": (lambda: resnet((3, 4, 6, 3), bottleneck=True), 8_178_368_512, 24_299_077_632),
    "vgg16": (vgg16, 30_940_528_640, 92_648_177_664),
    "vit_b_16": (ViT, 35_127_656_448, 105_867_085_824),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_networks_to_the_digit(name: str) -> None:
    """Forward and training FLOP of a sample are the published ones, exactly."""
    make, forward, train = PUBLISHED[name]
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")  # pages that are never touched take no memory
    workload = rl.trace(model, image_loss, sgd(model), image_batch(2))
    assert sum(op.flops for op in workload.phase("forward")) == 2 * forward
    assert workload.flops == 2 * train


def test_parity_with_the_counter_of_torch() -> None:
    """Where torch's counter is right (no groups, no attention) both counts agree."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    batch = image_batch(5, side=8)
    workload = rl.trace(model, image_loss, sgd(model), batch)
    with FlopCounterMode(display=False) as counter:
        image_loss(model, batch).backward()
    assert workload.flops == counter.get_total_flops()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_backward_is_twice_forward(groups: int, is_transposed: bool) -> None:
    """With the input's gradient wanted, backward costs twice the forward, whatever the groups."""
    kind = nn.ConvTranspose2d if is_transposed else nn.Conv2d
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, 8, 3, 2, groups=groups), nn.Flatten())
    workload = rl.trace(model, lambda m, b: m(b[0]).mean(), sgd(model), image_batch(2, side=9))
    ops = [op for op in workload.ops if op.module == "1" and op.flops]
    assert [op.name for op in ops] == [
        "aten.convolution.default",
        "aten.convolution_backward.default",
    ]
    assert ops[1].flops == 2 * ops[0].flops
    positions = 9 * 9 if is_transposed else 4 * 4
    assert ops[0].flops == 2 * 2 * positions * (4 * 8 // groups) * 9


def test_frozen_input_saves_half_of_backward() -> None:
    """A layer whose input needs no gradient pays for the weight's gradient only."""
    model = nn.Sequential(nn.Linear(6, 5))
    workload = rl.trace(model, lambda m, b: m(b).sum(), sgd(model), torch.zeros(8, 6))
    forward = sum(op.flops for op in workload.phase("forward"))
    assert forward == 2 * 8 * 6 * 5
    assert sum(op.flops for op in workload.phase("backward")) == forward


sizes = st.integers(1, 9)


@settings(max_examples=25)
@given(batch=sizes, heads=sizes, queries=sizes, keys=sizes, dim=sizes, is_causal=st.booleans())
def test_attention_counts_the_scores_that_are_needed(
    batch: int, heads: int, queries: int, keys: int, dim: int, is_causal: bool
) -> None:
    """Forward 4 d, backward 10 d for each score; a causal mask leaves the lower triangle."""
    scores = batch * heads * int(torch.ones(queries, keys).tril().sum()) if is_causal else 0
    scores = scores or batch * heads * queries * keys
    query = torch.empty(batch, heads, queries, dim, device="meta")
    key = torch.empty(batch, heads, keys, dim, device="meta")
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(forward, (query, key, key, 0.0, is_causal), {}, None) == 4 * scores * dim
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    tensors = (query, query, key, key, query, query, 0.0, is_causal)
    assert flops(backward, tensors, {}, None) == 10 * scores * dim


@settings(max_examples=25)
@given(m=sizes, k=sizes, n=sizes, b=sizes)
def test_products_cost_two_mnk(m: int, k: int, n: int, b: int) -> None:
    """Every spelling of a matrix product costs 2 M N K for each matrix."""

    def meta(*shape: int) -> Any:
        return torch.empty(*shape, device="meta")

    assert flops(aten.mm.default, (meta(m, k), meta(k, n)), {}, None) == 2 * m * n * k
    addmm = (meta(n), meta(m, k), meta(k, n))
    assert flops(aten.addmm.default, addmm, {}, None) == 2 * m * n * k
    assert flops(aten.bmm.default, (meta(b, m, k), meta(b, k, n)), {}, None) == 2 * b * m * n * k
    assert flops(aten.mv.default, (meta(m, k), meta(k)), {}, None) == 2 * m * k
    linear = (meta(b, m, k), meta(n, k))
    assert flops(aten.linear.default, linear, {}, meta(b, m, n)) == 2 * b * m * n * k


@settings(max_examples=25)
@given(batch=sizes, left=sizes, right=sizes, outputs=sizes)
def test_three_factors_cost_two_for_each_combination(
    batch: int, left: int, right: int, outputs: int
) -> None:
    """A bilinear layer costs 2 FLOP for each sample and weight, as much for its gradient."""
    model = nn.Bilinear(left, right, outputs)
    both = (torch.zeros(batch, left), torch.zeros(batch, right))
    workload = rl.trace(model, lambda m, b: m(*b).sum(), sgd(model), both)
    assert sum(op.flops for op in workload.phase("forward")) == 2 * batch * left * right * outputs
    (backward,) = (op for op in workload.phase("backward") if "_trilinear" in op.name)
    assert backward.flops == 2 * batch * left * right * outputs


@settings(max_examples=25)
@given(n=sizes, k=sizes, b=sizes, d=sizes)
def test_dense_systems_and_pairs_cost_what_the_textbook_says(
    n: int, k: int, b: int, d: int
) -> None:
    """LU 2/3 n^3, Cholesky n^3/3, each triangle n^2 for each right-hand side; distances as their product."""

    def meta(*shape: int) -> Any:
        return torch.empty(*shape, device="meta")

    a, x = meta(b, n, n), meta(b, n, k)
    assert flops(aten.linalg_cholesky_ex.default, (a,), {}, (a, None)) == b * n**3 // 3
    assert flops(aten.linalg_lu_factor_ex.default, (a,), {}, (a, None, None)) == 2 * b * n**3 // 3
    assert flops(aten.linalg_lu_solve.default, (a, None, x), {}, x) == 2 * b * n**2 * k
    assert flops(aten.linalg_solve_triangular.default, (a, x), {"upper": True}, x) == b * n**2 * k
    solved = flops(aten._linalg_solve_ex.default, (a, x), {}, (x, a, None, None))
    assert solved == 2 * b * n**3 // 3 + 2 * b * n**2 * k
    pairs = (meta(n, d), meta(k, d))
    assert flops(aten._euclidean_dist.default, pairs, {}, meta(n, k)) == 2 * n * k * d
    addr = (meta(n, k), meta(n), meta(k))
    assert flops(aten.addr.default, addr, {}, meta(n, k)) == 2 * n * k


@settings(max_examples=5)
@given(words=st.integers(9, 50), width=st.integers(1, 4), depth=st.integers(1, 3), size=sizes)
def test_transformers_cost_six_flop_for_each_weight_and_token(
    words: int, width: int, depth: int, size: int
) -> None:
    """Products of a language model: 6 (12 L d^2 + V d) FLOP a token, attention apart."""
    dim = 4 * width
    model = TiedLanguageModel(words, dim, heads=2, depth=depth)
    workload = rl.trace(model, language_loss, sgd(model), language_batch(size, 7, words))
    products = sum(op.flops for op in workload.ops if op.family == "matmul")
    assert products == 6 * (12 * depth * dim**2 + words * dim) * size * 7
    attention = sum(op.flops for op in workload.ops if op.family == "attention")
    assert attention == (4 + 10) * depth * size * dim * (7 * 8 // 2)
    assert workload.flops == products + attention


def test_recurrent_layers_meet_every_token_with_every_weight() -> None:
    """An LSTM's forward costs 2 FLOP for each token and weight; its backward twice that."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 7, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    model = Last()
    batch = torch.zeros(8, 10, 6)
    workload = rl.trace(
        model, lambda m, b: F.mse_loss(m(b), b[:, 0, :1].expand(-1, 7)), sgd(model), batch
    )
    weights = 4 * 7 * (6 + 7)
    assert sum(op.flops for op in workload.phase("forward")) == 2 * 8 * 10 * weights
    assert sum(op.flops for op in workload.phase("backward")) == 4 * 8 * 10 * weights


def test_unknown_contractions_are_named() -> None:
    """An operator that computes without a formula is counted 0 and said so."""
    model = nn.Linear(6, 6)
    workload = rl.trace(
        model, lambda m, b: torch.fft.rfft(m(b)).abs().sum(), sgd(model), torch.zeros(8, 6)
    )
    assert any(
        "operators without a FLOP formula, counted 0: aten._fft_r2c" in n for n in workload.notes
    )
