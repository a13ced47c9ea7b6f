"""Watching one real run of a program: every torch function, operator and relevant Python call.

All of them are let through unchanged, so that one run finds everything there is to find.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.lint.idle_draws import IdleDraws
from ridgeline.lint.lint_calls import CallWatch
from ridgeline.lint.lint_judge import CalledOperator, judge
from ridgeline.lint.lint_lines import UNKNOWN, Lines
from ridgeline.lint.lint_rules import COPIES_FROM_HOST, HOST_READS, Finding
from ridgeline.programs.distinct_results import memory_number
from ridgeline.tensors.nests import tensors_in

KNOWN_NAMESPACES = frozenset(
    (
        "aten",
        "prims",
        "profiler",  # marks of `record_function`, which torch's own optimizers set
        "prim",
        "rngprims",
        "c10d",
        "_c10d_functional",
        "c10d_functional",
        "ridgeline",
    )
)
"""Operators of others may do anything on the host; of these we know."""

_SYNC_WARNING = "synchronizing CUDA operation"
_MODE_WARNING = "Synchronization debug mode"
"""Source: c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync; torch/csrc/cuda/Module.cpp, once a process."""


class Doubt(NamedTuple):
    """Something that cannot be judged by looking: `what` at `line`."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"


class Observation:
    """What a run showed so far, each thing once.

    Args:
        device: Type of the device that is to be captured: `cuda`, or `cpu` to lint without a GPU.
        outermost: The frame that runs the program.

    Attributes:
        lines: Notified of the phase.
        ignores_torch_optimizers: In the optimizer phase, see only lines of the user's.
        takes_sparse_gradients: Nothing captured reads the gradients, which may be sparse then.
        is_judged: The call that runs was reported, so the operators that it is made of are not.
        num_reports: Calls that were reported so far, those of a line that is known already, too.
        codes: Code of the functions that were called.
        idle: Draws on the host that decide nothing, where they are drawn beside replays; else None.
    """

    def __init__(self, device: str, outermost: FrameType) -> None:
        self.device = device
        self.lines = Lines(outermost)
        self.ignores_torch_optimizers = False
        self.takes_sparse_gradients = False
        self.is_judged = False
        self.num_reports = 0
        self.codes: dict[CodeType, None] = {}
        self.idle: IdleDraws | None = None
        self._findings: dict[tuple[str, str], Finding] = {}
        self._doubts: dict[Doubt, None] = {}
        self._constants: dict[int, Tensor] = {}
        self._read: set[int | None] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings in the order of their first occurrence."""
        return tuple(self._findings.values())

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Doubts in the order of their first occurrence."""
        return tuple(self._doubts)

    def report(self, rule: str, op: str, frame: FrameType | None) -> None:
        """Keep a finding, or a doubt if `rule` is empty, with the user's line from `frame` outwards."""
        self.num_reports += 1
        line = self.lines.of(frame) if frame is not None else UNKNOWN
        # The step zeroes gradients before its forward pass, which a capture repeats with everything else.
        is_own = self.ignores_torch_optimizers or rule == "gradient-none"
        if is_own and line == "the optimizer itself":
            return
        if rule:
            self.report_at(rule, op, line)
        else:
            self._doubts.setdefault(Doubt(op, line))

    def report_at(self, rule: str, op: str, line: str) -> None:
        """Keep a finding at a line of the user's."""
        self._findings.setdefault((rule, line), Finding(rule, op, line))

    def take_idle_draws(self) -> None:
        """Draws on the host that decide nothing are no findings from now on."""
        self.idle = IdleDraws(lambda line: self.report_at("host-randomness", "aten.rand", line))

    def note_read(self, tensors: Sequence[Tensor]) -> None:
        """An operator has read these."""
        self._read.update({*map(memory_number, tensors)} - {None})

    def forget_read(self, tensors: Sequence[Tensor]) -> None:
        """Count the memory of these as not read."""
        self._read.difference_update(map(memory_number, tensors))

    def has_read(self, tensor: Tensor) -> bool:
        """Whether an operator has read that memory, for a tensor that lived all the while."""
        return memory_number(tensor) in self._read

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor on the host holds what the step itself made from Python numbers."""
        return memory_number(tensor) in self._constants

    def hold_constant(self, tensor: Tensor) -> None:
        """Count a tensor on the host as made by the step; it is kept, so its address stays its own."""
        if self.device == "cpu":
            return  # there the host stands for the device
        if (number := memory_number(tensor)) is not None:  # a sparse one has none of its own
            self._constants[number] = tensor


class FunctionWatch(TorchFunctionMode):
    """Sees torch functions as the user calls them, and notes their lines for the backward pass.

    torch leaves this mode for the backward pass itself; operators are still seen there.
    """

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Judge the call before it is made, and let it continue."""
        seen, frame = self._seen, sys._getframe(1)  # noqa: SLF001 - the line is what this is for
        name = resolve_name(func) or ""
        rule, op = self._judge(name, args)
        if rule:
            seen.report(rule, op, frame)
        # Counted, as operators inside of the call report the same wait again.
        reported = seen.num_reports
        seen.is_judged = bool(rule)
        try:
            result, has_synced = _run(func, args, kwargs or {}, seen.device)
        finally:
            seen.is_judged = False
        # Where there is nothing to copy the host does not wait: the caches of transformers begin so.
        is_copy = name in COPIES_FROM_HOST and self._is_on_device(result) and result.numel() > 0
        if is_copy and not any(self._is_on_device(value) for value in args):
            op = f"{name}(..., device={result.device.type!r})"
            seen.report("unpinned-copy", op, frame)
        elif has_synced and seen.num_reports == reported and not rule:
            seen.report("host-sync", name or str(func), frame)
        if torch.is_grad_enabled() and not name.endswith("__get__"):
            seen.lines.remember(result, seen.lines.of(frame))
        return result

    def _judge(self, name: str, args: Sequence[Any]) -> tuple[str, str]:
        """Rule and text for calls that no operator shows, or shows under another name."""
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return "", ""
        if name == "torch.Tensor.cpu" and self._is_on_device(first, even_cpu=True):
            return "host-copy", "tensor.cpu()"
        if name in HOST_READS:
            if self._is_on_device(first, even_cpu=True):
                return "host-sync", HOST_READS[name]
            is_read = first.device.type == "cpu" and not self._seen.is_constant(first)
            return ("host-tensor", HOST_READS[name]) if is_read else ("", "")
        if name == "torch.Tensor.grad.__set__":
            # Clearing an absent gradient changes nothing.
            is_cleared = args[1] is None and first.is_leaf and first.grad is not None
            return ("gradient-none", "tensor.grad = None") if is_cleared else ("", "")
        if name == "torch.Tensor.data.__set__":
            return "moved-state", "tensor.data = ..."
        is_indexing = name in ("torch.Tensor.__getitem__", "torch.Tensor.__setitem__")
        if is_indexing and self._is_on_device(first) and _has_host_index(args[1]):
            return "unpinned-copy", "a list as an index"
        return "", ""

    def _is_on_device(self, value: Any, *, even_cpu: bool = False) -> bool:
        """Whether a tensor is on the device captured; a host that stands for it only where asked."""
        device = self._seen.device
        return (
            isinstance(value, Tensor)
            and value.device.type == device
            and (even_cpu or device != "cpu")
        )


class OperatorWatch(TorchDispatchMode):
    """Sees the operators that reach the dispatcher, in the backward pass too."""

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operator run, then judge it."""
        seen, frame = self._seen, sys._getframe(1)  # noqa: SLF001 - the line is what this is for
        kwargs = kwargs or {}
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"  # noqa: SLF001 - its name
        result, has_synced = _run(func, args, kwargs, seen.device)
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        # Of operators and not of functions: a function may take a tensor and never look into it.
        seen.note_read(inputs)
        operation = CalledOperator(
            name, func.tags, args, kwargs, inputs, outputs, seen.device, seen.is_constant
        )
        if seen.idle is not None and seen.idle.take(operation, lambda: seen.lines.of(frame)):
            if not seen.idle.holds(outputs):
                for tensor in _hosted(outputs):
                    seen.hold_constant(tensor)
            return result
        rule = judge(operation) or ("host-sync" if has_synced else "")
        is_gradient = rule == "sparse" and seen.lines.phase == "backward"
        if is_gradient and seen.takes_sparse_gradients and name.endswith("with_dims_and_tensors"):
            rule = ""  # it has a row for each index, however often that comes
        if rule and not seen.is_judged:
            seen.report(rule, name, frame)
        if func.namespace not in KNOWN_NAMESPACES:
            seen.report("", f"operator {name}", frame)
        elif func.namespace != "aten" and "c10d" in func.namespace:
            seen.report("", f"collective {name} of the program's own", frame)
        if name == "aten.lift_fresh" or all(map(seen.is_constant, _hosted(inputs))):
            for tensor in _hosted(outputs):
                seen.hold_constant(tensor)
        return result


@contextlib.contextmanager
def watching(seen: Observation) -> Iterator[None]:
    """Observe what runs inside; nothing of the watching stays behind."""
    calls = CallWatch(seen.report)
    seen.codes = calls.codes
    with calls, OperatorWatch(seen), FunctionWatch(seen):
        yield


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> tuple[Any, bool]:
    """The result, and whether CUDA says that the call made the host wait."""
    if device != "cuda":
        return func(*args, **kwargs), False
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        # torch and Python say some warnings once only, and each call has to be seen.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = func(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    has_synced = False
    for one in caught:
        has_synced |= _SYNC_WARNING in str(one.message)
        if not any(text in str(one.message) for text in (_SYNC_WARNING, _MODE_WARNING)):
            warnings.warn_explicit(
                one.message, one.category, one.filename, one.lineno, source=one.source
            )
    return result, has_synced


def _hosted(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.device.type == "cpu"]


def _has_host_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, (list, np.ndarray)) for part in parts)
