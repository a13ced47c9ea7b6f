"""Programs whose independent parts fit on one GPU at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.capture.capturing import capturing
from ridgeline.errors import CaptureError

DEVICE = torch.device("cuda", 0)


def chains(
    width: int = 4, depth: int = 8, size: int = 256
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Independent chains of small products, which leave most of the device to one another."""
    torch.manual_seed(0)
    weights = [torch.randn(size, size, device=DEVICE) / size**0.5 for _ in range(width)]

    def fn(x: Tensor) -> Tensor:
        found = []
        for weight in weights:
            y = x
            for _ in range(depth):
                y = (y @ weight).tanh()
            found.append(y)
        return torch.stack(found).sum(0)

    return fn, (torch.randn(size, size, device=DEVICE),)


def same(got: Any, want: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def _reads(_: list[Tensor]) -> None:
    torch.ones(1, device=DEVICE).item()


def _leaves_a_stream(_: list[Tensor]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(1, device=DEVICE).add_(1.0)


def _fills_memory(held: list[Tensor]) -> None:
    _leaves_a_stream(held)
    while True:
        held.append(torch.empty(1 << 33, dtype=torch.uint8, device=DEVICE))


FAILURES = {"reads": _reads, "leaves a stream": _leaves_a_stream, "fills memory": _fills_memory}
"""What a capture fails with."""


def _failure(kind: str) -> str:
    """What the capture that fails says; nothing of it is held any more."""
    try:
        with capturing(torch.cuda.CUDAGraph(), "the program", stream=torch.cuda.Stream()):
            torch.nn.functional.dropout(torch.ones(1000, device=DEVICE))
            FAILURES[kind]([])
    except CaptureError as error:
        return str(error)
    raise AssertionError(f"the capture that {kind} did not fail")


def fail_a_capture(kind: str, wants_memory: bool) -> None:
    """Fail one, then draw and capture again; or ask for the memory back.

    Raises:
        AssertionError: something is left of the failed capture.
    """
    dropped = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE))
    before, held = torch.cuda.get_rng_state(), torch.cuda.memory_reserved()
    said = _failure(kind)
    assert said.endswith("; use execution='eager'"), said
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    dropped = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE))
    if wants_memory:
        torch.cuda.empty_cache()
        grown = torch.cuda.memory_reserved() - held
        assert grown <= 1 << 24, f"{grown} bytes are still reserved"
        return
    again = torch.cuda.CUDAGraph()
    with capturing(again, "the program", stream=torch.cuda.Stream()):
        dropped = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE))
    again.replay()
    assert 300 < int((dropped > 0).sum()) < 700
