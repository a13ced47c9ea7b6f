"""CUDA graphs on a CPU: what runs inside of a capture is recorded, undone, and run again by each replay.

For what surrounds graphs: guards, checks, undoing, and what a captured program bakes in. Streams do nothing.
As on a GPU a capture executes nothing, and a replay writes into the memory of the capture; into all of it, and
into that of later captures of the same pool, where it may lie in what the earlier one has given back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# These name parts of what is another in an emulation, and would keep those if they were first imported in one.
import ridgeline.callables.calls.search
import ridgeline.runtime.steps.graphs.graph  # noqa: F401
from ridgeline.callables.calls import graph as call_graphs
from ridgeline.capture import mask_looks
from ridgeline.capture.capturing import told_of_capture
from ridgeline.execution import MODES, Mode
from ridgeline.lint import lint
from ridgeline.model_graphs import inspection
from ridgeline.optimizers.shared_memory import sharing
from ridgeline.reach.sparse import parts

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Operators for which a host waits, which no capture can hold."""
_GARBAGE = 255
"""In each byte: no number in any floating-point type, and one less than none in integers."""


class Graph:
    """What `torch.cuda.CUDAGraph` is, as far as the package uses it."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.memory: list[torch.UntypedStorage] = []
        self._pool: list[Graph] = [self]
        self._is_reset = False

    def replay(self) -> None:
        """Run all recorded operators on the tensors of the capture."""
        assert not self._is_reset, "a graph that was given up is replayed"
        for graph in self._pool[self._pool.index(self) :]:
            for memory in graph.memory:
                memory.fill_(_GARBAGE)
        with torch.no_grad():
            for op, args, kwargs, results in self.calls:
                found = [
                    t for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)
                ]
                for target, value in zip(results, found, strict=True):
                    for mine, part in zip(parts(target), parts(value), strict=True):
                        if mine.data_ptr() != part.data_ptr() or mine.stride() != part.stride():
                            mine.copy_(part)

    def reset(self) -> None:
        """Give up what was recorded."""
        self.calls.clear()
        self.memory.clear()
        self._is_reset = True

    def pool(self) -> list[Graph]:
        """The graphs that share memory, in the order of their captures."""
        return self._pool

    def begin(self, pool: list[Graph] | None) -> None:
        """It is captured, in memory of its own or in a pool."""
        if pool is not None:
            pool.append(self)
            self._pool = pool

    def instantiate(self) -> None:
        """Nothing to do."""


class _Recording(TorchDispatchMode):
    """Operators of a capture; what they write outside of it is put back at its end."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._own: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._held: list[Tensor] = []  # its memory is nobody else's

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled programs run as such, and their operators are recorded; else torch runs the code as written."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            for part in parts(tensor):
                self._save(part)
        result = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        arguments = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = {_storage(part) for tensor in arguments for part in parts(tensor)}
        made = {_storage(p): p.untyped_storage() for tensor in results for p in parts(tensor)}
        self._own |= {key: memory for key, memory in made.items() if key not in given}
        self._held += results
        fresh = [tensor.detach() for tensor in results]
        plain = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self._graph.calls.append((func, *plain, fresh))
        return result

    def end(self) -> None:
        """Nothing was executed, as far as anybody can see."""
        for tensor, saved in self._saved.values():
            tensor.copy_(saved)
        self._graph.memory = [*self._own.values()]

    def _save(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._own and key not in self._saved:
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._saved[key] = flat, flat.clone()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes; those of batch norm do not say so of running statistics."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        is_said = argument.alias_info is not None and argument.alias_info.is_write
        if is_said or argument.name in ("running_mean", "running_var"):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


@contextlib.contextmanager
def _capture(graph: Graph, pool: list[Graph] | None = None, **_: Any) -> Iterator[None]:
    graph.begin(pool)
    recording = _Recording(graph)
    random = torch.get_rng_state()
    try:
        with recording, told_of_capture():
            yield
    finally:
        with torch.no_grad():
            recording.end()
        torch.set_rng_state(random)


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _other: Stream) -> None:
        """It has."""


class Event:
    """A moment on the host."""

    def __init__(self, **_: Any) -> None:
        self._moment = 0.0

    def record(self, _stream: Any = None) -> None:
        self._moment = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, later: Self) -> float:
        """Milliseconds."""
        return max(0.0, (later._moment - self._moment) * 1e3)


def _is_captured(_mask: Any) -> bool:
    return torch.cuda.is_current_stream_capturing()


def _as_if_capturing(
    as_on_a_gpu: Any, _kind: str, seen: Any
) -> contextlib.AbstractContextManager[None]:
    told: contextlib.AbstractContextManager[None] = as_on_a_gpu("cuda", seen)
    return told


def _offered(_purpose: str, _device: str) -> tuple[str, ...]:
    return tuple(MODES)


def _checks_values_on(mode: Mode, _device: str) -> bool:
    """As on a GPU, of which the device of an emulation, a CPU, knows nothing."""
    return not (mode.is_compiled or mode.is_captured)


def _form_on_a_gpu(
    parameters: list[torch.Tensor], differentiable: bool, **_more: Any
) -> tuple[bool, bool]:
    """Whether an optimizer of whose form nothing was said is fused, and whether it takes many tensors at once.

    A GPU does so with those that share memory, too, and has no certain result: here that is the one of updates
    one after another.
    """
    return False, not differentiable and sharing(parameters) is None


def _device_types(*_: Any, **__: Any) -> list[str]:
    return ["cpu"]


_FORMS = {
    "_default_to_fused_or_foreach": _form_on_a_gpu,
    "_get_capturable_supported_devices": _device_types,
}
"""What torch's optimizers ask to learn which forms a device has."""


@contextlib.contextmanager
def emulated_graphs() -> Iterator[None]:
    """Every mode is offered on the CPU inside, and graphs are emulated."""
    fakes: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": _capture,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: Stream(),
        "set_stream": lambda _: None,
        "synchronize": lambda *_: None,
        "memory_reserved": lambda *_: 0,
        "current_device": lambda: 0,
        "graph_pool_handle": list,
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        optimizers = [m for name, m in sys.modules.items() if name.startswith("torch.optim.")]
        for optimizer, (name, fake) in itertools.product(optimizers, _FORMS.items()):
            if name in vars(optimizer):
                stack.enter_context(mock.patch.object(optimizer, name, fake))
        stack.enter_context(mock.patch("ridgeline.execution.offered", _offered))
        stack.enter_context(mock.patch.object(Mode, "checks_values_on", _checks_values_on))
        stack.enter_context(mock.patch.object(call_graphs, "_stream_of", return_value=0))
        for watching in (lint, inspection):  # what they watch goes the way of a capture on a GPU
            told = functools.partial(_as_if_capturing, watching.as_if_capturing)
            stack.enter_context(mock.patch.object(watching, "as_if_capturing", told))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", bool))
        # A child has no emulation, and would refuse the plan.
        stack.enter_context(mock.patch("ridgeline.lint.child_trial.is_trial", return_value=True))
        stack.enter_context(mock.patch.object(mask_looks, "_is_captured", _is_captured))
        yield
