"""Results of a compiled program that are several tensors in the code, and stay several.

Torch's compiler removes operators that change no value: `y.clone()` twice becomes one tensor, and who writes
into one of the two writes into the other; `y.detach()` twice becomes one object under two names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Compiled = Callable[..., Sequence[Any]]


def memory_of_results(graph: fx.GraphModule) -> list[int | None]:
    """For each result of a graph that was read from code, a number for the memory in which it lies there.

    Results that share memory have the same; None of what is no dense tensor.
    """
    (end,) = graph.graph.find_nodes(op="output")
    found = end.args[0] if isinstance(end.args[0], (tuple, list)) else ()
    values = [one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in found]
    return [*map(memory_number, values)]


def kept_distinct(compiled: Compiled, memory: Sequence[int | None]) -> Compiled:
    """A compiled graph whose results are as many tensors, in as many places, as those of the code.

    What the compiler made one shows in the first call: a program always does the same. Of a copy that
    has to be made, views become copies, too.

    Args:
        compiled: The graph, compiled.
        memory: See `memory_of_results`; read before compiling, which changes the graph.

    Cost: For graphs of several results 0.1 us a call, and what was lost: a copy, or another view.
    """
    # One result has no other to be mixed up with, and needs no look in each call.
    if sum(one is not None for one in memory) < 2:
        return compiled
    mended: dict[int, Callable[[Tensor], Tensor]] | None = None

    def run(*args: Any) -> Sequence[Any]:
        nonlocal mended
        results = compiled(*args)
        if mended is None:
            mended = _lost(results, memory)
        if not mended:
            return results
        results = list(results)
        for index, mend in mended.items():
            results[index] = mend(results[index])
        return results

    return run


def _lost(
    results: Sequence[Any], memory: Sequence[int | None]
) -> dict[int, Callable[[Tensor], Tensor]]:
    """Numbers of results that an earlier one stands for, and how to make them what they are in the code."""
    owners: dict[int, int] = {}
    seen: set[int] = set()
    found: dict[int, Callable[[Tensor], Tensor]] = {}
    for index, (result, place) in enumerate(zip(results, memory, strict=True)):
        now = memory_number(result)
        if place is None or now is None:
            continue
        # Two places in the code, one in the program: whoever writes into one must not reach the other.
        if owners.setdefault(now, place) != place:
            found[index] = Tensor.clone
        elif id(result) in seen:
            found[index] = _another
        seen.add(id(result))
    return found


def _another(tensor: Tensor) -> Tensor:
    """Another tensor in the same memory."""
    # `detach` is the cheaper one, but would cut a gradient.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()


def memory_number(value: Any) -> int | None:
    """A number for the memory of a dense tensor, also of one without data."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata  # noqa: SLF001 - nothing public distinguishes storages
