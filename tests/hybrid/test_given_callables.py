"""What `hybridize` cannot take at all is refused by name, in every mode."""

from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError


@pytest.mark.parametrize("mode", ["auto", "eager", "script"])
def test_what_is_not_callable_is_refused(mode: Any) -> None:
    """Arguments in the wrong order, say."""
    with pytest.raises(CaptureError) as caught:
        hybridize(torch.randn(2), nn.Linear(2, 2), mode)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "wanted a function or module, got Tensor in hybridize(...); give what is called, and an example of its "
        "arguments behind it"
    )


@pytest.mark.parametrize("mode", ["auto", "eager", "script"])
def test_tensors_without_values_are_refused(mode: Any) -> None:
    """A model that was made on `meta` to be filled later: nothing could be compared."""
    with pytest.raises(CaptureError) as caught:
        hybridize(nn.Linear(4, 2, bias=False, device="meta"), torch.randn(3, 4), mode)
    assert str(caught.value) == (
        "wanted tensors with values, got one of shape (2, 4) on the device 'meta'; move the example to a "
        "device, and fill a model there with .to_empty(device=...) and its weights"
    )
