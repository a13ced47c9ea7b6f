"""A step whose modules another step draws random numbers for keeps their order in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, profiling
from ridgeline.probe.measure import Known
from ridgeline.reach.moved_draws import moved_draws
from strategies import make_machine

WHY = (
    "another step runs modules of this one, and draws random numbers for what they compute, in paths "
    "(test_neighbours.py:{}): with the channels innermost these would land in other pixels; "
    "allow=('random',) compares it too"
)


def score(generator: nn.Module, batch: Any) -> Tensor:
    return generator(batch).square().mean()


def paths(generator: nn.Module, batch: Any) -> Tensor:
    """A penalty that draws a direction for each image, as StyleGAN2's does."""
    images = generator(batch)
    return (images * torch.randn_like(images)).sum().square()


def dropped(critic: nn.Module, batch: Any) -> Tensor:
    return nn.functional.dropout(critic(batch), 0.5).mean()


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 3, padding=1)
    )
    return generator, *(torch.optim.SGD(generator.parameters(), 1e-3) for _ in range(2))


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plan is eager, with the channels innermost wherever that is compared."""
    threads = torch.get_num_threads()
    machine = make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=threads)])
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", lambda: Known(machine, tmp_path))
    right = choice.choose

    def choose(*arguments: Any, **more: Any) -> rl.Ranking:
        fixed = {"memory_format": "channels_last", **more["fixed"], "execution": "eager"}
        return right(*arguments, **{**more, "fixed": fixed})

    monkeypatch.setattr(choice, "choose", choose)


def trained(*, with_penalty: bool, **more: Any) -> tuple[list[rl.TrainStep], nn.Module]:
    generator, optimizer, other = make()
    steps = [rl.TrainStep(generator, score, optimizer, device="cpu", progress=str, **more)]
    if with_penalty:
        steps.append(rl.TrainStep(generator, paths, other, rl.Plan(), device="cpu"))
    torch.manual_seed(1)
    for _ in range(3):
        batch = torch.randn(2, 4, 6, 6)
        for step in steps:
            step(batch)
    return steps, generator


@pytest.mark.usefixtures("moved")
def test_two_steps_on_one_model_train_as_a_plain_loop_does() -> None:
    """One of them draws numbers for its images; bit for bit."""
    plain, *optimizers = make()
    torch.manual_seed(1)
    for _ in range(3):
        batch = torch.randn(2, 4, 6, 6)
        for loss_fn, optimizer in zip((score, paths), optimizers, strict=True):
            optimizer.zero_grad()
            loss_fn(plain, batch).backward()
            optimizer.step()
    steps, generator = trained(with_penalty=True)
    for mine, theirs in zip(generator.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ranking = steps[0].ranking
    assert ranking is not None
    format_ = ranking.choice("memory_format")
    assert (format_.value, format_.origin) == ("as-is", "default")
    assert format_.reason == WHY.format(paths.__code__.co_firstlineno)
    for step in steps:
        step.close()


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize(
    "more", [{"with_penalty": False}, {"with_penalty": True, "allow": ("random",)}]
)
def test_other_memory_is_compared_where_nothing_else_draws_or_that_is_allowed(more: Any) -> None:
    steps, _ = trained(**more)
    assert steps[0].plan.memory_format == "channels_last"
    for step in steps:
        step.close()


def test_only_draws_for_modules_of_the_model_count() -> None:
    """By code of the loss, by code of a module, and by dropout that torch has as a module."""
    generator, *_ = make()
    flat = nn.Linear(2, 2)
    assert moved_draws(generator, generator, paths).startswith("paths (")
    assert moved_draws(generator, nn.Sequential(generator), dropped).startswith("dropped (")
    assert moved_draws(generator, flat, lambda model, batch: model(paths(generator, batch)))
    assert moved_draws(generator, nn.Sequential(generator, nn.Dropout()), score) == "Dropout"
    assert not moved_draws(generator, generator, score)
    assert not moved_draws(generator, nn.Sequential(generator, nn.Dropout2d()), score)
    assert not moved_draws(generator, nn.Conv2d(4, 8, 3), paths)
    assert not moved_draws(flat, flat, paths)
