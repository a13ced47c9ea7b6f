"""Which values the inputs of an operator must hold for it to run as in a real step.

A trace has no values, and made-up ones flow through a replayed step: an index made of them may lie outside
of what it indexes, and then a kernel on a GPU asserts, which ends the whole process. So each input that
operators check, or read memory by, is given values that are in range for that very call.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Literal, NamedTuple

from ridgeline.probe.operators.rebuild import NamedArguments
from ridgeline.workload import Op, TensorSpec

Kind = Literal["index", "starts", "bounds", "parts", "constant", "odds", "trues"]


class Made(NamedTuple):
    """Values to make up for one input.

    `kind` says how `bound` is meant:

    - `index`: integers from `least` to `bound`, exclusive
    - `starts`: ascending from 0 to below `bound`, the beginnings of bags
    - `bounds`: ascending from 0 to `bound`, both included
    - `parts`: integers whose sum is `bound`
    - `constant`: every element `bound`
    - `odds`: floats in (0, 1)
    - `trues`: booleans, or numbers that are 0 or 1, `bound` of them true

    `trusts_ops`: what an operator of the step has computed for this input is in range by itself, as the
    indices of a pooling operator are for its backward.
    """

    kind: Kind
    bound: int = 0
    least: int = 0
    trusts_ops: bool = False


Rule = Callable[[NamedArguments], Mapping[str, Made] | Mapping[int, Made]]
"""Argument, or position of one among the op's inputs, to the values that it needs."""


def valid_inputs(op: Op) -> dict[int, Made]:
    """What must be made up for which inputs of an op, by position among `op.inputs`.

    Raises:
        WorkloadError: torch here has no such operator, or its arguments cannot be read.
    """
    library, _, name = op.name.replace("::", ".").partition(".")
    # Without overload and underscore: an operator in place wants the same values.
    rule = _RULES.get(f"{library}.{name.split('.')[0].rstrip('_')}")
    if rule is None:
        return {}
    call = NamedArguments(op)
    found: dict[int, Made] = {}
    for argument, made in rule(call).items():
        positions = [argument] if isinstance(argument, int) else call.positions(argument)
        found |= {position: made for position in positions if position is not None}
    return {position: made for position, made in found.items() if _suits(made, call.at(position))}


def _suits(made: Made, spec: TensorSpec) -> bool:
    """Odds are floats, trues anything, and all else integers or booleans; a rule says nothing of others."""
    is_float = spec.dtype.startswith(("float", "bfloat", "complex"))
    if made.kind == "index" and spec.dtype in ("bool", "uint8"):
        return False  # a mask
    if made.kind == "trues":
        return True
    return is_float == (made.kind == "odds")


def _along(call: NamedArguments) -> dict[str, Made]:
    sizes = call.shape("self")
    dim = call.get("dim")
    # A scalar is indexed as if it had one element.
    size = sizes[dim] if sizes and isinstance(dim, int) else 1
    return {"index": Made("index", size)}


def _of(size: Callable[[NamedArguments], int], *arguments: str, trusts_ops: bool = False) -> Rule:
    """Indices below a size, in some arguments."""

    def rule(call: NamedArguments) -> dict[str, Made]:
        # An empty range would have no index to draw.
        made = Made("index", max(1, size(call)), trusts_ops=trusts_ops)
        return dict.fromkeys(arguments, made)

    return rule


def _same(made: Made, *arguments: str) -> Rule:
    """The same values whatever the call."""
    return lambda call: dict.fromkeys(arguments, made)


def _rows(name: str) -> Callable[[NamedArguments], int]:
    return lambda call: (call.shape(name) or (1,))[0]


def _elements(name: str) -> Callable[[NamedArguments], int]:
    return lambda call: prod(call.shape(name))


def _window(dimensions: int) -> Callable[[NamedArguments], int]:
    """Elements of one channel of an image or a volume."""
    return lambda call: prod(call.shape("self")[-dimensions:])


def _classes(call: NamedArguments) -> int:
    scores = call.shape("self")
    return scores[1] if len(scores) > 1 else (scores or (1,))[0]


def _by_dimension(call: NamedArguments) -> dict[int, Made]:
    """`index` and its relatives take one tensor a dimension."""
    return dict(_index_by_dimension(call))


def _index_by_dimension(call: NamedArguments) -> Iterator[tuple[int, Made]]:
    """Position and values of each index tensor; a mask indexes as many dimensions as it has."""
    sizes = call.shape("self")
    dimension = 0
    for position in call.positions("indices"):
        is_mask = position is not None and call.at(position).dtype in ("bool", "uint8")
        if is_mask:
            yield position, Made("trues", _num_picked(call, dimension))
        elif position is not None and dimension < len(sizes):
            yield position, Made("index", max(1, sizes[dimension]))
        # A mask stands for as many dimensions as it has itself.
        dimension += len(call.at(position).shape) if is_mask else 1


def _num_picked(call: NamedArguments, dimension: int) -> int:
    """Elements that a mask picks: as many as the indices beside it, else what the result has there."""
    beside = [call.at(position) for position in call.positions("indices") if position is not None]
    sizes = [prod(spec.shape) for spec in beside if spec.dtype not in ("bool", "uint8")]
    if sizes:
        return max(sizes)
    picked = call.shape("values") if "values" in call else call.made()[dimension:]
    return picked[0] if picked else 1


def _counted(call: NamedArguments) -> dict[str, Made]:
    """As many elements that are not zero as there are rows of the result."""
    return {"self": Made("trues", (call.made() or (1,))[0])}


def _selected(call: NamedArguments) -> dict[str, Made]:
    """As many true elements as were picked, over all that the mask is expanded to."""
    return {"mask": Made("trues", (call.made() or (1,))[0] // _repeats_of_mask(call))}


def _bags(call: NamedArguments) -> dict[str, Made]:
    kind: Kind = "bounds" if call.get("include_last_offset") else "starts"
    return {
        "indices": Made("index", _rows("weight")(call)),
        "offsets": Made(kind, prod(call.shape("indices"))),
    }


def _bags_backward(call: NamedArguments) -> dict[str, Made]:
    rows = call.get("num_weights")
    rows = rows if isinstance(rows, int) else _rows("weight")(call)
    return {
        "indices": Made("index", rows),
        "offsets": Made("starts", prod(call.shape("indices"))),
        "offset2bag": Made("index", _rows("grad")(call), trusts_ops=True),
        "bag_size": Made("constant", 1, trusts_ops=True),
        "maximum_indices": Made("index", rows, trusts_ops=True),
    }


def _ctc(call: NamedArguments) -> dict[str, Made]:
    steps, _, classes = (*call.shape("log_probs"), 1, 1, 1)[:3]
    blank = call.get("blank")
    # Labels never are the blank, wherever among the classes it stands.
    labels = Made("index", classes, least=1) if blank in (0, None) else Made("index", blank)
    targets = call.shape("targets")
    longest = Made("constant", min(steps, targets[-1] if targets else 0))
    return {
        "targets": labels,
        "input_lengths": Made("constant", steps),
        "target_lengths": longest if len(targets) > 1 else Made("parts", prod(targets)),
    }


def _scattered(call: NamedArguments) -> dict[str, Made]:
    """As many true elements as the source has values for, over all that the mask is expanded to."""
    given = prod(call.shape("source")) // _repeats_of_mask(call)
    return {"mask": Made("trues", min(prod(call.shape("mask")), given))}


def _repeats_of_mask(call: NamedArguments) -> int:
    return max(1, prod(call.shape("self")) // max(1, prod(call.shape("mask"))))


def _repeats(call: NamedArguments) -> dict[str, Made]:
    size = call.get("output_size")
    return {"repeats": Made("parts", size)} if isinstance(size, int) else {}


def _draws(call: NamedArguments) -> dict[str, Made]:
    """Where a probability is given, the tensor beside it only has the shape."""
    return {"p" if "p" in call else "self": Made("odds")}


def _packed_attention(call: NamedArguments) -> dict[str, Made]:
    """Sequences one after the other in the first dimension: where each begins, and the end."""
    return {
        f"{prefix}_{letter}": Made("bounds", _rows(name)(call))
        for prefix in ("cum_seq", "cu_seqlens")
        for letter, name in (("q", "query"), ("k", "key"))
    }


_TARGETS = _of(_classes, "target")
_TABLE: tuple[tuple[str, Rule], ...] = (
    ("gather scatter scatter_add scatter_reduce", _along),
    ("index_select index_add index_copy index_fill index_reduce", _along),
    ("take put", _of(_elements("self"), "index")),
    ("index _unsafe_index index_put _unsafe_index_put _index_put_impl", _by_dimension),
    ("_unsafe_masked_index _unsafe_masked_index_put_accumulate", _by_dimension),
    ("embedding", _of(_rows("weight"), "indices")),
    ("embedding_renorm", _of(_rows("self"), "indices")),
    (
        "embedding_dense_backward embedding_sparse_backward",
        _of(lambda call: int(call.get("num_weights")), "indices"),
    ),
    ("_embedding_bag _embedding_bag_forward_only", _bags),
    ("_embedding_bag_backward _embedding_bag_dense_backward", _bags_backward),
    ("_embedding_bag_per_sample_weights_backward", _bags_backward),
    ("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", _TARGETS),
    ("multi_margin_loss multi_margin_loss_backward", _TARGETS),
    ("multilabel_margin_loss_forward multilabel_margin_loss_backward", _TARGETS),
    ("_ctc_loss _ctc_loss_backward _cudnn_ctc_loss", _ctc),
    ("nonzero argwhere", _counted),
    ("masked_select", _selected),
    ("masked_scatter", _scattered),
    ("repeat_interleave", _repeats),
    (
        "max_pool2d_with_indices_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward",
        _of(_window(2), "indices", trusts_ops=True),
    ),
    (
        "max_pool3d_with_indices_backward adaptive_max_pool3d_backward fractional_max_pool3d_backward",
        _of(_window(3), "indices", trusts_ops=True),
    ),
    (
        "max_unpool2d max_unpool3d",
        _of(lambda call: prod(call.get("output_size")), "indices", trusts_ops=True),
    ),
    ("bernoulli", _draws),
    ("multinomial poisson _standard_gamma _sample_dirichlet", _same(Made("odds"), "self")),
    ("binomial", _same(Made("odds"), "count", "prob")),
    ("normal", _same(Made("odds"), "std")),
    ("binary_cross_entropy binary_cross_entropy_backward", _same(Made("odds"), "self", "target")),
    ("_assert_async", _same(Made("constant", 1), "self")),
    ("_linalg_check_errors", _same(Made("constant", 0), "info")),
    ("linalg_lu_solve", _same(Made("constant", 1, trusts_ops=True), "pivots")),
    ("lu_unpack", _same(Made("constant", 1, trusts_ops=True), "LU_pivots")),
    ("div floor_divide remainder fmod", _same(Made("index", 3, least=1), "other")),
    ("_pack_padded_sequence", lambda call: {"lengths": Made("constant", _longest(call))}),
    ("_flash_attention_forward _flash_attention_backward", _packed_attention),
    ("_efficient_attention_forward _efficient_attention_backward", _packed_attention),
)


def _longest(call: NamedArguments) -> int:
    sizes = (*call.shape("input"), 1, 1)
    return sizes[1] if call.get("batch_first") else sizes[0]


_RULES: dict[str, Rule] = {
    f"aten.{name}": rule for names, rule in _TABLE for name in names.split()
} | dict.fromkeys(
    # The first column of a box is the number of its image, as a float.
    (f"torchvision.{kind}" for kind in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")),
    _same(Made("odds"), "rois"),
)
