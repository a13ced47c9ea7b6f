"""Images in memory: the split, the scaling, and batches that equal their samples."""

import gzip
import struct
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from ridgeline.errors import DataError
from ridgeline.tasks import images
from ridgeline.tasks.images import ImageData, load_images, stratified_mask


def write_idx(directory: Path, split: str, *, count: int, size: int) -> None:
    pixels = bytes(index % 256 for index in range(count * size * size))
    header = struct.pack(">4I", 0x803, count, size, size)
    (directory / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels))
    labels = struct.pack(">2I", 0x801, count) + bytes(index % 10 for index in range(count))
    (directory / f"{split}-labels-idx1-ubyte").write_bytes(labels)


def test_digits() -> None:
    """The bundled digits are 1797 images of 8x8, a fifth of every class held out, none in both."""
    data = load_images()
    assert (len(data.train), len(data.test)) == (1438, 359)
    for label in range(10):
        held = int((data.test.labels == label).sum())
        total = held + int((data.train.labels == label).sum())
        assert held == round(0.2 * total)


def test_digits_are_repeatable() -> None:
    """Every call, so every worker, gets the same split."""
    first, second = load_images(), load_images()
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)


def test_scaling() -> None:
    """The training images have mean 0 and deviation 1; the test images share their scale."""
    data = load_images()
    images, _ = data.train.batch(torch.arange(len(data.train)))
    assert images.mean().abs() < 1e-4
    assert (images.std(correction=0) - 1).abs() < 1e-4
    assert (data.test.mean, data.test.deviation) == (data.train.mean, data.train.deviation)


def test_constant_images() -> None:
    """Images of a single value are shifted to zero, not divided by zero."""
    data = ImageData(
        torch.full((2, 3, 3), 5, dtype=torch.uint8), torch.tensor([0, 1]), mean=5, deviation=1
    )
    assert torch.equal(data.batch(torch.tensor([0, 1]))[0], torch.zeros(2, 1, 3, 3))


@given(st.lists(st.integers(0, 358), min_size=1, max_size=20))
def test_batch_is_collated_samples(indices: list[int]) -> None:
    """A batch equals what torch's default collation makes of its samples."""
    data = DIGITS.test
    images, labels = data.batch(torch.tensor(indices))
    wanted_images, wanted_labels = default_collate([data[index] for index in indices])
    assert images.dtype == torch.float32
    assert images.shape == (len(indices), 1, 8, 8)
    assert torch.equal(images, wanted_images)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, wanted_labels)


def test_index_out_of_range() -> None:
    """A sample beyond the end is an IndexError, which is what ends a plain loop over a dataset."""
    with pytest.raises(IndexError):
        DIGITS.test[len(DIGITS.test)]


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_stratified(labels: list[int], fraction: float, seed: int) -> None:
    """Of every class the rounded fraction is held out, the same for the same seed."""
    tensor = torch.tensor(labels)
    mask = stratified_mask(tensor, fraction=fraction, seed=seed)
    for label in set(labels):
        assert int(mask[tensor == label].sum()) == round(fraction * labels.count(label))
    assert torch.equal(mask, stratified_mask(tensor, fraction=fraction, seed=seed))


def test_seed_decides_the_split() -> None:
    """Another seed holds out other samples."""
    labels = torch.zeros(100, dtype=torch.int64)
    first, second = (stratified_mask(labels, fraction=0.5, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_idx_directory(tmp_path: Path) -> None:
    """A directory with the four files gives both splits."""
    write_idx(tmp_path, "train", count=20, size=6)
    write_idx(tmp_path, "t10k", count=10, size=6)
    data = load_images(tmp_path)
    assert (len(data.train), len(data.test)) == (20, 10)
    assert data.train[0][0].shape == (1, 6, 6)


def test_sizes_differ(tmp_path: Path) -> None:
    """Training and test images of different size are refused."""
    write_idx(tmp_path, "train", count=20, size=6)
    write_idx(tmp_path, "t10k", count=10, size=5)
    with pytest.raises(DataError) as caught:
        load_images(tmp_path)
    assert str(caught.value) == (
        f"wanted test images of 6x6 pixels like the training images, got 5x5 in {tmp_path}; "
        "put files of one data set there"
    )


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the message offers both ways on."""
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_images()
    assert str(caught.value) == (
        "wanted scikit-learn, which holds the bundled digits, got no such package; "
        "run `pip install ridgeline[digits]`, or give IDX files with `--data DIR`"
    )


def test_the_digits_are_those_of_scikit_learn_which_is_not_imported() -> None:
    """Its import, and that of SciPy, would take longer than all of a prediction of the task."""
    code = (
        "import sys; from ridgeline.tasks.images import load_images; data = load_images(); "
        "assert not {'sklearn', 'scipy'} & set(sys.modules), 'imported'; "
        "from sklearn.datasets import load_digits; import torch; "
        "pixels = torch.cat([data.train.images, data.test.images]).sum(); "
        "labels = torch.cat([data.train.labels, data.test.labels]).bincount(); digits = load_digits(); "
        "assert pixels == digits.images.sum() and labels.tolist() == [sum(digits.target == n) for n in range(10)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scikit_learn_without_its_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where they were looked for."""
    spec = ModuleSpec("sklearn", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(images, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=f"got none in {tmp_path}; run"):
        load_images()


DIGITS = load_images()
