"""Two portraits side by side: what differs, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adversary.portraits import TensorLeaf

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Largest difference relative to the largest value of the tensor: compiled forms add in another order. What a
changed number, branch or hook does to a program is some hundred times more."""
NARROW = 5e-2
"""The same for wide results of a program that computed in 16 bits somewhere."""
LEAST = 1e-2
"""Values below this are compared absolutely: a sum that cancels is nothing but rounding."""
LEAST_NARROW = 1e-1
"""The same of a program that computed in 16 bits somewhere."""
ROUNDING_FACTOR = 4.0
"""How much further than what rounding does in a few runs of plain PyTorch a mode may be from it."""


class Difference(NamedTuple):
    """One leaf that differs; `what` is the kind of difference."""

    path: str
    what: str
    detail: str


def differences(
    wanted: Mapping[str, Any],
    got: Mapping[str, Any],
    *,
    is_narrow: bool,
    others: Sequence[Mapping[str, Any]] = (),
) -> list[Difference]:
    """The leaves that differ, those of the result first; `others` are as good as `wanted` but for rounding."""
    found = []
    for path in dict.fromkeys([*wanted, *got]):
        if path not in wanted:
            found.append(Difference(path, "appeared", f"{_short(got[path])}, not there in eager"))
        elif path not in got:
            found.append(Difference(path, "missing", f"{_short(wanted[path])} in eager, not there"))
        else:
            moved = [other[path] for other in others if path in other]
            found += _leaf(path, wanted[path], got[path], is_narrow=is_narrow, others=moved)
    return sorted(found, key=lambda item: not item.path.startswith("result"))


def _leaf(
    path: str, wanted: Any, got: Any, *, is_narrow: bool, others: Sequence[Any]
) -> list[Difference]:
    if not (isinstance(wanted, TensorLeaf) and isinstance(got, TensorLeaf)):
        if wanted == got and type(wanted) is type(got):
            return []
        is_same_object = [isinstance(one, tuple) and one[0] == "same as" for one in (wanted, got)]
        what = "identity" if any(is_same_object) else "value"
        return [Difference(path, what, f"{_short(wanted)} in eager, got {_short(got)}")]
    for what in ("shape", "dtype", "kind", "requires_grad"):
        if getattr(wanted, what) != getattr(got, what):
            detail = f"{getattr(wanted, what)} in eager, got {getattr(got, what)}"
            return [Difference(path, what, detail)]
    if gap := _gap(wanted, got, is_narrow=is_narrow, spread=_spread(wanted, others)):
        return [Difference(path, "value", gap)]
    for what in ("stride", "shares"):
        if getattr(wanted, what) != getattr(got, what):
            detail = f"{getattr(wanted, what) or 'nothing'} in eager, got {getattr(got, what) or 'nothing'}"
            return [Difference(path, what, detail)]
    return []


def _spread(wanted: TensorLeaf, others: Sequence[Any]) -> float:
    """How far rounding moves a leaf; 0.0 where that is not known."""
    gaps = [
        (other.value.double() - wanted.value.double()).abs()
        for other in others
        if isinstance(other, TensorLeaf)
        and other.shape == wanted.shape
        and wanted.value.is_floating_point()
    ]
    return max(
        (float(gap[gap.isfinite()].max()) for gap in gaps if bool(gap.isfinite().any())),
        default=0.0,
    )


def _gap(wanted: TensorLeaf, got: TensorLeaf, *, is_narrow: bool, spread: float) -> str:
    """What is said of values that differ by more than rounding; empty where they do not."""
    mine, theirs = wanted.value, got.value
    if torch.equal(mine, theirs):
        return ""
    if not mine.is_floating_point():
        return f"{_short(wanted)} in eager, got {_short(got)}"
    tolerance = TOLERANCES.get(mine.dtype, 0.0)
    if is_narrow:
        tolerance = max(tolerance, NARROW)
    a, b = mine.double(), theirs.double()
    is_finite = a.isfinite()
    is_alike = torch.allclose(a[~is_finite], b[~is_finite], equal_nan=True)
    if is_alike and (not bool(is_finite.any()) or bool(b[is_finite].isfinite().all())):
        a, b = a[is_finite], b[is_finite]
        least = LEAST_NARROW if is_narrow else LEAST
        size = max(float(a.abs().max()) if a.numel() else 0.0, least)
        allowed = tolerance * size + ROUNDING_FACTOR * spread
        if a.numel() == 0 or float((a - b).abs().max()) <= allowed:
            return ""
    return f"{_short(wanted)} in eager, got {_short(got)}"


def _short(value: Any) -> str:
    if not isinstance(value, TensorLeaf):
        return str(value[1] if isinstance(value, tuple) and len(value) == 2 else value)[:80]
    numbers = ", ".join(f"{float(v):.4g}" for v in value.value.flatten()[:3])
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} of {numbers} ..."
