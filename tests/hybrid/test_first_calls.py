"""Callables whose first call is another one: it fills a cache, or looks at the first batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.callables.calls.dispatch import WRITING
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution

MODES: tuple[Any, ...] = ("script", "compiled", "auto")


class Normalizing(nn.Module):
    """Scales and shifts as the first batch tells, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1.0 / x.std(0))
            self.is_ready = True
        return (x + self.shift) * self.scale


class Rotating(nn.Module):
    """Keeps a table for each length that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = nn.Linear(4, 4), {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0.0, 1.0, len(x))[:, None]
        return self.linear(x) * self.tables[len(x)]


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator) * 3.0 + 1.0 for _ in range(4)]


@pytest.mark.parametrize("mode", MODES)
def test_the_first_batch_is_the_first_that_is_given(mode: Execution) -> None:
    """Not the example, nor another; and again where the user asks for it: both went by without an error."""
    example, *batches = _batches()
    mine, plain = Normalizing(), Normalizing()
    with hybridize(mine, example, mode, budget_s=4.0) as hybrid, torch.no_grad():
        assert not mine.is_ready
        for _ in range(3):
            for batch in batches:
                torch.testing.assert_close(hybrid(batch), plain(batch))
                torch.testing.assert_close(mine.state_dict(), plain.state_dict())
            mine.is_ready = plain.is_ready = False
        counters = hybrid.report.counters
    assert counters["rebuilds"] == 0
    assert counters["eager_calls"] == (3 if hybrid.mode != "eager" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_is_filled_by_a_call_of_the_user(mode: Execution) -> None:
    """Making the form leaves nothing in it, and then it is captured with what that call has put there."""
    example, *batches = _batches()
    mine = Rotating()
    plain = copy.deepcopy(mine)
    with hybridize(mine, example, mode, budget_s=4.0) as hybrid, torch.no_grad():
        assert mine.tables == {}
        for index, batch in enumerate(batches):
            torch.testing.assert_close(hybrid(batch), plain(batch))
            assert list(mine.tables) == [8], index
        report = hybrid.report
    if hybrid.mode != "eager":
        assert report.counters == {"eager_calls": 1, "shapes": 2, "rebuilds": 1}
        assert any(note.startswith(WRITING) for note in report.notes)


def test_a_refusal_leaves_no_cache_either() -> None:
    """Of a callable that fills one, and counts its calls as well."""
    model = Rotating()
    model.register_forward_hook(lambda module, *_: setattr(module, "calls", module.calls + 1))
    model.calls = 0
    with pytest.raises(CaptureError, match=r"got one that writes Rotating\.calls \(a "):
        hybridize(model, torch.ones(8, 4), "compiled")
    assert model.tables == {}
    assert model.calls == 0


def test_what_writes_with_every_further_call_is_read_twice() -> None:
    """A setting under which it counts: such calls run as written, and what was captured goes on serving."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.counts, self.calls = False, 0

        def forward(self, x: Tensor) -> Tensor:
            if self.counts:
                self.calls += 1
            return super().forward(x)

    model, x = Counting(), torch.randn(8, 4)
    with hybridize(model, x, "compiled") as hybrid:
        for counts in (False, True, False):
            model.counts = counts
            for _ in range(4):
                torch.testing.assert_close(hybrid(x), model(x).detach())
        assert model.calls == 8
        assert hybrid._dispatch._num_readings == 2
        assert hybrid.report.counters["eager_calls"] == 4


def test_static_inputs_and_lanes_want_the_first_call_made() -> None:
    """Nobody would make it afterwards: a bare replay looks at nothing, and lanes are planned once."""
    x = torch.randn(8, 4)
    for make in (
        lambda model: hybridize(model, x, "compiled", static_io=True),
        lambda model: rl.parallelize(model, x, mode="serial"),
    ):
        model = Rotating()
        with pytest.raises(CaptureError, match="where only a first call does it, make that before"):
            make(model)
        assert model.tables == {}
        wanted = model(x)
        with make(model) as made, torch.no_grad():
            torch.testing.assert_close(made(x), wanted.detach())


def test_a_saved_callable_has_its_caches(tmp_path: Path) -> None:
    """And the one that was saved holds nothing of it, least of all tensors of a trace."""
    model, x = Rotating(), torch.randn(8, 4)
    with hybridize(model, x, "eager") as hybrid:
        path = hybrid.save(tmp_path / "rotating.pt2")
    assert model.tables == {}
    torch.testing.assert_close(rl.load(path)(x), model(x).detach())
