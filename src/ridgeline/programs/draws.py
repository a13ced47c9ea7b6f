"""Random numbers that torch's compiler would draw otherwise, or not at all.

Dropout of everything (`p=1.0`, the end of some schedules) draws nothing as it is written. Torch's compiler
(2.11 to 2.13) makes one operator of all dropout, which draws a mask on a CPU whatever the share is: random
numbers that follow would be others than those of the step as written.

On random permutations that index, as in mixup (`x[torch.randperm(n)]`), it (2.11, 2.13) fails: it looks for
them by a pattern of its own, and raises "Not all inputs to pattern found" where the permutation is not cut to
a part. Drawn in 32 bits and widened, they are the same permutations in another form.

Two draws that look alike are two. Where it computes gradients it (2.11 to 2.13) makes one operator of
several with the same arguments, but for those of a list, which lacks `randn_like`, `uniform_` and others:
noise for two views of a batch would be the same noise.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch import compile_utils
from torch._ops import OpOverloadPacket
from torch.nn import functional

_DROPOUT_NAMES = ("input", "p", "training", "inplace")
"""Arguments of `functional.dropout` that may be given by position."""
_DRAWS = (torch.randperm, torch.ops.aten.randperm.default)
_WIDEN = torch.ops.aten._to_copy.default  # noqa: SLF001 - an operator
_PLAIN_KEYWORDS = {"dtype", "device", "layout", "pin_memory", "requires_grad"}
_LARGEST = torch.iinfo(torch.int32).max


class _Draws:
    """Stands for the compiler's list of operators that draw; each of them says itself whether it does."""

    def __init__(self, listed: Collection[Any]) -> None:
        self._listed = listed

    def __contains__(self, operator: object) -> bool:
        if not isinstance(operator, OpOverloadPacket):
            return operator in self._listed
        tags = (getattr(operator, name).tags for name in operator.overloads())
        return operator in self._listed or any(torch.Tag.nondeterministic_seeded in t for t in tags)


@contextlib.contextmanager
def kept_apart() -> Iterator[None]:
    """Inside, the compiler never makes one of two draws.

    Source: torch/_functorch/compile_utils.py, `fx_graph_cse`.
    """
    with mock.patch.object(compile_utils, "rand_ops", _Draws(compile_utils.rand_ops)):
        yield


def drop_all_without_draws(module: fx.GraphModule) -> None:
    """Change a graph that TorchDynamo made so that dropout of everything is a product with zero.

    Source: torch/aten/src/ATen/native/Dropout.cpp, `_dropout_impl`.
    """
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=functional.dropout):
        given = {**dict(zip(_DROPOUT_NAMES, node.args, strict=False)), **node.kwargs}
        if given.get("p") == 1.0 and given.get("training", True) is True:
            node.target = torch.Tensor.mul_ if given.get("inplace") else torch.mul
            node.args = (given["input"], 0.0)
            node.kwargs = dict[str, Any]()
            changed = True
    if changed:
        module.recompile()


def narrow_permutations(module: fx.GraphModule) -> None:
    """Change a graph so that it draws its permutations in 32 bits and widens them; the results stay.

    Source: torch/aten/src/ATen/native/TensorFactories.cpp and cuda/Randperm.cu: the numbers that are drawn
    follow from the length alone, whatever the type of the permutation.
    """
    found = [node for node in module.graph.nodes if node.target in _DRAWS and _is_wide(node)]
    for node in found:
        with module.graph.inserting_after(node):
            wide = module.graph.call_function(_WIDEN, (node,), {"dtype": torch.int64})
        # Users were traced with 64 bits, so the widened values have what the draw had.
        wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide)
        wide.args = (node,)  # it is one of those whose uses were replaced
        node.kwargs = {**node.kwargs, "dtype": torch.int32}
        node.meta = {
            key: value.to(torch.int32) if isinstance(value, Tensor) else value
            for key, value in node.meta.items()
        }
    if found:
        module.recompile()


def _is_wide(node: fx.Node) -> bool:
    """Whether it draws from torch's own generator, in 64 bits, what 32 bits can hold."""
    length = node.args[0] if node.args else None
    is_long = node.kwargs.get("dtype") in (None, torch.int64)
    is_short = isinstance(length, fx.Node) or (isinstance(length, int) and length <= _LARGEST)
    return is_long and is_short and len(node.args) == 1 and {*node.kwargs} <= _PLAIN_KEYWORDS
