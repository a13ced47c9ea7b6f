"""Programs of the compiler run operator by operator: what it takes in is as always, only no code is made.

Captures, guards, re-captures and checks are what they are with the compiler, at a hundredth of its time: a
compiled program differs from an interpreted one in rounding, not in what it was told is constant.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import config as autograd_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.output_code import OutputCode
from torch.fx import GraphModule

from ridgeline.packages import aot, package
from ridgeline.programs.inductor import by_operators

_packages: dict[Path, GraphModule] = {}


class Interpreted(OutputCode):
    """What the compiler returns for a graph: here the graph itself."""

    _boxed_call = True

    def __init__(self, graph: GraphModule, example: Sequence[Any]) -> None:
        super().__init__()
        self.current_callable = self._run
        self._forward = by_operators(graph)
        self._example = example

    def __call__(self, *inputs: Any) -> Any:
        is_boxed = len(inputs) == 1 and isinstance(inputs[0], list)
        return self._run(inputs[0] if is_boxed else list(inputs))

    def post_compile(self, *_: Any) -> None:
        """Nothing is put around it."""

    def set_triton_bundle(self, _bundle: Any) -> None:
        """There is none."""

    def _run(self, inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()  # the compiler's programs empty the list, so that inputs can be freed
        return list(self._forward(*map(_as_written, given)))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """No code is generated inside, in this process, for compiled functions, steps and packages."""
    # One thread: the compiler's pool of processes would outlive us, and there is nothing for it to do.
    settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
    with (
        inductor_config.patch(settings),
        autograd_config.patch(enable_autograd_cache=False),
        mock.patch.object(compile_fx, "fx_codegen_and_compile", _codegen),
        mock.patch.object(aot, "aoti_compile_and_package", _compile_package),
        mock.patch.object(package, "aoti_load_package", _load_package),
        # There is no file that a child could load to see whether it survives.
        mock.patch.object(package, "_survived", [Path()]),
    ):
        yield
    _packages.clear()


def _codegen(graph: GraphModule, example: Sequence[Any], *_: Any, **_more: Any) -> Interpreted:
    return Interpreted(graph, example)


def _compile_package(exported: Any, *, package_path: str, **_: Any) -> str:
    # As it was exported. Its operators in smaller ones would take torch four tenths of all that these programs take,
    # since it looks at all of its operators each time.
    _packages[Path(package_path)] = exported.module(check_guards=False)
    return package_path


def _load_package(path: str, **_: Any) -> Any:
    graph = _packages[Path(path)]

    def run(inputs: Sequence[Tensor]) -> list[Any]:
        with torch.no_grad():
            return list(
                graph.forward(*map(_as_written, inputs))
            )  # hooks of all modules are none of its

    return types.SimpleNamespace(loader=types.SimpleNamespace(run=run))


def _as_written(value: Any) -> Any:
    """A tensor of the elements in memory, whatever is noted of their sign or conjugation: code reads those."""
    if not isinstance(value, Tensor):
        return value
    value = torch._neg_view(value) if value.is_neg() else value
    return torch._conj(value) if value.is_conj() else value
