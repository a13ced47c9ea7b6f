"""Expressions of the compiler's as people would write them."""

import re
from collections.abc import Callable
from typing import Any

_CELL = re.compile(r"L\['\w+'\]\.__closure__\[(\d+)\]\.cell_contents")
_MODULE = re.compile(r"G\['__import_(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_CLASS = re.compile(r"dict\(type\((.+?)\)\.__mro__\[\d+\]\.__dict__\)\['(\w+)'\]")
_ARGUMENT = re.compile(r"L\['(\w+)'\]")


def spoken(expression: str, closure: Callable[..., Any] | None = None, **names: str) -> str:
    """An expression without the ways by which the compiler gets at things.

    Args:
        expression: In terms of `L`, the arguments by name, and `G`, globals.
        closure: A function among the arguments; its closure's variables are called by their names.
        names: What people call an argument, if not by its name.
    """
    free = getattr(getattr(closure, "__code__", None), "co_freevars", ())
    text = _CELL.sub(lambda m: free[int(m[1])] if int(m[1]) < len(free) else m[0], expression)
    text = _MODULE.sub(lambda m: m[1].replace("_dot_", "."), text)
    text = _MEMBER.sub(r".\1", text)
    text = _CLASS.sub(r"type(\1).\2", text)
    return _ARGUMENT.sub(lambda m: names.get(m[1], m[1]), text)
