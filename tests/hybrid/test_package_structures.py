"""What a package can say of the structure of arguments and results."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.packages.callables import package_callable


class Boxes(NamedTuple):
    corners: Tensor
    scores: Tensor


@pytest.mark.parametrize("wrap", [lambda boxes: boxes, lambda boxes: {"first": [boxes]}])
def test_a_named_tuple_is_refused_by_its_name(wrap: Any) -> None:
    """A process that loads the program has no such class; torch's message told of its registry."""
    with pytest.raises(
        CaptureError, match=r"got a Boxes, which a process that loads .* a nest of the"
    ):
        package_callable(lambda x: wrap(Boxes(x + 1, x * 2)), torch.ones(3))
