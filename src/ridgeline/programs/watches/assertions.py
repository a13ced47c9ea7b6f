"""Assertions about the values of tensors (`assert (x > 0).all(), "..."`), as programs see them.

Torch's compiler (2.11 to 2.13) makes an operator of such an assertion. That raises another error than Python
does, and on a GPU it takes the device along: no later step of the process runs. In pieces that this package
compiles, assertions are left to Python; a program that is read in one piece has no place for them.
"""

from collections.abc import Callable
from typing import Any

from torch._dynamo import symbolic_convert

from ridgeline.programs.watches.marks import is_marked, mark

_in_torch: Any = symbolic_convert._detect_and_normalize_assert_statement  # noqa: SLF001 - says what is one


def leaves_assertions_alone(backend: Callable[..., Any]) -> None:
    """Have what is compiled with a backend treat an assertion as the branch and the raise that it is.

    Done again, it changes nothing. Programs of other backends are compiled as before.

    Args:
        backend: Of `torch.compile`.
    """
    mark(backend)
    symbolic_convert._detect_and_normalize_assert_statement = _detect  # type: ignore[assignment]  # noqa: SLF001


def _detect(translator: Any, *args: Any) -> bool:
    """In place of torch's: whether what follows is an assertion that the compiler may put into operators."""
    return not is_marked(translator.output.compiler_fn) and bool(_in_torch(translator, *args))
