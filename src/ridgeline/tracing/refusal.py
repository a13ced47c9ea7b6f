"""Why a step cannot be traced, said in terms of the user's code."""

import os
import traceback
from pathlib import Path
from types import TracebackType

import torch.distributions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ridgeline.errors import WorkloadError
from ridgeline.reach.owners import innermost_outside
from ridgeline.tracing.recorder import StepRecorder

WAY_OUT = "; or trace with may_run=True, which records a real step and takes back what it did"


_FUNCTIONS = "HigherOrderOperator"
"""In what torch says where nobody has told it what such an operator does under a mode."""
_NUMPY = ".numpy() is not supported for tensor subclasses."
"""What torch says where NumPy, too, asks for the values of a fake tensor."""

_DISTRIBUTIONS = f"{Path(torch.distributions.__file__).parent}{os.sep}"


def refusal(error: RuntimeError | TypeError, recorder: StepRecorder) -> WorkloadError | None:
    """The error to raise instead of one of fake tensors; None for errors of the step itself."""
    where = f"{_module(recorder)}{_place(error.__traceback__)} during {recorder.phase}"
    looked_by = _look(error)
    if looked_by:
        return WorkloadError(
            f"wanted a step that does not look at the values of tensors, got {looked_by} {where}; "
            f"{_instead(error)}{WAY_OUT}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return WorkloadError(
            f"wanted a step whose shapes do not depend on the values of tensors, got {error.func} "
            f"{where}; use an operator of fixed output shape, for example torch.where{WAY_OUT}"
        )
    if isinstance(error, UnsupportedOperatorException):
        return WorkloadError(
            f"wanted operators that can run on fake tensors, got {error.func} {where}; "
            f"register a fake implementation with torch.library.register_fake{WAY_OUT}"
        )
    if _FUNCTIONS in str(error):
        return WorkloadError(
            f"wanted operators of tensors, got one that takes functions, such as torch.cond, {where}; "
            "compute with tensors, for example torch.where, or train by a plan of your own, such as "
            "rl.Plan(), for which nothing is traced"
        )
    return None


def takes_functions(error: BaseException) -> bool:
    """Whether a step was refused for an operator that takes functions."""
    return _FUNCTIONS in str(error.__cause__)


def _look(error: RuntimeError | TypeError) -> str:
    """What looked at the values of a tensor; empty where nothing did."""
    if isinstance(error, DataDependentOutputException):
        return f"{error.func} (.item(), .tolist(), bool() or an if on a tensor)"
    text = str(error)
    if text == _NUMPY:
        return ".numpy(), or a function of NumPy on a tensor,"
    # Python and NumPy name the class of what they cannot use; the step has tensors there.
    if isinstance(error, TypeError) and "FakeTensor" in text:
        return f"a tensor given to Python or NumPy ({text.replace('FakeTensor', 'Tensor')})"
    return ""


def _instead(error: BaseException) -> str:
    """How to do without that look; a distribution looks unless it is told not to."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_DISTRIBUTIONS):
            return "make the distribution with validate_args=False, which leaves out its checks"
    return "keep such values as tensors, and read them after the step"


def obstacle(error: BaseException) -> str:
    """Why a step could not be recorded, in a few words for a note: what, and where in the user's code."""
    # A note has room for one line; those behind it are torch's advice on debugging.
    text = str(error).strip().splitlines() or [""]
    words = text[0].partition(WAY_OUT)[0].removeprefix("wanted ")
    if isinstance(error, WorkloadError):
        wanted, _, got = words.partition(", got ")
        return f"{got.rpartition('; ')[0] or got} (wanted {wanted})" if got else words
    return f"{type(error).__name__}: {words}{_place(error.__traceback__)}"


def _module(recorder: StepRecorder) -> str:
    path = recorder.module
    return f"in module {path!r}" if path else "in loss_fn"


def _place(trace: TracebackType | None) -> str:
    """File and line of the innermost frame that belongs to neither torch nor this package."""
    frame = innermost_outside(trace)
    return f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
