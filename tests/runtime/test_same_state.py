"""What tells that workers hold different state: checksums, signals, and the words for it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.runtime.layout import same_state
from ridgeline.runtime.layout.same_state import checksums, content_bits, difference
from ridgeline.runtime.sync import outside_writes
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.outside_writes import MOST_APART, OutsideWrites, is_reason
from ridgeline.workers.world import World

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@given(
    st.sampled_from([1, 7, 4095, 4096, 4097, 9000]),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_a_checksum_tells_of_each_element(
    size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """One element with other bits changes it; a copy in other memory does not."""
    tensor = torch.arange(size).to(dtype)
    place = data.draw(st.integers(0, size - 1))
    other = tensor.clone()
    other[place] = (
        ~other[place] if dtype == torch.bool else other[place] + 256 * (dtype != torch.uint8) + 3
    )
    strided = torch.stack([tensor, tensor], 1)[:, 0]
    mine, same, changed = checksums([tensor, strided, other])
    assert mine == same
    assert (mine == changed) == torch.equal(tensor, other)


@given(st.sampled_from([2, 4096, 8192, 9000]), st.data())
def test_a_checksum_tells_of_places(size: int, data: st.DataObject) -> None:
    """Two elements exchanged change it."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    other = tensor.clone()
    other[places] = tensor[places[::-1]]
    mine, changed = checksums([tensor, other])
    assert mine != changed


@given(st.integers(2, 200), st.data())
def test_one_worker_that_wrote_is_heard(size: int, data: st.DataObject) -> None:
    """And settings in which workers differ; nothing where all are quiet and have the same."""
    scale = data.draw(st.sampled_from([1.0, 1.0 / size, 0.5]))
    bits = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    quiet = [size * scale, 0.0, *(size * scale * bit for bit in bits)]
    assert not is_reason(quiet)
    number = data.draw(st.integers(1, size - 1))
    assert is_reason([quiet[0], number * scale, *quiet[2:]])
    place = data.draw(st.integers(2, 9))
    assert is_reason([*quiet[:place], number * scale, *quiet[place + 1 :]])


def test_a_step_without_an_exchange_says_nothing() -> None:
    assert not is_reason([0.0] * 10)


@pytest.mark.parametrize(
    ("everyone", "wanted"),
    [
        (
            [{"parameter a": "1", "parameter b": "2"}, {"parameter a": "1", "parameter b": "3"}],
            "another parameter b on rank 1 than on rank 0 (1 of 2 tensors and settings differ)",
        ),
        (
            [
                {"parameter a": "1"},
                {"parameter a": "1"},
                {"parameter a": "2"},
                {"parameter a": "3"},
            ],
            "another parameter a on ranks 2 and 3 than on rank 0 (1 of 1 tensors and settings differ)",
        ),
        (
            [{"x": "1", "optimizer state m": "1"}, {"x": "1"}, {"x": "1"}],
            "optimizer state m on rank 0 and none on ranks 1 and 2 (1 of 2 tensors and settings differ)",
        ),
        (
            [{"x": "1"}, {"x": "1", "optimizer state m": "1"}],
            "optimizer state m on rank 1 and none on rank 0 (1 of 2 tensors and settings differ)",
        ),
        (
            [{"setting lr of group 0": "1"}, {"setting lr of group 0": "2"}, {}],
            "the setting lr of group 0 as 1 on rank 0, 2 on rank 1, nothing on rank 2 (1 of 1 tensors and settings differ)",
        ),
    ],
)
def test_the_first_difference_is_named(everyone: list[dict[str, str]], wanted: str) -> None:
    assert difference(dict(enumerate(everyone))) == wanted


@pytest.mark.parametrize("on_device", [False, True])
def test_on_a_gpu_what_arrived_is_read_without_waiting(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 64 steps, 64 steps later; on the CPU at once. What one worker wrote is said until then."""
    compared: list[int] = []
    number = 0

    def compare(*_: Any, **__: Any) -> None:
        compared.append(number)

    monkeypatch.setattr(outside_writes, "check_same_state", compare)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bucket = Bucket(0, list(model.named_parameters()), outside_writes.NUM_SIGNALS)
    reducer: Any = SimpleNamespace(buckets=(bucket,))
    world = World(0, 2, 0, torch.device("cpu"))
    writes = OutsideWrites(model, optimizer, reducer, world)
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(writes, "_on_device", on_device)
    monkeypatch.setattr(writes, "_copied", lambda signals: (signals.clone(), event))
    for number in range(4 * MOST_APART):
        if number == 70:
            with torch.no_grad():
                model.weight.zero_()
        writes.before_step()
        bucket.raise_flags(())
        writes.after_step()
    assert compared == [0, 3 * MOST_APART - 1 if on_device else 70]


@pytest.mark.parametrize(
    "change", [lambda t: 2 * t, torch.neg, lambda t: t.flip(0), lambda t: t + 1e-6]
)
def test_bits_tell_of_content(change: Any) -> None:
    """Of nearly all changes, also those that are alike in all elements: 8 bits miss one in 256."""
    torch.manual_seed(0)
    told = 0
    for _ in range(100):
        tensors = [torch.randn(30, 20), torch.randn(20)]
        bits = content_bits(tensors, 8)
        assert set(bits.tolist()) <= {0, 1}
        assert torch.equal(bits, content_bits([t.clone() for t in tensors], 8))
        told += not torch.equal(bits, content_bits([change(t) for t in tensors], 8))
    assert told >= 95


class _Kernels(TorchDispatchMode):
    """Counts the operators that make new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.counts[str(func.overloadpacket)] += not func.is_view
        return found


def _parameters() -> list[torch.Tensor]:
    torch.manual_seed(1)
    weights = [torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last) for _ in range(40)]
    return [*weights, *(torch.randn(7) for _ in range(40)), torch.tensor(2.0), torch.empty(0)]


def test_bits_of_many_tensors_take_few_kernels() -> None:
    """As many for 82 tensors as for 20, and none is copied by itself."""
    tensors = _parameters()
    with _Kernels() as few:
        content_bits(tensors[:20], 8)
    with _Kernels() as many:
        content_bits(tensors, 8)
    assert sum(many.counts.values()) == sum(few.counts.values())
    assert not many.counts["aten.clone"]


@pytest.mark.parametrize("line_bytes", [1, 2000, 1 << 20])
def test_bits_tell_of_one_element_in_many_tensors(
    line_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors are put together."""
    monkeypatch.setattr(same_state, "_LINE_BYTES", line_bytes)
    tensors = _parameters()
    bits, told = content_bits(tensors, 8), 0
    for place in range(80):
        others = [tensor.clone() for tensor in tensors]
        others[place].view(torch.int32).add_(1) if place % 2 else others[place][0].neg_()
        told += not torch.equal(bits, content_bits(others, 8))
    assert told >= 76


def test_a_rate_in_a_tensor_is_told_and_named_by_its_value() -> None:
    """Schedulers write it in place."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5))
    bucket = Bucket(0, list(model.named_parameters()), outside_writes.NUM_SIGNALS)
    reducer: Any = SimpleNamespace(buckets=(bucket,))
    writes = OutsideWrites(model, optimizer, reducer, World(0, 2, 0, torch.device("cpu")))
    said = []
    for rate in (0.5, 0.5, 0.25):
        optimizer.param_groups[0]["lr"].fill_(rate)
        writes._code_settings()
        said.append(writes._code)
        assert dict(same_state.setting_entries(optimizer))["setting lr of group 0"] == rate
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_said_depends_on_content_in_some_steps(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 2nd, 4th, 8th and so on, at last each 64th; on GPUs each 64th. Others say the settings alone."""
    monkeypatch.setattr(outside_writes, "check_same_state", lambda *_, **__: None)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bucket = Bucket(0, list(model.named_parameters()), outside_writes.NUM_SIGNALS)
    writes = OutsideWrites(
        model,
        optimizer,
        SimpleNamespace(buckets=(bucket,)),  # type: ignore[arg-type]
        World(0, 2, 0, torch.device("cpu")),
    )
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(writes, "_on_device", on_device)
    monkeypatch.setattr(writes, "_copied", lambda signals: (signals.clone(), event))
    said: list[list[float]] = []
    for _ in range(3 * MOST_APART):
        writes.before_step()
        said.append(bucket.sent_signals.tolist())
        bucket.raise_flags(())
        writes.after_step()
    others = [step for step, signals in enumerate(said, 1) if signals != said[0]]
    assert others == ([64, 128, 192] if on_device else [2, 4, 8, 16, 32, 64, 128, 192])
