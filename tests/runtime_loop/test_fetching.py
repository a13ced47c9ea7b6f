"""Fetching: whatever is taken at once, every batch has the values of its own indices."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from ridgeline.runtime.training.fetching import BLOCK_BYTES, MOST_BATCHES, batches, fetch


class Squares(Dataset):
    """Counts how often it is asked; pure or not."""

    def __init__(self, count: int, *, is_pure: bool, width: int = 1) -> None:
        self.is_pure = is_pure
        self.asked: list[int] = []
        self._values = torch.arange(count * width, dtype=torch.float32).view(count, width) ** 2

    def __len__(self) -> int:
        return len(self._values)

    def batch(self, indices: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        self.asked.append(len(indices))
        return {"pair": (self._values[indices], indices)}


@given(st.lists(st.integers(1, 7), max_size=60), st.booleans())
def test_batches_are_those_of_single_fetches(sizes: list[int], is_pure: bool) -> None:
    """In order, of equal structure and values, also where a last one is shorter."""
    data = Squares(max(1, sum(sizes)), is_pure=is_pure)
    slices = torch.randperm(sum(sizes)).split(sizes) if sizes else ()
    got = list(batches(data, slices))
    wanted = [data.batch(indices) for indices in slices]
    assert len(got) == len(wanted)
    for mine, other in zip(got, wanted, strict=True):
        assert mine.keys() == other.keys()
        assert all(map(torch.equal, mine["pair"], other["pair"]))


def test_small_pure_batches_are_taken_several_at_once() -> None:
    """But no more than fit the block, and single ones of a data set that may draw random numbers."""
    slices = torch.arange(80).split(2)
    for is_pure, asked in ((True, [2, 2 * 16, 2 * 16, 2 * 7]), (False, [2] * 40)):
        data = Squares(80, is_pure=is_pure)
        list(batches(data, slices))
        assert data.asked == asked
    assert MOST_BATCHES == 16
    wide = Squares(80, is_pure=True, width=BLOCK_BYTES // 4)
    list(batches(wide, slices))
    assert wide.asked == [2] * 40


def test_leaves_without_samples_are_not_cut() -> None:
    """A batch with a constant is taken alone, however pure."""

    class Scaled(Squares):
        def batch(self, indices: Tensor) -> dict:
            return super().batch(indices) | {"scale": 3}

    data = Scaled(20, is_pure=True)
    got = list(batches(data, torch.arange(20).split(5)))
    assert data.asked == [5] * 4
    assert all(batch["scale"] == 3 for batch in got)


def test_tensors_in_memory_are_collated_as_torch_does() -> None:
    """The same structure, values and dtypes as from the samples one by one."""
    data = TensorDataset(torch.rand(9, 3), torch.arange(9), torch.rand(9) > 0.5)
    indices = torch.tensor([4, 0, 8])
    mine, other = fetch(data, indices), default_collate([data[i] for i in indices.tolist()])
    assert type(mine) is type(other)
    for one, wanted in zip(mine, other, strict=True):
        assert torch.equal(one, wanted)
        assert one.dtype == wanted.dtype


def test_an_empty_epoch_has_no_batches() -> None:
    """Nothing is fetched."""
    data = Squares(3, is_pure=True)
    assert list(batches(data, ())) == []
    assert data.asked == []
