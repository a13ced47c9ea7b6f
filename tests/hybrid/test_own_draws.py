"""Generators of Python's that a program owns, and what `random` draws: no form draws the same again."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import RidgelineError
from ridgeline.guards.reading import UnreadableError, read_program
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")

OWN = random.Random(3)


def _number(generator: random.Random) -> float:
    return generator.random()


def _whole_number(generator: random.Random) -> float:
    return float(generator.randint(1, 5))


def _branch(generator: random.Random) -> float:
    return 2.0 if generator.uniform(0, 1) < 0.5 else 1.0


def _of_a_global(_: random.Random) -> float:
    return OWN.random()


def _seeded(generator: random.Random) -> float:
    return random.Random(generator.randrange(100)).random()


Draw = Callable[[random.Random], float]
DRAWS: list[Draw] = [_number, _whole_number, _branch, _of_a_global, _seeded]
draws = pytest.mark.parametrize("draw", DRAWS)


class Net(nn.Module):
    """Scales by what it draws from a generator of its own."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = random.Random(7)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        """Of a linear layer."""
        return self.linear(x) * self.draw(self.generator)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _losses(draw: Draw, execution: Any) -> tuple[list[float], object]:
    torch.manual_seed(0)
    OWN.seed(3)
    model = Net(draw)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = torch.randn(6, 2, 4)
    with PlannedStep(model, _loss, optimizer, Plan(execution=execution)) as step:
        return [float(step(x)) for x in batches], model.generator.getstate()


@draws
def test_compiled_steps_draw_as_written(draw: Draw) -> None:
    """Each step draws the next number, and the generator stands where it would."""
    wanted, state = _losses(draw, "eager")
    losses, left = _losses(draw, "compiled")
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert left == state


@draws
def test_programs_in_one_piece_are_refused(draw: Draw) -> None:
    """With the way out; a generator of the module's is where it was."""
    model = Net(draw)
    before = model.generator.getstate(), OWN.getstate()
    with pytest.raises(RidgelineError, match=r"of a random\.Random, whose state is Python's"):
        hybridize(model, torch.randn(2, 4), mode="script")
    assert (model.generator.getstate(), OWN.getstate()) == before


def test_the_refusal_says_what_to_do() -> None:
    """With the line."""

    def program(generator: Any, x: Any) -> Any:
        return x * _number(generator)

    line = _number.__code__.co_firstlineno + 1
    with pytest.raises(UnreadableError) as caught:
        read_program(program, {"generator": random.Random(7), "x": torch.ones(4)})
    assert str(caught.value) == (
        "wanted a program that torch's compiler can read in one piece, got random() of a random.Random, whose "
        "state is Python's, where a captured program does not look; draw outside and pass what it gives, or "
        f"draw with torch (test_own_draws.py:{line} in _number)"
    )


def test_a_generator_that_a_program_makes_is_refused() -> None:
    """Unseeded ones would be the same in every call."""

    def program(x: Any) -> Any:
        return x * random.Random().random()

    with pytest.raises(UnreadableError, match=r"got random\.Random\(\), whose state is Python's"):
        read_program(program, {"x": torch.ones(4)})


@pytest.mark.parametrize("draw", [random.uniform, random.randint])
def test_what_python_draws_is_refused_by_name(draw: Callable[[int, int], float]) -> None:
    """Numbers that the compiler asks for in every call, and none is drawn."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw(1, 5)

    before = random.getstate()
    with pytest.raises(RidgelineError, match="got one that writes Python's random numbers"):
        hybridize(Drawing(), torch.randn(2, 4), mode="script")
    assert random.getstate() == before


def test_what_others_compile_is_as_before() -> None:
    """Their programs draw what torch's compiler draws."""

    def program(x: Tensor, generator: random.Random) -> Tensor:
        return x * generator.random()

    run = torch.compile(program, backend="eager", fullgraph=True)
    assert torch.equal(
        run(torch.ones(2), random.Random(7)), torch.full((2,), random.Random(7).random())
    )


class Counted:
    """A batch that counts who read it, beside generators."""

    def __init__(self, x: Tensor, seed: int) -> None:
        self.x = x
        self.reads = 0
        self.torch = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)


def test_what_a_batch_brings_along_is_used_once() -> None:
    """Checks run the first step several times: generators and counters of its batch are put back."""

    def loss(model: nn.Module, batch: Counted) -> Tensor:
        batch.reads += 1
        noise = torch.randn(batch.x.shape, generator=batch.torch)
        return model(batch.x + batch.python.random() * noise).square().mean()

    def run(execution: Any) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batches = [Counted(torch.randn(2, 4), seed) for seed in range(4)]
        with PlannedStep(model, loss, optimizer, Plan(execution=execution)) as step:
            return [float(step(batch)) for batch in batches], [batch.reads for batch in batches]

    losses, reads = run("compiled")
    wanted, _ = run("eager")
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert reads == [1, 1, 1, 1]
