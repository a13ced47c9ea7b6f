"""Tensors in files and in staged copies: the same bits, whatever memory they lay in."""

import itertools
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.checkpoints import tensor_files
from ridgeline.runtime.checkpoints.staging import Staging
from ridgeline.runtime.checkpoints.tensor_files import files_of, read_tensors, write_tensors


def odd_ones() -> dict[str, Tensor]:
    """Tensors in every kind of memory."""
    whole = torch.randn(6, 4)
    return {
        "whole": whole,
        "tied": whole,
        "transposed": whole.t(),
        "rows": whole[2:4],
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bits": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64),
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("file_bytes", [1, 200, 1 << 20])
def test_tensors_of_any_memory_come_back(tmp_path: Path, file_bytes: int) -> None:
    """Of several files or one, by ours and by whatever reads safetensors."""
    tensors = odd_ones()
    with mock.patch.object(tensor_files, "FILE_BYTES", file_bytes):
        write_tensors(tmp_path / "model", tensors)
    files = tensor_files.tensor_files(tmp_path / "model")
    assert (len(files) > 1) == (file_bytes < 1 << 20)
    assert_same(read_tensors(tmp_path / "model"), tensors)
    others: dict[str, Tensor] = {}
    for file in files:
        others |= safetensors.torch.load_file(file)
    assert_same(others, tensors)


def test_a_folder_without_tensors_is_one(tmp_path: Path) -> None:
    """It is written and read."""
    write_tensors(tmp_path / "training", {})
    assert read_tensors(tmp_path / "training") == {}


def test_a_folder_has_a_bounded_number_of_files(tmp_path: Path) -> None:
    """A large state has larger files."""
    tensors = {str(n): torch.zeros(4) for n in range(64)}
    with (
        mock.patch.object(tensor_files, "FILE_BYTES", 16),
        mock.patch.object(tensor_files, "MOST_FILES", 8),
    ):
        write_tensors(tmp_path / "model", tensors)
    assert len(tensor_files.tensor_files(tmp_path / "model")) == 8


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_files_are_filled_in_order(sizes: list[int], most_bytes: int) -> None:
    """No file is too full but for one large tensor; no two that follow each other had room in one."""
    files = files_of({str(n): size for n, size in enumerate(sizes)}, most_bytes)
    numbers = list(files.values())
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(1, len(set(numbers)) + 1))
    held = [[s for s, n in zip(sizes, numbers, strict=True) if n == k] for k in sorted({*numbers})]
    for one in held:
        assert sum(one) <= most_bytes or sum(size > 0 for size in one) == 1
    for one, following in itertools.pairwise(held):
        assert sum(one) + following[0] > most_bytes


def test_staged_copies_stay_until_the_next(tmp_path: Path) -> None:
    """Training writes on; the next copies lie in the same memory, with what the tensors hold by then."""
    tensors = odd_ones()
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    staging = Staging()
    first = staging.copies(tensors)
    tensors["whole"].add_(1)
    tensors["bits"].zero_()
    assert_same(first, wanted)
    write_tensors(tmp_path / "model", first)
    assert_same(read_tensors(tmp_path / "model"), wanted)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert len(set(places.values()) - {0}) == len(tensors) - 1  # one is empty
    second = staging.copies(tensors)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert_same(second, tensors)
    staging.close()
