"""The copy of a move: laid out as torch lays it out, and nothing of it left to the host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ridgeline.autoparallel.graphs.moves import begin_copy

LAYOUTS = {
    "dense": torch.randn(2, 3, 4, 5),
    "permuted": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "part": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2)[:, 1:],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "number": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.contiguous_format])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_is_laid_out_as_torch_does(name: str, memory_format: torch.memory_format) -> None:
    """Values and strides are those of `Tensor.to`, by one copy between equal layouts that needs no host."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Copies(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if kwargs and kwargs.get("non_blocking"):
                seen.append(args)
            return func(*args, **(kwargs or {}))

    value = LAYOUTS[name]
    with Copies():
        got = begin_copy(value, memory_format)
    want = value.to("cpu", memory_format=memory_format, copy=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0, check_stride=True)
    ((there, source),) = seen
    assert there is got
    assert there.stride() == source.stride()
    assert not source.is_conj()
    assert not source.is_neg()
