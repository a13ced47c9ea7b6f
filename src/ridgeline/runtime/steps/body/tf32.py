"""TF32 while steps want it: torch has no setting for a single model, so it is the whole process's."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Tf32(NamedTuple):
    """Whether matrix products, and what cuDNN computes, may be in TF32."""

    matmul: bool
    cudnn: bool


_BEFORE: list[Tf32] = []
"""What was set when each of those began that hold it now; the first is the script's."""


@contextlib.contextmanager
def allowing_tf32() -> Iterator[None]:
    """TF32 inside, and until the last of several has left.

    A plan that was on trial, or closed, would otherwise leave every other one of the process less exact.
    """
    _BEFORE.append(tf32_settings())
    _set(Tf32(matmul=True, cudnn=True))
    try:
        yield
    finally:
        first = _BEFORE[0]
        # Not one's own entry: of two steps the one that was made first may be closed first.
        _BEFORE.pop()
        if not _BEFORE:
            _set(first)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Single precision inside, whoever holds TF32."""
    before = tf32_settings()
    _set(Tf32(matmul=False, cudnn=False))
    try:
        yield
    finally:
        _set(before)


def tf32_settings() -> Tf32:
    """What is set now."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # Torch refuses to say by its older names what was set by the newer ones, `fp32_precision`.
    try:
        is_matmul = matmul.allow_tf32
    except RuntimeError:
        is_matmul = matmul.fp32_precision == "tf32"
    try:
        is_cudnn = cudnn.allow_tf32
    except RuntimeError:
        is_cudnn = cudnn.conv.fp32_precision == "tf32"
    return Tf32(matmul=is_matmul, cudnn=is_cudnn)


def _set(settings: Tf32) -> None:
    torch.backends.cuda.matmul.allow_tf32 = settings.matmul
    torch.backends.cudnn.allow_tf32 = settings.cudnn
