"""FLOP of operators; a multiply-add counts as 2.

Only contractions (matrix products, convolutions, attention, recurrent layers) and the solving of dense
systems are counted, as is the custom for model FLOP counts; pointwise work, normalisation and pooling are
0 and show as bytes.
"""
# ruff: noqa: SLF001 - operators whose names begin with an underscore

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from ridgeline.tracing.operators.operands import argument

aten = torch.ops.aten
Get = Callable[[str], Any]
"""A named argument of the call."""
Formula = Callable[[Get, Any], int]
"""FLOP from the named arguments and the result."""


def flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOP of one call of an operator; 0 for operators that are no contraction."""
    formula = FORMULAS.get(func.overloadpacket)
    if formula is None:
        return 0
    return formula(lambda name: argument(func, args, kwargs, name), result)


def _product(first: str, second: str) -> Formula:
    """[..., M, K] times [..., K, N]: 2 M N K for each matrix. Source: definition of the product."""

    def formula(get: Get, result: Any) -> int:
        left, right = get(first), get(second)
        return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)

    return formula


def _contraction(name: str) -> Formula:
    """2 for each element of the result and of the last dimension of a factor, which is summed over."""

    def formula(get: Get, result: Any) -> int:
        return 2 * result.numel() * get(name).shape[-1]

    return formula


def _linear_backward(get: Get, result: Any) -> int:
    wants_input, wants_weight, _ = get("output_mask")
    return (wants_input + wants_weight) * 2 * get("grad_output").numel() * get("weight").shape[-1]


def _one_convolution(outer: Tensor, weight: Tensor) -> int:
    """2 x positions x channels x taps; `weight` is [C, C'/groups, taps...], so groups are in it.

    `outer` has the C of the weight as its channels: the output of a convolution, the input of a
    transposed one.

    Source: definition of convolution; every tap counts, also those that fall on padding.
    """
    return 2 * outer.numel() * prod(weight.shape[1:])


def _convolution(get: Get, result: Any) -> int:
    return _one_convolution(get("input") if get("transposed") else result, get("weight"))


def _plain_convolution(get: Get, result: Any) -> int:
    return _one_convolution(result, get("weight"))


def _convolution_backward(get: Get, result: Any) -> int:
    """As many as forward for the input's gradient, and again for the weight's, where wanted."""
    wants_input, wants_weight, _ = get("output_mask")
    outer = get("input") if get("transposed") else get("grad_output")
    return (wants_input + wants_weight) * _one_convolution(outer, get("weight"))


def _scores(query: Tensor, key: Tensor, is_causal: bool, heads_dim: int) -> int:
    """Entries of the score matrix that are needed: causal ones have key position <= query position."""
    # Kernels of the dispatcher take [batch, heads, length, dim], those below [batch, length, heads, dim].
    length_dim = -2 if heads_dim == 1 else 1
    num_queries, num_keys = query.shape[length_dim], key.shape[length_dim]
    pairs = num_queries * num_keys
    if is_causal:
        inside = min(num_queries, num_keys)
        pairs = inside * (inside + 1) // 2 + (num_queries - inside) * num_keys
    return query.shape[0] * query.shape[heads_dim] * pairs


def _attention(heads_dim: int, *, backward: bool) -> Formula:
    """Forward 2 products: scores, values. Backward 5: scores, and gradients of q, k, v and scores.

    Source: Dao et al., FlashAttention (2022), algorithms 1 and 4.
    """

    def formula(get: Get, result: Any) -> int:
        query, key, value = get("query"), get("key"), get("value")
        scores = _scores(query, key, _is_causal(get), heads_dim)
        dim_scores, dim_values = query.shape[-1], value.shape[-1]
        if backward:
            return 2 * scores * (3 * dim_scores + 2 * dim_values)
        return 2 * scores * (dim_scores + dim_values)

    return formula


def _is_causal(get: Get) -> bool:
    try:
        return bool(get("is_causal"))
    except KeyError:  # the memory-efficient kernel numbers its masks; 0 is none, 1 and 2 are causal
        return bool(get("custom_mask_type"))


def _mkldnn_rnn(factor: int) -> Formula:
    def formula(get: Get, result: Any) -> int:
        # The schema numbers the same two weights from 0 in forward and from 1 in backward.
        weights = ("weight0", "weight1") if factor == 1 else ("weight1", "weight2")
        tokens = get("input").shape[0] * get("input").shape[1]
        return 2 * factor * tokens * sum(get(name).numel() for name in weights)

    return formula


def _cudnn_rnn(factor: int) -> Formula:
    """Every weight matrix meets every token once. Source: the recurrence's definition."""

    def formula(get: Get, result: Any) -> int:
        tokens = prod(get("input").shape[:-1])
        # Biases have one dimension, and are added only.
        return 2 * factor * tokens * sum(w.numel() for w in get("weight") if w.dim() == 2)

    return formula


def _trilinear(get: Get, result: Any) -> int:
    """2 for each combination of all indices: the larger of the two products that three factors take.

    Source: nn.Bilinear, y_bo = sum_ij x_bi w_oij z_bj; the factors are broadcast as `expand1` ... say.
    """
    shapes = []
    for number in (1, 2, 3):
        shape = list(get(f"i{number}").shape)
        for dim in sorted(get(f"expand{number}")):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * prod(max(sizes) for sizes in zip(*shapes, strict=True))


def _outer(get: Get, result: Any) -> int:
    return 2 * result.numel()


def _factoring(name: str, thirds: int) -> Formula:
    """n^3 x `thirds` / 3 for each matrix: LU 2, Cholesky 1.

    Source: Golub and Van Loan, Matrix Computations (4th edition), sections 3.2 and 4.2.
    """

    def formula(get: Get, result: Any) -> int:
        rows = get(name).shape[-1]
        return thirds * rows * get(name).numel() // 3

    return formula


def _substituting(name: str, triangles: int) -> Formula:
    """n^2 for each triangle and right-hand side. Source: as for factoring, section 3.1."""

    def formula(get: Get, result: Any) -> int:
        solution = result[0] if isinstance(result, (tuple, list)) else result
        return triangles * get(name).shape[-1] * solution.numel()

    return formula


def _solve(get: Get, result: Any) -> int:
    return _factoring("A", 2)(get, result) + _substituting("A", 2)(get, result)


FORMULAS: dict[OpOverloadPacket, Formula] = {
    aten.mm: _product("self", "mat2"),
    aten.bmm: _product("self", "mat2"),
    aten._int_mm: _product("self", "mat2"),
    aten._scaled_mm: _product("self", "mat2"),
    aten._grouped_mm: _product("self", "mat2"),
    aten.addmm: _product("mat1", "mat2"),
    aten._addmm_activation: _product("mat1", "mat2"),
    aten.addmm_: _product("mat1", "mat2"),
    aten.baddbmm: _product("batch1", "batch2"),
    aten.baddbmm_: _product("batch1", "batch2"),
    aten.addbmm: _product("batch1", "batch2"),
    aten.mv: _product("self", "vec"),
    aten.addmv: _product("mat", "vec"),
    aten.dot: _product("self", "tensor"),
    aten.vdot: _product("self", "other"),
    aten.addr: _outer,
    aten._trilinear: _trilinear,
    aten._euclidean_dist: _contraction("x1"),  # |x - y|^2 = |x|^2 - 2 x y + |y|^2
    aten.linalg_lu_factor_ex: _factoring("A", 2),
    aten.linalg_cholesky_ex: _factoring("self", 1),
    aten.linalg_lu_solve: _substituting("LU", 2),
    aten.linalg_solve_triangular: _substituting("self", 1),
    aten._linalg_solve_ex: _solve,
    aten.matmul: _contraction("self"),
    aten.linear: _contraction("weight"),
    aten.linear_backward: _linear_backward,
    aten.convolution: _convolution,
    aten._convolution: _convolution,
    aten.convolution_overrideable: _convolution,
    aten.cudnn_convolution: _plain_convolution,
    aten.mkldnn_convolution: _plain_convolution,
    aten.convolution_backward: _convolution_backward,
    aten.convolution_backward_overrideable: _convolution_backward,
    aten._flash_attention_forward: _attention(2, backward=False),
    aten._flash_attention_backward: _attention(2, backward=True),
    aten._efficient_attention_forward: _attention(2, backward=False),
    aten._efficient_attention_backward: _attention(2, backward=True),
    aten.mkldnn_rnn_layer: _mkldnn_rnn(1),
    aten.mkldnn_rnn_layer_backward: _mkldnn_rnn(2),
    aten._cudnn_rnn: _cudnn_rnn(1),
    aten._cudnn_rnn_backward: _cudnn_rnn(2),
}
for _kernel in ("flash", "flash_for_cpu", "efficient", "cudnn", "fused_overrideable"):
    _head, _, _tail = _kernel.partition("_")
    _name = f"_scaled_dot_product_{_head}_attention{'_' + _tail if _tail else ''}"
    FORMULAS[getattr(aten, _name)] = _attention(1, backward=False)
    FORMULAS[getattr(aten, f"{_name}_backward")] = _attention(1, backward=True)
