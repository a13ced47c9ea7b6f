"""Which line of the user's program an operator comes from, and which changes something in Python."""

import dis
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from ridgeline.reach.owners import is_machinery

_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_ENGINE: CodeType = torch.autograd.graph._engine_run_backward.__code__  # noqa: SLF001 - where backward begins
_LINE = "ridgeline.line"
_STORES = (
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"),
    *("DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME"),
)
_ENTRIES = ("STORE_SUBSCR", "DELETE_SUBSCR")
_GROWING = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put",
    "remove", "setdefault", "update",
))  # fmt: skip
"""Methods after which a container holds more, or less."""
_MOST_LINES = 3
UNKNOWN = "an unknown line"


class Lines:
    """Finds the user's line for what happens now.

    Attributes:
        outermost: Frame at which the search ends; what calls it is not part of the program.
        phase: Part of the step that runs: `forward`, `backward` or `optimizer`.
    """

    def __init__(self, outermost: FrameType) -> None:
        self.outermost: FrameType | None = outermost
        self.phase = ""

    def of(self, frame: FrameType | None) -> str:
        """The innermost frame outside torch, Ridgeline and Python's library, from `frame` outwards.

        An operator of the backward pass belongs to the line of its forward operator; where there is no
        line of the user's, the phase stands for it.
        """
        node = torch._C._current_autograd_node()  # noqa: SLF001 - the only way to ask
        while frame is not None and frame is not self.outermost:
            # Further out stands the line that called `backward`, which is none of this operator's.
            if node is not None and frame.f_code is _ENGINE:
                break
            if is_users(frame.f_code):
                return _described(frame.f_code, frame.f_lineno)
            frame = frame.f_back
        if node is not None:
            line = _metadata(node).get(_LINE)
            return f"the backward of {line}" if line else "the backward pass"
        return f"the {self.phase} itself" if self.phase else "the program itself"

    def remember(self, result: Any, line: str) -> None:
        """Note at the backward of a function's result which line called it."""
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        pending = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn]
        while pending:
            node = pending.pop()
            # What has a line was made by an earlier call, and so was all behind it.
            if _is_leaf(node) or _LINE in _metadata(node):
                continue
            _metadata(node)[_LINE] = line
            pending += [parent for parent, _ in node.next_functions if parent is not None]


def is_users(code: CodeType) -> bool:
    """Whether code is neither torch's, nor this package's, nor of Python's library."""
    name = code.co_filename
    if name.startswith((_TORCH, "<frozen")) or is_machinery(name):
        return False
    return not name.startswith(_STANDARD) or "site-packages" in name or "dist-packages" in name


def _described(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line} in {code.co_name}"


def _metadata(node: Node) -> dict[str, Any]:
    # torch's annotations call it a method; it is an attribute.
    return cast("dict[str, Any]", node.metadata)


def _is_leaf(node: Node) -> bool:
    # It lives as long as its parameter, and its backward is only the addition to the gradient. Of the class,
    # as an `autograd.Function` of the user's may keep something of its own under that name.
    return type(node).name(node) == "torch::autograd::AccumulateGrad"


def changing_lines(what: str, codes: Iterable[CodeType]) -> str:
    """The lines that may have made a change, `solver.py:12 in count`; `UNKNOWN` where none is found.

    Args:
        what: The change in the words of `changed_in_python`: a name in quotes, or a part of a container.
        codes: Code that ran; that of libraries does not count.
    """
    users = [code for code in codes if is_users(code)]
    found = dict.fromkeys(line for code in users for line in _changes(what, code))
    if not found or len(found) > _MOST_LINES:
        return UNKNOWN
    return " or ".join(found)


def _changes(what: str, code: CodeType) -> Iterator[str]:
    quoted = re.fullmatch(r"'(\w+)'", what)
    name = quoted[1] if quoted else None
    before: dis.Instruction | None = None
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        if step.positions is not None and step.positions.lineno is not None:
            line = step.positions.lineno
        if name is not None:
            is_key = before is not None and before.opname == "LOAD_CONST" and before.argval == name
            is_it = step.opname in _STORES and step.argval == name
            is_it = is_it or (step.opname in _ENTRIES and is_key)
            is_it = is_it or (is_key and "setattr" in code.co_names)
        else:
            is_it = step.opname in _ENTRIES
            is_it = is_it or (
                step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _GROWING
            )
        if is_it:
            yield _described(code, line)
        before = step
