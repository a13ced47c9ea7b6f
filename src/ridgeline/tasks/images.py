"""Labelled grey images in memory: the bundled handwritten digits, or IDX files; loss and metric."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ridgeline.errors import DataError
from ridgeline.tasks.idx import read_split

TEST_FRACTION = 0.2
SPLIT_SEED = 0


class ImageData(Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset of (image float32 [1, H, W], label int64 []), scaled to mean 0, deviation 1.

    Pixels stay bytes in memory and are scaled when taken, which needs a quarter of the memory.

    Images are uint8 [N, H, W], labels int64 [N]; mean and deviation are in pixel values.
    """

    # Samples depend on their indices alone, so that training may take small batches several at once.
    is_pure = True

    def __init__(self, images: Tensor, labels: Tensor, *, mean: float, deviation: float) -> None:
        self.images = images
        self.labels = labels
        self.mean = mean
        self.deviation = deviation
        # As a tensor it decides the dtype of the difference, whatever the default dtype is.
        self._mean = torch.tensor(mean, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch(torch.tensor([index]))
        return images[0], labels[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A collated batch: images float32 [N, 1, H, W] and labels int64 [N] of int64 indices [N].

        Cost: allocates the batch; one gather instead of a Python loop over samples.
        """
        # `index_select`, and a subtraction that converts: half the operators of the plain spelling, which a
        # step of half a millisecond notices.
        images = self.images.index_select(0, indices).unsqueeze(1)
        return images.sub(self._mean).div_(self.deviation), self.labels.index_select(0, indices)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Training and test images of one source; both are scaled by the statistics of the training part."""

    train: ImageData
    test: ImageData


def load_images(data_dir: str | Path | None = None) -> Images:
    """Images from IDX files in `data_dir`, or the bundled digits when it is None.

    Raises:
        DataError: A file is missing or damaged, or scikit-learn, which holds the digits, is missing.
    """
    if data_dir is None:
        return _digits()
    directory = Path(data_dir)
    train_images, train_labels = read_split(directory, "train")
    test_images, test_labels = read_split(directory, "t10k")
    if test_images.shape[1:] != train_images.shape[1:]:
        raise DataError(
            f"wanted test images of {_size(train_images)} pixels like the training images, got "
            f"{_size(test_images)} in {directory}; put files of one data set there"
        )
    return _scaled(train_images, train_labels, test_images, test_labels)


def _digits() -> Images:
    """1797 handwritten digits of 8x8 pixels, 80 % of every class for training.

    Source: scikit-learn's copy of the UCI optical recognition of handwritten digits test set.
    """
    rows = torch.from_numpy(np.loadtxt(_digits_file(), delimiter=",", dtype=np.uint8))
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].to(torch.int64)
    is_test = stratified_mask(labels, fraction=TEST_FRACTION, seed=SPLIT_SEED)
    return _scaled(images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def _digits_file() -> Path:
    """Where scikit-learn keeps the digits; its import, and that of SciPy, would take a second."""
    found = find_spec("sklearn")
    places = [] if found is None else found.submodule_search_locations or []
    for place in places:
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return path
    got = "no such package" if found is None else f"none in {', '.join(places)}"
    raise DataError(
        f"wanted scikit-learn, which holds the bundled digits, got {got}; "
        "run `pip install ridgeline[digits]`, or give IDX files with `--data DIR`"
    )


def stratified_mask(labels: Tensor, *, fraction: float, seed: int) -> Tensor:
    """Which samples to hold out: bool [N], `round(fraction * count)` of every class, set by `seed`.

    Labels are int64 [N]; the fraction, of every class, is between 0 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    is_held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        is_held[members[order[: round(fraction * len(members))]]] = True
    return is_held


def _scaled(
    train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor
) -> Images:
    pixels = train_images.to(torch.float32)
    mean = float(pixels.mean())
    # Images of one single value have no deviation; they are then only shifted.
    deviation = float(pixels.std(correction=0)) or 1.0
    return Images(
        train=ImageData(train_images, train_labels, mean=mean, deviation=deviation),
        test=ImageData(test_images, test_labels, mean=mean, deviation=deviation),
    )


def _size(images: Tensor) -> str:
    return f"{images.shape[1]}x{images.shape[2]}"


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch: images [N, C, H, W] float32, labels [N] int64, to a scalar."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def count_correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Number of images whose likeliest class is their label, as a scalar int64 tensor."""
    images, labels = batch
    return (model(images).argmax(dim=1) == labels).sum()
