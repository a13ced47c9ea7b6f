"""The walk that a GPU follows, laid in memory of the host."""

import ctypes

import pytest
import torch

from ridgeline.probe.gpu_memory.gpu_loops import LINE_BYTES, lay_walk


@pytest.mark.parametrize("lines", [1, 2, 1000])
def test_a_walk_is_one_circle_through_the_beginning_of_every_line(lines: int) -> None:
    """Each of its addresses is that of another line, and the last leads back to where it began."""
    words = torch.zeros(lines * LINE_BYTES // 8, dtype=torch.int64, device="cpu")
    (begin,) = lay_walk(words).tolist()
    at, seen = begin, []
    for _ in range(lines):
        seen.append(at)
        at = ctypes.c_int64.from_address(at).value
    assert at == begin
    first = words.data_ptr()
    assert sorted(seen) == list(range(first, first + lines * LINE_BYTES, LINE_BYTES))
    assert words.count_nonzero().item() == lines
