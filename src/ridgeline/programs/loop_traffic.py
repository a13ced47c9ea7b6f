"""What a loop of torch's compiler reads and writes of the tensors that it is called with, from its source.

Only what is needed of both languages is understood: of Triton the sizes, index variables, loads and stores,
of C++ which tensors are read and written. What a loop does not say is taken to be the whole tensor.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import NamedTuple

ROW_BYTES = 16 << 10
"""Size of a reduced row up to which a second pass over it finds it on the chip.

Source: assumed; about a thousand rows are in flight on a GPU, and its second-level cache holds 50 MB.
"""

_SIZE = re.compile(r"^ *([xyz]|r\d_)numel *(?::[^=]*)?= *(\d+)$", re.MULTILINE)
_INDEX = re.compile(r"^ *([xyz]\d+|r\d_\d+) = (.*\b([xyz]|r\d_)index\b.*)$", re.MULTILINE)
_ACCESS = re.compile(r"tl\.(load|store|atomic_\w+)\((\w*ptr\w*) \+ ")
_NAME = re.compile(r"\b(?:[xyz]\d+|r\d_\d+|tmp\d+)\b")
_TRITON_ITEM = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "fp16": 2, "bf16": 2, "i32": 4, "fp32": 4}


class LoopTraffic(NamedTuple):
    """Elements of a tensor that a loop reads and writes."""

    read: int
    written: int


class Argument(NamedTuple):
    """A tensor that a loop takes: its name there, and the bytes of an element where the loop says them."""

    name: str
    item_bytes: int | None


class _Access(NamedTuple):
    place: int
    """Number of the block of lines with one indentation: loops part them."""
    is_load: bool
    is_atomic: bool
    pointer: str
    expression: str


def triton_arguments(source: str) -> list[Argument]:
    """The tensors that a Triton kernel takes, in the order of its arguments."""
    match = re.search(r"^def \w+\((.*?)\):", source, re.MULTILINE | re.DOTALL)
    names = [word.split(":")[0].strip() for word in match.group(1).split(",")] if match else []
    types = dict(re.findall(r"'(\w+)': '\*(\w+)'", source))
    return [
        Argument(name, _TRITON_ITEM.get(types[name], 8) if name in types else None)
        for name in names
        if "ptr" in name
    ]


def triton_traffic(source: str, names: Sequence[str], sizes: Sequence[int]) -> list[LoopTraffic]:
    """What a Triton kernel moves of each tensor.

    Source: an access moves as many elements as the index variables in it have values together, at most all
        of the tensor; one whose place was loaded before (a gather) as many as there are iterations. What adds
        atomically goes through memory for each of them.
    """
    counts = {prefix: int(value) for prefix, value in _SIZE.findall(source)}
    accesses = list(_accesses(source))
    # Combined kernels have several loops with sizes of their own, which one set of counts does not describe.
    if "combo_grid_meta" in source or not accesses or not counts:
        return [_whole(name, size) for name, size in zip(names, sizes, strict=True)]
    ranges = dict(_ranges(source, counts))
    row = prod(count for prefix, count in counts.items() if prefix.startswith("r"))
    found = []
    for name, size in zip(names, sizes, strict=True):
        mine = [access for access in accesses if access.pointer == name]
        read = _elements([a for a in mine if a.is_load], ranges, prod(counts.values()), size)
        written = _elements([a for a in mine if not a.is_load], ranges, prod(counts.values()), size)
        # A row of single precision that stays on the chip is read from memory once, whatever the passes.
        again = sum(read) if 4 * row > ROW_BYTES else max(read, default=0)
        found.append(LoopTraffic(again, sum(written)))
    return found


def cpp_traffic(source: str, names: Sequence[str], sizes: Sequence[int]) -> list[LoopTraffic]:
    """What a C++ kernel moves of each tensor: all that it reads, all that it writes; see `triton_traffic`."""
    found = []
    for name, size in zip(names, sizes, strict=True):
        # C++ kernels take what they only read as constant; what they write may be read as well.
        is_constant = re.search(rf"const \w+\* {name}\b", source) is not None
        is_read = is_constant or re.search(rf"= [^;]*\b{name}\b", source) is not None
        found.append(LoopTraffic(size if is_read else 0, 0 if is_constant else size))
    return found


def cpp_arguments(source: str) -> list[Argument]:
    """The tensors that a C++ kernel takes, in the order of its arguments."""
    match = re.search(r"\bkernel\((.*?)\)\s*\{", source, re.DOTALL)
    words = match.group(1).split(",") if match else []
    return [Argument(word.split("*")[1].strip(), None) for word in words if "*" in word]


def _whole(name: str, size: int) -> LoopTraffic:
    if name.startswith("in_out"):
        return LoopTraffic(size, size)
    return LoopTraffic(0, size) if name.startswith("out") else LoopTraffic(size, 0)


def _accesses(source: str) -> Iterator[_Access]:
    place, depth = 0, None
    for line in source.splitlines():
        indent = len(line) - len(line.lstrip())
        # The end of a loop is told by the indentation alone, as Triton is Python.
        if depth is not None and line.strip() and indent <= depth:
            place, depth = place + 1, None
        if line.lstrip().startswith("for "):
            place, depth = place + 1, indent
        for match in _ACCESS.finditer(line):
            kind, pointer = match.groups()
            expression = _argument(line, match.end())
            yield _Access(place, kind == "load", kind.startswith("atomic"), pointer, expression)


def _argument(line: str, begin: int) -> str:
    """The text up to what ends an argument of a call."""
    depth = 0
    for position in range(begin, len(line)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(line[position], 0)
        if depth < 0 or (not depth and line[position] == ","):
            return line[begin:position]
    return line[begin:]


def _ranges(source: str, counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    """How many values each index variable has: `x1 = ((xindex // 64) % 32)` has 32."""
    for name, expression, prefix in _INDEX.findall(source):
        count = counts.get(prefix, 1)
        divisor = re.search(r"// (\d+)", expression)
        modulus = re.search(r"% (\d+)\)?$", expression)
        count = -(-count // int(divisor.group(1))) if divisor else count
        yield name, min(count, int(modulus.group(1))) if modulus else count


def _elements(
    accesses: Collection[_Access], ranges: dict[str, int], iterations: int, size: int
) -> list[int]:
    """Elements that are moved in each place with such accesses; the same access moves them once."""
    places: dict[int, dict[str, int]] = {}
    for access in accesses:
        names = set(_NAME.findall(access.expression))
        is_indirect = "index" in access.expression or any(n.startswith("tmp") for n in names)
        count = prod(ranges.get(name, 1) for name in names)
        places.setdefault(access.place, {})[access.expression] = (
            iterations if is_indirect else min(count, iterations)
        )
    most = iterations if any(access.is_atomic for access in accesses) else size
    return [min(most, sum(counts.values())) for counts in places.values()]
