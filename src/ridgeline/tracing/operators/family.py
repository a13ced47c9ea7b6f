"""Which family of operators an operator belongs to: ops of a family share an efficiency curve."""

import torch
from torch._ops import OpOverload

from ridgeline.tracing.operators.flops import FORMULAS
from ridgeline.tracing.operators.operands import ALLOCATING
from ridgeline.workload import Family

_BY_WORD: tuple[tuple[str, Family], ...] = (
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("_norm", "normalization"),
    ("softmax", "normalization"),
    ("foreach_", "elementwise"),
    ("_fused_", "elementwise"),
    ("dropout", "elementwise"),
    ("pool", "reduction"),
    ("embedding", "gather"),
    ("index", "gather"),
    ("gather", "gather"),
    ("scatter", "gather"),
    ("upsample", "gather"),
    ("grid_sampler", "gather"),
    ("masked_select", "gather"),
    ("nonzero", "gather"),
)
"""First match wins. `linalg_vector_norm` and `_foreach_norm` are distinguished in `_NAMED`."""

_NAMES: tuple[tuple[Family, str], ...] = (
    (
        "reduction",
        (
            "sum mean amax amin max min argmax argmin prod var std var_mean norm linalg_vector_norm "
            "_foreach_norm cumsum cumprod any all logsumexp topk sort median mode nansum count_nonzero "
            "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss "
            "smooth_l1_loss huber_loss binary_cross_entropy _cdist_forward"
        ),
    ),
    (
        "copy",
        (
            "clone copy_ _to_copy cat stack fill fill_ zero_ zeros ones full zeros_like ones_like "
            "full_like new_zeros new_ones new_full constant_pad_nd repeat roll flip select_backward "
            "slice_backward diagonal_backward unfold_backward _foreach_copy_ _foreach_zero_ arange eye "
            "linspace scalar_tensor reflection_pad1d reflection_pad2d replication_pad1d "
            "replication_pad2d lift_fresh_copy tril triu"
        ),
    ),
    (
        "elementwise",
        (
            "mse_loss_backward smooth_l1_loss_backward huber_loss_backward bernoulli bernoulli_ normal_ "
            "binary_cross_entropy_backward hardtanh hardtanh_backward uniform_ random_ exponential_ rand "
            "randn randint randperm rand_like randn_like _thnn_fused_lstm_cell _thnn_fused_gru_cell glu "
            "glu_backward leaky_relu leaky_relu_backward prelu _prelu_kernel hardswish_backward"
        ),
    ),
)
_NAMED = {name: family for family, names in _NAMES for name in names.split()}

_UNCOUNTED = ("_fft_", "linalg_", "_linalg_", "_cdist_", "cholesky", "conv_tbc", "_ctc")
"""How the names of operators begin that compute much, unless there is a FLOP formula for them."""
_COMPUTING_LITTLE = ("linalg_vector_norm", "_linalg_check_errors")


def family(func: OpOverload, *, is_view: bool) -> Family:
    """The family of an operator; `is_view` says that this call only looked at its inputs again."""
    name = func.overloadpacket.__name__
    if is_view or name == "set_":  # which gives a tensor memory that is there already
        return "view"
    # They take the host's time and move next to nothing, so that no curve of a family fits them.
    if func.overloadpacket in ALLOCATING or name == "_local_scalar_dense":
        return "other"
    # By name before by word: `_foreach_norm` is no elementwise operator, for example.
    if name in _NAMED:
        return _NAMED[name]
    for word, entry in _BY_WORD:
        if word in name:
            return entry
    if func.overloadpacket in FORMULAS:
        return "matmul"
    if torch.Tag.pointwise in func.tags:
        return "elementwise"
    if name.rstrip("_") in _NAMED:
        return _NAMED[name.rstrip("_")]
    return "other"


def is_uncounted(func: OpOverload) -> bool:
    """Whether the operator computes more than its bytes show, without a FLOP formula here."""
    name = func.overloadpacket.__name__
    if func.overloadpacket in FORMULAS or name.startswith(_COMPUTING_LITTLE):
        return False
    return name.startswith(_UNCOUNTED)
