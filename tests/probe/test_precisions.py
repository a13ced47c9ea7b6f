"""Ceilings are measured in the precision that they are named for, whatever a script has set."""

from typing import Any

import pytest
import torch

from ridgeline.probe.rates.ceilings import _precision


@pytest.mark.parametrize("word", ["ieee", "tf32"])
def test_precisions_are_set_by_their_newer_names(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses to say by its older names what these are; all are put back."""
    backends: Any = torch.backends
    operators = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    first = [operator.fp32_precision for operator in operators]
    try:
        for operator in operators[:2]:
            operator.fp32_precision = word
        before = [operator.fp32_precision for operator in operators]
        for dtype, wanted in (("tf32", "tf32"), ("float32", "ieee"), ("bfloat16", "ieee")):
            with _precision(dtype):
                assert [operator.fp32_precision for operator in operators] == [wanted] * 3
            assert [operator.fp32_precision for operator in operators] == before
    finally:
        for operator, precision in zip(operators, first, strict=True):
            operator.fp32_precision = precision
