"""Buffers on their way to other workers: copied out and in as one tensor, and otherwise left alone."""

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import WorkloadError
from ridgeline.workers.buffers import FlatBuffers


def model_of(buffers: dict[str, Tensor]) -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    for name, value in buffers.items():
        model.register_buffer(name, value.clone())
    return model


BUFFERS = {
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0),
    "one": torch.tensor(1.5),
    "wave": torch.tensor([[1 + 2j]]),
    "narrow": torch.tensor([0.5], dtype=torch.bfloat16),
    "last": torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
}


def test_all_buffers_travel_in_one_tensor() -> None:
    """Whatever their types, shapes and strides; what arrives is what was sent."""
    model, other = model_of(BUFFERS), model_of({n: torch.zeros_like(b) for n, b in BUFFERS.items()})
    sender, receiver = FlatBuffers(model), FlatBuffers(other)
    (sent,), (arrived,) = sender.flats, receiver.flats
    sender.pack()
    arrived.copy_(sent)
    receiver.unpack()
    for (name, want), (_, got) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(want, got), name


def test_buffers_stay_what_they_are() -> None:
    """Models may hold them elsewhere too; each is filled where it is, or where the model put a new one."""
    model = model_of({})
    mean = model[0].running_mean
    flat = FlatBuffers(model)
    assert model[0].running_mean is mean
    model[0].running_var = fresh = torch.full((3,), 7.0)
    flat.pack()
    fresh.zero_()
    flat.unpack()
    assert model[0].running_var is fresh
    assert fresh.tolist() == [7.0, 7.0, 7.0]


def test_writing_or_exchanging_a_buffer_is_noticed() -> None:
    """So that it is sent again; sending itself is no change."""
    model = model_of({})
    flat = FlatBuffers(model)
    before = flat.versions
    flat.pack()
    assert flat.versions == before
    model[0].running_mean.add_(1)
    written = flat.versions
    assert written != before
    model[0].running_mean = torch.zeros(3)
    assert flat.versions != written


def test_buffers_that_cannot_be_sent_are_refused() -> None:
    """By name, before a collective is given memory that does not hold what it is told."""
    wide, thin = nn.Module(), nn.Module()
    wide.register_buffer("wide", torch.arange(4).expand(200, -1))
    thin.register_buffer("thin", torch.eye(3).to_sparse())
    with pytest.raises(WorkloadError, match="got an expanded one, wide; register a clone"):
        FlatBuffers(wide)
    with pytest.raises(WorkloadError, match="got the sparse thin; make it dense"):
        FlatBuffers(thin)
    model = model_of({})
    flat = FlatBuffers(model)
    model[0].running_mean = torch.zeros(5)
    message = r"wanted the buffer 0.running_mean of shape \(3,\) and torch.float32 as at the first step, got \(5,\)"
    with pytest.raises(WorkloadError, match=message):
        flat.pack()
