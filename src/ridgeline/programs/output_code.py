"""Reads the Python modules that torch's compiler writes: which kernels they call, on tensors of which size.

A module has its loops as texts, `call()` with the calls in order, and `get_args()` with an example of every
input. It is parsed and never run. Whatever it says in a way that is not known here makes it unreadable.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from ridgeline.compiled_program import CompilerKernel, CompilerProgram, Shape
from ridgeline.programs.loop_traffic import (
    Argument,
    LoopTraffic,
    cpp_arguments,
    cpp_traffic,
    triton_arguments,
    triton_traffic,
)
from ridgeline.programs.output_sizes import Sizes

HEAD = re.compile(r"# AOT ID: \['\d+_(\w+)'\]")
"""First line of a module with a program; other modules hold single kernels."""
UNREADABLE = (ValueError, SyntaxError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a module raises that is written in another way than those known here."""

_EXAMPLES = "get_args"
_ITEM_BYTES = re.compile(r"(\d+)")
_LIBRARIES = ("extern_kernels.", "torch.ops.", "aten.")
_SILENT = ("ridgeline.join", "ridgeline.announce")
_HANDED = "ridgeline.hand_out"
_GRADIENTS = ("convolution_backward", "conv_weight_gradient")


class _Tensor(NamedTuple):
    shape: Shape
    stride: Shape
    dtype: str

    @property
    def elements(self) -> int:
        """Distinct elements: a dimension of stride 0 counts once."""
        if len(self.stride) != len(self.shape):
            return prod(self.shape)
        return prod(n for n, step in zip(self.shape, self.stride, strict=True) if step)

    @property
    def item_bytes(self) -> int:
        bits = _ITEM_BYTES.search(self.dtype)
        return max(1, int(bits.group()) // 8) if bits else 1

    @property
    def num_bytes(self) -> int:
        return self.elements * self.item_bytes


class _Loop(NamedTuple):
    language: str
    source: str
    arguments: tuple[Argument, ...]


def read_program(source: str) -> CompilerProgram:
    """The program that a module of the compiler holds.

    Raises:
        ValueError: the module holds none, or calls a loop on what it does not describe.
        SyntaxError, TypeError, LookupError, AttributeError, RecursionError: it is written in another way than
            is known here; see `UNREADABLE`.

    Source: modules of torch 2.11 and 2.13 (torch/_inductor/codegen/wrapper.py).
    """
    head = HEAD.match(source)
    if head is None:
        raise ValueError("wanted a module that names its graph in the first line, got none")
    reader = _Reader(source)
    different = list(dict.fromkeys(reader.calls))
    place = {kernel: index for index, kernel in enumerate(different)}
    return CompilerProgram(
        phase="backward" if head.group(1) == "backward" else "forward",
        kernels=tuple(different),
        order=tuple(place[kernel] for kernel in reader.calls),
        inputs=tuple(reader.inputs),
    )


class _Reader:
    """Walks a module in the order in which it is written."""

    def __init__(self, source: str) -> None:
        self.calls: list[CompilerKernel] = []
        self._lines = source.splitlines()
        self._known: dict[str, _Tensor] = {}
        self._sizes = Sizes()
        module = ast.parse(source)
        self._loops = dict(_loops(module))
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            # First, wherever it stands: sizes of inputs are said there alone.
            if function.name == _EXAMPLES:
                self._run(function.body)
        self.inputs = [tensor.shape for tensor in self._known.values()]
        for function in functions:
            if function.name == "call" or function.name.startswith("partition_"):
                self._run(function.body)

    def _run(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.With):
                self._run(statement.body)
            elif isinstance(statement, ast.Expr):
                self._value(statement.value)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name, tensor = statement.targets[0].id, self._value(statement.value)
                if tensor is not None:
                    self._known[name] = tensor
                    self._sizes.shapes[name] = tensor.shape
                else:
                    self._sizes.note(name, statement.value)

    def _value(self, node: ast.expr) -> _Tensor | None:
        """The tensor that an expression stands for, if any; the calls in it are noted."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Subscript):
            return self._value(node.value)
        if not isinstance(node, ast.Call):
            return None
        name = _dotted(node.func)
        loop = self._loops.get(name.removesuffix(".run"))
        if loop is not None:
            self._call_loop(name.removesuffix(".run"), loop, node)
            return None
        if name.startswith(_LIBRARIES):
            return self._call_library(_operator(name), node)
        return self._tensor(name.rpartition(".")[2], node)

    def _tensor(self, name: str, node: ast.Call) -> _Tensor | None:
        """What makes, views or describes a tensor."""
        if name.startswith("empty_strided") or name == "rand_strided":
            words = [_dotted(value) for value in (*node.args[2:], *_named(node, "dtype"))]
            (dtype,) = (word for word in words if word.startswith("torch."))
            shape, stride = map(self._sizes.shape, node.args[:2])
            return _Tensor(shape, stride, dtype.removeprefix("torch."))
        if name in ("reinterpret_tensor", "assert_size_stride"):
            before = self._value(node.args[0])
            dtype = before.dtype if before is not None else ""
            if name == "assert_size_stride" and not all(map(self._sizes.is_known, node.args[1:3])):
                return before  # it says no more than is known
            shape, stride = map(self._sizes.shape, node.args[1:3])
            tensor = _Tensor(shape, stride, dtype)
            # It says what a library's operator really gave, of which only a guess was known.
            if name == "assert_size_stride" and isinstance(node.args[0], ast.Name):
                self._known[node.args[0].id] = tensor
                self._sizes.shapes[node.args[0].id] = tensor.shape
            return tensor
        if name == "view" and isinstance(node.func, ast.Attribute):
            before = self._value(node.func.value)
            if before is None or not all(map(self._sizes.is_known, node.args)):
                return before  # of as many elements, or as another type
            return _Tensor(tuple(map(self._sizes.number, node.args)), (), before.dtype)
        if name == "sum" and isinstance(node.func, ast.Attribute):
            # Partial sums of a loop's workspace are added by an operator of eager torch.
            before = self._value(node.func.value)
            if before is not None:
                self._note("sum", node, [before], _Tensor(before.shape[1:], (), before.dtype))
                return _Tensor(before.shape[1:], (), before.dtype)
        return None

    def _call_loop(self, name: str, loop: _Loop, node: ast.Call) -> None:
        tensors = [self._value(value) for value in node.args]
        taken = [tensor for tensor in tensors if tensor is not None]
        arguments = loop.arguments or tuple(Argument("in_ptr", None) for _ in taken)
        if len(taken) < len(arguments):
            raise ValueError(
                f"wanted the tensors that {name} takes, got {len(taken)} of {len(arguments)}"
            )
        taken = taken[: len(arguments)]
        names, sizes = [a.name for a in arguments], [tensor.elements for tensor in taken]
        read_loop = cpp_traffic if loop.language.startswith("cpp") else triton_traffic
        moved: list[LoopTraffic] = read_loop(loop.source, names, sizes)
        widths = [
            argument.item_bytes or tensor.item_bytes
            for argument, tensor in zip(arguments, taken, strict=True)
        ]
        self.calls.append(
            CompilerKernel(
                name=name,
                is_library=False,
                operators=self._operators(node.lineno),
                bytes_read=sum(m.read * width for m, width in zip(moved, widths, strict=True)),
                bytes_written=sum(
                    m.written * width for m, width in zip(moved, widths, strict=True)
                ),
            )
        )

    def _call_library(self, name: str, node: ast.Call) -> _Tensor | None:
        """An operator of a library; its result is taken to be like its first tensor until more is said."""
        if name in _SILENT:
            return None
        outputs = [self._value(value) for value in _named(node, "out")]
        inputs = [
            tensor
            for value in (*node.args, *(k.value for k in node.keywords if k.arg != "out"))
            for tensor in self._tensors(value)
        ]
        result = outputs[0] if outputs else (inputs[0] if inputs else None)
        if name == _HANDED:  # each in another dtype; what is said of them later distinguishes them
            dtype = next(word for word in map(_dotted, node.args) if word.startswith("torch."))
            sizes = (sum(tensor.elements for tensor in inputs),)
            result = _Tensor(sizes, (1,), dtype.removeprefix("torch."))
        self._note(name.rpartition(".")[2], node, inputs, result)
        return result

    def _note(
        self, name: str, node: ast.Call, inputs: list[_Tensor], result: _Tensor | None
    ) -> None:
        self.calls.append(
            CompilerKernel(
                name=name,
                is_library=True,
                operators=self._operators(node.lineno),
                bytes_read=sum(tensor.num_bytes for tensor in inputs),
                bytes_written=result.num_bytes if result is not None else 0,
                shapes=tuple(tensor.shape for tensor in inputs),
                dtype=inputs[0].dtype if inputs else "",
                parts=_parts(node) if name == _GRADIENTS[0] else 1,
            )
        )

    def _tensors(self, node: ast.expr) -> Iterator[_Tensor]:
        if isinstance(node, ast.List | ast.Tuple):
            for element in node.elts:
                yield from self._tensors(element)
            return
        tensor = self._value(node)
        if tensor is not None:
            yield tensor

    def _operators(self, line: int) -> tuple[str, ...]:
        """The ATen operators that a call came from, as a comment says that is at most three lines above."""
        for text in reversed(self._lines[max(0, line - 4) : line - 1]):
            match = re.search(r"Original ATen: \[(.*?)\]", text)
            if match:
                return tuple(match.group(1).split(", "))
        return ()


def _loops(module: ast.Module) -> Iterator[tuple[str, _Loop]]:
    for node in module.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        language = _dotted(node.value.func).removeprefix("async_compile.")
        if language not in ("triton", "cpp_pybinding") or not isinstance(node.targets[0], ast.Name):
            continue
        source = str(ast.literal_eval(node.value.args[1]))
        of = cpp_arguments if language == "cpp_pybinding" else triton_arguments
        yield node.targets[0].id, _Loop(language, source, tuple(of(source)))


def _operator(name: str) -> str:
    """`mm` of `extern_kernels.mm`, `bmm` of `torch.ops.aten.bmm.default`, `mkl.x` of other libraries' own."""
    words = name.removeprefix("torch.ops.").removeprefix("extern_kernels.").split(".")
    if words[0] == "aten":
        return words[1]
    return ".".join(words[:2])


def _parts(node: ast.Call) -> int:
    """Gradients that a convolution's backward computes of those by its image and its weight."""
    mask = node.args[-1]
    if not isinstance(mask, ast.List):
        return 1
    return sum(bool(ast.literal_eval(value)) for value in mask.elts[:2])


def _named(node: ast.Call, name: str) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords if keyword.arg == name]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
