"""Programs on a GPU: the modes that need one, and a program's text with all that it makes made there."""

from __future__ import annotations

import inspect
import re

from torch import nn

GPU_MODES = (
    "call:graph@cuda",
    "call:compiled+graph@cuda",
    "step:graph@cuda",
    "step:compiled+graph@cuda",
    "step:regional+graph@cuda",
    "step:model-graph@cuda",
    "step:compiled+model-graph@cuda",
    "step:step-graph@cuda",
    "step:packaged@cuda",
)
"""Modes in which a GPU replays what was captured."""
EMULATED_MODES = tuple(
    mode.replace("@cuda", "@emulated")
    for mode in GPU_MODES
    if "step-graph" not in mode and "packaged" not in mode
)
"""The same on a CPU, where graphs are emulated."""
_LAYERS = "|".join(
    name
    for name, kind in vars(nn).items()
    if inspect.isclass(kind)
    and (issubclass(kind, nn.RNNBase) or "device" in inspect.signature(kind).parameters)
)
_MAKERS = re.compile(
    r"\b(?:torch\.(?:arange|empty|eye|full|Generator|linspace|ones|rand|randint|randn|randperm|tensor|zeros)"
    rf"|nn\.(?:{_LAYERS}|Transformer\.generate_square_subsequent_mask))\("
)
"""What the grammar makes tensors with; all of these take a device."""


def execution_of(mode: str) -> str:
    """The execution of a mode: `graph` of `step:graph@cuda`."""
    return mode.partition(":")[2].partition("@")[0]


def device_of(mode: str) -> str:
    """Where a mode runs its programs, `cpu` or `cuda`."""
    return "cuda" if mode.endswith("@cuda") else "cpu"


def is_replayed(mode: str) -> bool:
    """Whether graphs are captured, on a GPU or emulated."""
    return "@" in mode


def is_emulated(mode: str) -> bool:
    """Whether graphs are emulated on the CPU."""
    return mode.endswith("@emulated")


def warm_calls(mode: str) -> int:
    """Calls before the first change: of a training step, those before it is one program and has run.

    A program needs an eager step and one that compiles; a graph three eager steps, a capture and a replay.
    """
    return 5 if is_replayed(mode) else 2


def moved(text: str, device: str) -> str:
    """A program's text with its tensors, layers and generators made on a device."""
    if device == "cpu":
        return text
    end, parts = 0, []
    for match in _MAKERS.finditer(text):
        close = _closing(text, match.end())
        if close < end:
            continue  # inside the arguments of one that was moved
        inner = moved(text[match.end() : close], device)
        comma = ", " if inner.strip() else ""
        parts += [text[end : match.end()], inner, f"{comma}device='{device}'"]
        end = close
    return "".join([*parts, text[end:]]).replace("'cpu'", f"'{device}'")


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis closes that was opened just before `begin`."""
    depth = 1
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"no closing parenthesis in {text[begin : begin + 60]!r}")
