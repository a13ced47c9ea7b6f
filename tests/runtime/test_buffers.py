"""Buffers as views of one tensor: sent as one, but each with a history of its own."""

import torch
from torch import nn

from ridgeline.runtime.buffers import FlatBuffers


def test_buffers_share_memory_and_not_their_counters() -> None:
    """A broadcast fills every buffer, and a write into one is no change of another for autograd."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    flat = FlatBuffers(model)
    before = flat.versions
    for tensor in flat.flats:
        tensor.fill_(3)
    assert all(bool((buffer == 3).all()) for buffer in model.buffers())
    assert flat.versions == before
    first, second = model[0].running_mean, model[1].running_mean
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    version = second._version
    first.add_(1)
    assert second._version == version
    assert flat.versions != before
