"""Tracing a function that trains into an FX graph, and saying where that is not possible."""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.capture.interception import scripted_as_written
from ridgeline.errors import CaptureError, RidgelineError, first_line
from ridgeline.reach.owners import is_machinery
from ridgeline.runtime.steps.whole_step.draws.decided_draws import DecidedDraws
from ridgeline.runtime.steps.whole_step.rates import ScaledByTensors

_READS_A_VALUE = "aten._local_scalar_dense.default"
_HOST_READS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""What torch raises where a step asks a tensor without values for one."""
_COPIES_OF_VALUES = ("data is not allocated yet", ".numpy() is not supported for tensor subclasses")
"""What torch says instead where one is copied to Python or NumPy: `torch.tensor([loss])`, `loss.numpy()`."""
_TORCH = str(Path(torch.__file__).parent)
_UPDATES = str(Path(_TORCH, "optim"))
_WRAPPERS = str(Path("optim", "optimizer.py"))
"""Torch puts functions of this file around the steps of all optimizers."""


def trace_graph(step: Callable[..., list[Tensor]], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of the operators that `step(*arguments)` would run, its backward pass included.

    Tracing uses tensors without data: nothing is computed, no random number drawn.

    Raises:
        CaptureError: the function reads a value or otherwise needs to run; names the line.
    """
    try:
        with _tracing():
            graph = make_fx(_deciding(step), tracing_mode="fake", _allow_non_fake_inputs=True)(
                *arguments
            )
    except RidgelineError:
        raise
    except Exception as error:
        # A tensor of a class of the user's own is a plain one in a trace, which lacks what that class has.
        is_traces = isinstance(error, (RuntimeError, TypeError)) or FakeTensor.__name__ in str(
            error
        )
        if not (is_traces or _is_from_torch(error)):
            raise  # the user's own, which every other mode raises too
        raise CaptureError(_refusal(error)) from error
    finally:
        torch.clear_autocast_cache()  # inside autocast it may hold casts without data
    # Where a tensor of the outside is read, tracing does not fail but leaves the operator in the graph.
    for node in graph.graph.nodes:
        if str(node.target) == _READS_A_VALUE:
            raise CaptureError(
                f"wanted a step that never waits for its own values, got {node.target}"
                f"{_place_of_read(step, arguments)}, which reads one on the host (.item(), float(), int()); "
                "compute with tensors, or use execution='compiled' or 'eager'"
            )
    return graph


def _place_of_read(step: Callable[..., list[Tensor]], arguments: Sequence[Tensor]) -> str:
    """Where a step that could be traced first reads a value; nothing where no line of it does."""
    watch, numbers = _Reads(), _NumberReads()

    def watched(*tensors: Tensor) -> list[Tensor]:
        with numbers:  # above the modes of the trace, which execute what is outside
            return step(*tensors)

    # Traced again, as nodes keep no lines and watching costs. What fails now has not failed before.
    with contextlib.suppress(Exception), _tracing(), watch:
        make_fx(_deciding(watched), tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    torch.clear_autocast_cache()
    return watch.place or numbers.place


def _deciding(step: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def traced(*tensors: Tensor) -> list[Tensor]:
        with DecidedDraws(), _SameMemory():
            return step(*tensors)

    return traced


class _SameMemory(TorchFunctionMode):
    """Inside, no tensor is given other memory by `.data =`, which a trace would pass over.

    A comparison of some steps need not show it: parameters may be clipped that way now and then only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SETTING:
            raise CaptureError(
                "wanted a step that writes into tensors where they lie, got `.data = ...`"
                f"{_place_of_caller()}, which gives one other memory and is no operator of a program; write "
                ".data.copy_(...), or use execution='compiled' or 'eager'"
            )
        return func(*args, **(kwargs or {}))


_SETTING = Tensor.data.__set__  # type: ignore[attr-defined] - what torch hands on for `.data = ...`


def _place_of_caller() -> str:
    frames = traceback.extract_stack()[:-2]
    its = [frame for frame in frames[_begin_of_update(frames) :] if _is_of_update(frame)]
    frame = its[-1] if its else _innermost(frames)
    return f" at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"


class _Reads(TorchFunctionMode):
    """Inside, the line is noted that first asks a tensor of a trace for its value."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not self.place and isinstance(args[0], FakeTensor):
            self.place = _place_of_caller()
        return func(*args, **(kwargs or {}))


class _NumberReads(TorchDispatchMode):
    """Inside, the line is noted where a tensor is first taken for a number of Python (`value=tensor`)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == _READS_A_VALUE and not self.place:
            self.place = _place_of_caller()
        return func(*args, **(kwargs or {}))


_READERS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__index__,
)


class TracedOptimizer:
    """The optimizer as the body uses it, with torch's compiling flag set while it steps.

    Without the flag the optimizers read step counts on the host (`.item()`), refuse `capturable` on the CPU
    and group tensors by their addresses; it is how torch's own compiler traces them, and has no public name.
    The user's code is traced without the flag, since it may do something else where it is set.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients of the parameters that stand in; they have none at first."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self) -> None:
        """The optimizer's own step, on what stands in for its parameters.

        Raises:
            CaptureError: it fails here, as no eager step has.
        """
        # Below a scheduler's wrapper, which would count a step that does not take place.
        step = type(self._optimizer).step
        before = torch.compiler._is_compiling_flag  # noqa: SLF001
        torch.compiler._is_compiling_flag = True  # noqa: SLF001
        try:
            with ScaledByTensors():
                step(self._optimizer)
        except RidgelineError:
            raise
        except Exception as error:
            raise CaptureError(_update_refusal(error, type(self._optimizer).__name__)) from error
        finally:
            torch.compiler._is_compiling_flag = before  # noqa: SLF001


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Settings under which the graph has no hidden state and one thread sees all operators."""
    with (
        # cuDNN's batch norm hides that it writes its running statistics; the plain one is a decomposition.
        # `torch.backends.cudnn.flags(enabled=False)` sets all other flags, too; and where a script has set
        # precisions by their newer names, `fp32_precision`, it raises when it asks for the older ones.
        _off(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),  # noqa: SLF001
        # An LSTM is traced as its operators: that of oneDNN keeps a workspace that is missed in a graph.
        # `torch.backends.mkldnn.flags` would set what it does not know, with a warning.
        _off(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),  # noqa: SLF001
        scripted_as_written(),
        # What a script has given to `torch.compile` (a model, often) is traced as it was written, too.
        dynamo_config.patch(error_on_nested_fx_trace=False),
        # Modes that trace are of one thread, and backward would run operators on another.
        torch.autograd.set_multithreading_enabled(False),
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def _off(is_on: Callable[[], bool], switch: Callable[[bool], None]) -> Iterator[None]:
    before = is_on()
    switch(False)
    try:
        yield
    finally:
        switch(before)


def _is_from_torch(error: Exception) -> bool:
    """Whether torch raised it: what stands in for an operator may divide by a size that is 0."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return innermost.filename.startswith(_TORCH)


def _refusal(error: Exception) -> str:
    """What could not be traced, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = _of_users(frames)
    place = _innermost(frames)
    where = f"at {Path(place.filename).name}:{place.lineno} in {place.name}"
    # Of an operator's own derivative, which no line of the step calls, torch's line says little.
    if not theirs and any(frame.name == "backward" for frame in frames):
        where += ", within the backward pass"
    instead = "use execution='eager'"
    if isinstance(error, _HOST_READS) or "tracing tensor" in str(error) or _copies_values(error):
        instead = (
            "remove what reads values on the host (.item(), float(), .numpy(), torch.tensor([...]) of "
            "tensors, `if` on a tensor) or use execution='compiled' or 'eager'"
        )
    return f"wanted a step that can be written as one program, got {_reason(error)}, {where}; {instead}"


def _of_users(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    outer = [frame for frame in frames if not frame.filename.startswith((_TORCH, "<"))]
    return [frame for frame in outer if not is_machinery(frame.filename)]


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """The user's own, where there is one."""
    return (_of_users(frames) or frames)[-1]


def _update_refusal(error: Exception, name: str) -> str:
    """What an optimizer does that could not be traced, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    its = [frame for frame in frames if _is_of_update(frame)]
    place = (its or frames)[-1]
    return (
        f"wanted an optimizer whose step can be written as one program, got {_reason(error)}, in "
        f"{name}.step() at {Path(place.filename).name}:{place.lineno} in {place.name}; use "
        "execution='compiled' or 'eager'"
    )


def _begin_of_update(frames: Sequence[traceback.FrameSummary]) -> int:
    """The place of the first frame of an optimizer's step; that behind the last one where it does not run."""
    calls = (
        at for at, frame in enumerate(frames) if frame.filename == __file__ and frame.name == "step"
    )
    return next((at + 1 for at in calls), len(frames))


def _is_of_update(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is an optimizer's own, torch's optimizers included, and not of what it calls."""
    if frame.filename.endswith(_WRAPPERS) or is_machinery(frame.filename):
        return False
    return not frame.filename.startswith((_TORCH, "<")) or frame.filename.startswith(_UPDATES)


def _copies_values(error: Exception) -> bool:
    return any(words in str(error) for words in _COPIES_OF_VALUES)


def _reason(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            "a number or a branch that depends on the values of tensors"  # torch names its symbols
        )
    if _copies_values(error):
        return "values of a tensor copied to Python or NumPy"
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"
