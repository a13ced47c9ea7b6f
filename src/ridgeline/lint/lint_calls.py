"""Python calls that matter to a capture and are no operators: seen by a profile function.

`torch.cuda.synchronize()` and `random.random()` never reach torch's dispatcher, but Python notifies a
profile function of every call.
"""

import inspect
import random
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from ridgeline.lint.lint_lines import is_users

Report = Callable[[str, str, FrameType | None], None]
"""`report(rule, op, frame)`; an empty rule stands for a doubt."""

_EXTENSION_SUFFIXES = (".so", ".pyd", ".dylib")
_KNOWN_EXTENSIONS = frozenset(
    ("torch", "numpy", "msgspec", "psutil", "rich", *sys.stdlib_module_names)
)


def _code(function: Any) -> CodeType:
    # Below decorators, whose code many functions share.
    return inspect.unwrap(getattr(function, "__func__", function)).__code__


CALLS: dict[CodeType, tuple[str, str]] = {
    _code(torch.cuda.synchronize): ("host-sync", "torch.cuda.synchronize()"),
    _code(torch.cuda.Stream.synchronize): ("host-sync", "stream.synchronize()"),
    _code(torch.cuda.Event.synchronize): ("host-sync", "event.synchronize()"),
    _code(torch.manual_seed): ("random-state", "torch.manual_seed()"),
    _code(torch.cuda.manual_seed): ("random-state", "torch.cuda.manual_seed()"),
    _code(torch.cuda.manual_seed_all): ("random-state", "torch.cuda.manual_seed_all()"),
    _code(torch.cuda.get_rng_state): ("random-state", "torch.cuda.get_rng_state()"),
    _code(torch.cuda.set_rng_state): ("random-state", "torch.cuda.set_rng_state()"),
}
"""Functions written in Python, by their code (so that an alias is found too), with rule and text."""

_FUNCTION_APPLY = _code(torch.autograd.Function.apply)
_SET_ATTRIBUTE = _code(nn.Module.__setattr__)
_ENTER_STREAM = _code(torch.cuda.StreamContext.__enter__)


def _is_in_checkpoint(frame: FrameType | None) -> bool:
    """Whether torch's activation checkpoints ask, and no code of the user's that runs inside of one."""
    while frame is not None and not is_users(frame.f_code):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class CallWatch:
    """Reports such calls while it is entered; a profile function that was set before is put back.

    Attributes:
        codes: Code of the functions that were called.
    """

    def __init__(self, report: Report) -> None:
        self.codes: dict[CodeType, None] = {}
        self._report = report
        self._before: Any = None

    def __enter__(self) -> Self:
        # NumPy's legacy generator is native code, whose calls look alike whatever they do: only its state
        # tells.
        self._numpy = _numpy_state()
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)
        if _numpy_state() != self._numpy:
            self._report("host-randomness", "numpy.random", None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._see_python(frame)
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            # Also those that the user made: they are on the host all the same.
            if isinstance(owner, random.Random):
                self._report("host-randomness", "Python's random", frame)
            elif is_users(frame.f_code) and (name := _extension(argument)):
                self._report("", f"extension function {name}", frame)

    def _see_python(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        self.codes[code] = None
        if code in CALLS:
            rule, text = CALLS[code]
            if rule == "random-state" and _is_in_checkpoint(caller):
                rule = "checkpoint"
            self._report(rule, text, caller)
        elif code is _SET_ATTRIBUTE:
            self._see_attribute(frame.f_locals, caller)
        elif code is _FUNCTION_APPLY:
            name = frame.f_locals["cls"].__name__
            self._report("", f"custom autograd function {name}", caller)
        elif code is _ENTER_STREAM and frame.f_locals["self"].stream is not None:
            self._report("", "a stream of the program's own", caller)
        elif code.co_name == "run" and code.co_filename.endswith("triton/runtime/jit.py"):
            name = getattr(frame.f_locals.get("self"), "__name__", "")
            self._report("", f"Triton kernel {name}", caller)

    def _see_attribute(self, called: dict[str, Any], caller: FrameType | None) -> None:
        module, name, value = called["self"], called["name"], called["value"]
        for kind, holder in (("buffer", "_buffers"), ("parameter", "_parameters")):
            present = module.__dict__.get(holder, {}).get(name)
            if present is not None and present is not value:
                self._report("moved-state", f"assignment of {kind} {name!r}", caller)


def _numpy_state() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()
    return np.asarray(keys).tobytes(), *rest


def _extension(function: Any) -> str:
    """Full name of a function of a compiled module that no known library owns; else empty."""
    module = getattr(function, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] in _KNOWN_EXTENSIONS:
        return ""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return f"{module}.{function.__name__}" if file.endswith(_EXTENSION_SUFFIXES) else ""
