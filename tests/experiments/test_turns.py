"""What every experiment shares: fair turns, ratios, break-even, and the loop that everybody writes."""

import pytest
import torch
from tiny_cases import sgd, tiny

from ridgeline.experiments.hybrid.result import break_even
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.turns import take_turns, times_faster
from ridgeline.tasks.images import cross_entropy


def test_turns_alternate() -> None:
    """Every rival gives one figure a turn, and every second turn goes the other way round."""
    order = []

    def figure(name: str) -> float:
        order.append(name)
        return float(len(order))

    rivals = {name: (lambda name=name: figure(name)) for name in "abc"}
    samples = take_turns(rivals, turns=3)
    assert "".join(order) == "abccbaabc"
    assert samples == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_turns_end_with_their_time() -> None:
    """Without time left there are the least turns, and no more."""
    assert len(take_turns({"a": lambda: 1.0}, turns=50, limit_s=0.0, least=4)["a"]) == 4
    assert len(take_turns({"a": lambda: 1.0}, turns=2, limit_s=0.0, least=4)["a"]) == 2


def test_ratios_are_taken_turn_by_turn() -> None:
    """A change of speed that meets a whole turn leaves the ratio as it is."""
    samples = {"a": [2.0, 20.0, 4.0], "b": [1.0, 10.0, 1.0]}
    faster = times_faster(samples, "a")
    assert (faster["a"].value, faster["b"].value) == (1.0, 2.0)
    assert (faster["b"].low, faster["b"].high, faster["b"].unit) == (2.0, 3.0, "x")


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ((10.0, 0.5, 0.0, 1.0), 20),
        ((10.0, 0.5, 2.0, 1.0), 16),
        ((10.0, 0.4, 0.0, 1.0), 17),
        ((0.0, 0.5, 1.0, 1.0), 1),
        ((10.0, 1.0, 0.0, 1.0), None),
        ((10.0, 2.0, 0.0, 1.0), None),
    ],
)
def test_break_even(arguments: tuple[float, ...], calls: int | None) -> None:
    """The first call at which the total with preparing is no longer above that without; or never."""
    assert break_even(*arguments) == calls
    if calls is not None:
        prepare, call, base_prepare, base = arguments
        assert prepare + calls * call <= base_prepare + calls * base + 1e-9


def test_plain_step_is_the_loop() -> None:
    """The peers' step is zero gradients, forward, backward and optimizer, and nothing else."""
    case = tiny("step")
    batches = case.batches()
    mine, theirs = case.model_on_device(), case.model_on_device()
    step, optimizer = PlainStep(mine, mine, cross_entropy, sgd(mine)), sgd(theirs)
    for batch in batches:
        optimizer.zero_grad()
        loss = cross_entropy(theirs, batch)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(batch), loss.detach())
    assert all(
        torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )


def test_figures_are_told_after_every_turn() -> None:
    """All rivals have as many of them then."""
    told: list[list[int]] = []
    rivals = {"a": lambda: 1.0, "b": lambda: 2.0}
    take_turns(rivals, turns=3, each=lambda found: told.append([len(f) for f in found.values()]))
    assert told == [[1, 1], [2, 2], [3, 3]]
