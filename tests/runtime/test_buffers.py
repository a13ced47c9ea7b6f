"""Buffers as views of one tensor: sent as one, but each with a history of its own."""

import torch
from torch import nn

from ridgeline.runtime.buffers import FlatBuffers


def test_all_buffers_are_one_tensor() -> None:
    """Whatever their types and shapes, one broadcast moves them all, and their values stay."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    wanted = {
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0),
        "one": torch.tensor(1.5),
    }
    wanted |= {
        "wave": torch.tensor([[1 + 2j]]),
        "narrow": torch.tensor([0.5], dtype=torch.bfloat16),
    }
    for name, value in wanted.items():
        model.register_buffer(name, value.clone())
    (flat,) = FlatBuffers(model).flats
    assert all(torch.equal(getattr(model, name), value) for name, value in wanted.items())
    flat.zero_()
    assert all(not bool(buffer.any()) for buffer in model.buffers())
    places = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    assert len(places) == len(list(model.buffers())), "a compiler takes them for unrelated"


def test_buffers_share_memory_and_not_their_counters() -> None:
    """A broadcast fills every buffer, and a write into one is no change of another for autograd."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    flat = FlatBuffers(model)
    before = flat.versions
    for tensor in flat.flats:
        tensor.zero_()
    assert not any(bool(buffer.any()) for buffer in model.buffers())
    assert flat.versions == before
    first, second = model[0].running_mean, model[1].running_mean
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    version = second._version
    first.add_(1)
    assert second._version == version
    assert flat.versions != before
