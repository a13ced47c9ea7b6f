"""Random permutations that index, as in mixup: torch's compiler (2.11, 2.13) fails on `x[torch.randperm(n)]`.

It looks for them by a pattern of its own, and raises "Not all inputs to pattern found" where the permutation
is not cut to a part. Drawn in 32 bits and widened, they are the same permutations in another form.
"""

import torch
from torch import Tensor, fx

_DRAWS = (torch.randperm, torch.ops.aten.randperm.default)
_WIDEN = torch.ops.aten._to_copy.default  # noqa: SLF001 - an operator
_PLAIN = {"dtype", "device", "layout", "pin_memory", "requires_grad"}
_LARGEST = torch.iinfo(torch.int32).max


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
    return is_long and is_short and len(node.args) == 1 and {*node.kwargs} <= _PLAIN
