"""Tiles of payloads: on a CPU what is encoded piece by piece stays in a core's cache from pass to pass."""

import torch
from torch import Tensor

from ridgeline.synchronisation import share_elements

TILE_ELEMENTS = 1 << 17
"""Half a megabyte of float32: what codecs make of it, of all workers' parts too, stays in a core's cache."""


def tiles(num_elements: int, block: int, device: torch.device, rows: int = 1) -> list[range]:
    """Which elements of some rows are encoded at a time: whole blocks; all on a GPU, where launches cost."""
    if device.type != "cpu":
        return [range(num_elements)]
    step = max(1, TILE_ELEMENTS // rows // block) * block
    return [range(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]


class Shares:
    """A payload as equal shares, one a worker, of which the last ones are filled up with zeros.

    Args:
        num_elements: Of the payload.
        size: Number of workers.
        block: Shares that are larger are whole blocks.
    """

    def __init__(self, num_elements: int, size: int, block: int) -> None:
        self._size, self._block = size, block
        self._share = share_elements(num_elements, size, block)

    def tiles(self, device: torch.device) -> list[range]:
        """Which elements of each share are encoded at a time; see `tiles`."""
        return tiles(self._share, self._block, device, rows=self._size)

    def rows(self, flat: Tensor, tile: range) -> Tensor:
        """[size, tile]: these elements of each share; a view, or a copy where `flat` ends before."""
        whole, rest = self._pieces(flat, tile)
        if len(whole) == self._size:
            return whole
        rows = flat.new_zeros((self._size, len(tile)))
        rows[: len(whole)] = whole
        rows[len(whole), : len(rest)] = rest
        return rows

    def row(self, flat: Tensor, number: int, tile: range) -> Tensor:
        """A view of what there is of these elements of one share."""
        start = number * self._share
        return flat[start + tile.start : start + tile.stop]

    def write(self, flat: Tensor, tile: range, rows: Tensor) -> None:
        """Overwrite these elements of each share."""
        for part, row in self._matched(flat, tile, rows):
            part.copy_(row)

    def subtract(self, flat: Tensor, tile: range, rows: Tensor) -> None:
        """Take `rows` from these elements of each share."""
        for part, row in self._matched(flat, tile, rows):
            part.sub_(row)

    def _matched(self, flat: Tensor, tile: range, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        whole, rest = self._pieces(flat, tile)
        found = [(whole, rows[: len(whole)])] if len(whole) else []
        return found + ([(rest, rows[len(whole), : len(rest)])] if len(rest) else [])

    def _pieces(self, flat: Tensor, tile: range) -> tuple[Tensor, Tensor]:
        """Views: of the shares that have the whole tile, and of what the next one has of it."""
        full = min(self._size, max(0, (flat.numel() - tile.stop) // self._share + 1))
        start = flat.storage_offset() + tile.start
        whole = flat.as_strided((full, len(tile)), (self._share, 1), start)
        return whole, self.row(flat, full, tile)
