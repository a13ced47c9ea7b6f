"""Whose code it is: the user's own, or that of a library, of Python or of this package."""

import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

_OWN_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODELS = tuple(f"{_OWN_PACKAGE}{os.sep}{name}{os.sep}" for name in ("tasks", "experiments"))
_LIBRARY_PATHS = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OPEN_LIBRARIES = (
    "builtins", "collections", "types", "functools", "dataclasses", "argparse", "queue", "weakref",
    "_weakrefset", "_thread", "__main__",
)  # fmt: skip
"""Of Python's own modules, those with classes that hold what a user puts there."""


@cache
def is_users(filename: str) -> bool:
    """Whether code from this file is the user's, and not of a library, of Python or of this package."""
    if not filename or filename.startswith((*_LIBRARY_PATHS, _OWN_PACKAGE, "<frozen")):
        return False
    return not _is_installed(filename)


@cache
def is_machinery(filename: str) -> bool:
    """Whether code from this file is what this package runs models with; its own models are not."""
    return filename.startswith(_OWN_PACKAGE + os.sep) and not filename.startswith(_MODELS)


def is_torchs(filename: str) -> bool:
    """Whether code from this file is torch's."""
    return filename.startswith(_TORCH)


def innermost_outside(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The innermost frame of a traceback that is neither torch's nor this package's; None where none is."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not (is_torchs(frame.filename) or is_machinery(frame.filename)):
            return frame
    return None


def is_users_class(kind: type) -> bool:
    """Whether a class is of the user's own."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_users(getattr(module, "__file__", None) or "")


@cache
def is_open(kind: type) -> bool:
    """Whether the attributes of objects of a class are the step's own affair."""
    if issubclass(kind, (nn.Module, Optimizer)):
        return True
    package, _, rest = kind.__module__.partition(".")
    if package == "torch":
        return rest.startswith(("nn", "optim", "amp", "distributions", "cuda.amp"))
    if package == "numpy":
        return rest.startswith("ma")  # which keep what is masked in an array of its own
    if package in sys.stdlib_module_names or package == "ridgeline":
        # A class that a metaclass of a library makes is called Python's own, of `abc` say.
        is_derived = package in sys.stdlib_module_names and not all(map(_is_pythons, kind.__mro__))
        return package in _OPEN_LIBRARIES or is_derived
    return True


def _is_pythons(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


@cache
def is_standard(filename: str) -> bool:
    """Whether code from this file is Python's own library."""
    return filename.startswith((*_LIBRARY_PATHS[:2], "<frozen")) and not _is_installed(filename)


def _is_installed(filename: str) -> bool:
    """Whether it lies where packages are installed, be it by `pip install --target` in any folder."""
    if "site-packages" in filename or "dist-packages" in filename:
        return True
    # Without the empty entry, which is the working directory: there the user's own code lies.
    found = (entry for entry in sys.path if entry and Path(filename).is_relative_to(entry))
    return any(map(_holds_packages, found))


@cache
def _holds_packages(folder: str) -> bool:
    """Whether packages were installed into a folder: a project's own folder has no such records."""
    return any(Path(folder).glob("*.dist-info"))
