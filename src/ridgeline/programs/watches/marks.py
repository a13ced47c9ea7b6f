"""Which programs are compiled with a backend of this package's: others stay as torch reads them."""

from collections.abc import Callable
from typing import Any

_MARK = "_ridgeline_leaves_to_python"
_INNER = ("compiler_fn", "__wrapped__")
"""Where what torch puts around a backend holds it."""


def mark(backend: Callable[..., Any]) -> None:
    """Know a backend of `torch.compile` again; what is compiled with it leaves some calls to Python."""
    setattr(backend, _MARK, True)


def is_marked(backend: Any) -> bool:
    """Whether it is one of this package's, inside whatever torch puts around."""
    if backend is None or getattr(backend, _MARK, False):
        return backend is not None
    return any(is_marked(getattr(backend, name, None)) for name in _INNER)
