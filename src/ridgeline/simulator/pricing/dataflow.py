"""Which operator's result each input of an operator is, as far as a workload shows.

A workload has edges between operators, and the shapes of their inputs and outputs, but not which output
an input is. That is found by size and role: an edge that orders (written after it was read) finds nothing.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, TensorSpec, Workload

Source = tuple[int, int]
"""An output: (operator, number of its output)."""


class DataFlow(NamedTuple):
    """Edges of a step without its views, which move nothing.

    `waits[i]` are the operators that `i` comes after, `sources[i]` for each of its inputs the output that
    it is (None: it was there before the step, or is unknown), `users` the operators that take an output.
    """

    waits: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[Source | None, ...], ...]
    users: dict[Source, tuple[int, ...]]


@kept_by_identity(16)
def data_flow(workload: Workload) -> DataFlow:
    """The data flow of a workload; found once and kept."""
    ops = workload.ops
    waits: list[tuple[int, ...]] = []
    sources: list[tuple[Source | None, ...]] = []
    users: dict[Source, list[int]] = {}
    for index, op in enumerate(ops):
        before: set[int] = set()
        # A factory reads only shape and dtype of its input, so no value keeps it waiting.
        for other in () if is_factory(op) else op.dependencies:
            # A view stands for what it looks at.
            before.update(waits[other] if ops[other].family == "view" else (other,))
        waits.append(tuple(sorted(before)))
        taken = () if op.family == "view" else _matched(ops, index, waits[index])
        sources.append(taken)
        for source in dict.fromkeys(s for s in taken if s is not None):
            users.setdefault(source, []).append(index)
    return DataFlow(
        tuple(waits), tuple(sources), {source: tuple(who) for source, who in users.items()}
    )


def _matched(ops: Sequence[Op], index: int, before: Sequence[int]) -> tuple[Source | None, ...]:
    """For each input the output that it is: same role and bytes first, then a part of one (a slice)."""
    inputs = ops[index].inputs
    sizes = [spec_bytes(spec) for spec in inputs]
    found: list[Source | None] = [None] * len(inputs)
    # Those with one output first: what has several is more likely to have given a smaller one.
    makers = sorted(before, key=lambda maker: (len(ops[maker].outputs), -maker))
    for maker in makers:
        outputs = [(n, o, spec_bytes(o)) for n, o in enumerate(ops[maker].outputs)]
        is_found = False
        # Equal size first: a part of an output is a guess, and must not take a certain place.
        for number, output, size in outputs:
            for at, spec in enumerate(inputs):
                if found[at] is None and spec.role == output.role and sizes[at] == size:
                    found[at] = (maker, number)
                    is_found = True
                    break
        if is_found:
            continue
        for number, output, size in outputs:
            for at, spec in enumerate(inputs):
                is_part = spec.role == output.role and sizes[at] < size
                if found[at] is None and is_part:
                    found[at] = (maker, number)
    return tuple(found)


def operator_name(op: Op) -> str:
    """The name of an operator without library and overload: `index_put_` of `aten.index_put_.default`."""
    words = op.name.split(".")
    return words[1] if len(words) > 1 else ""


def is_factory(op: Op) -> bool:
    """Whether an operator takes shape and dtype of its input but none of its values: `zeros_like`."""
    name = operator_name(op)
    return name.endswith("_like") or name.startswith("new_")


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor: a dimension of stride 0 counts once."""
    return spec_elements(spec) * element_bytes(spec.dtype)


def spec_elements(spec: TensorSpec) -> int:
    """Distinct elements of a tensor; sparse ones, which have no strides, count as dense."""
    if not spec.stride:
        return prod(spec.shape)
    return prod(size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride)


def element_bytes(dtype: str) -> int:
    """Bytes of an element by the number in its dtype's name (`float32`: 4); 1 without one (`bool`)."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
