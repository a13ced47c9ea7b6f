"""What is made in the package lies where its code says, whatever a user set as the default device."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.plan import Execution

SOURCE = Path(rl.__file__).parent
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
)


def homeless(text: str) -> list[int]:
    """Lines of calls that make a tensor and do not say where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_factory_names_a_device() -> None:
    """Tasks and experiments make what a user's script would, where that would."""
    assert homeless("torch.zeros(2)\ntorch.ones(2, device='cpu')\nx.zeros(3)") == [1]
    files = [f for f in SOURCE.rglob("*.py") if not {"tasks", "experiments"} & {*f.parts}]
    found = {str(file.relative_to(SOURCE)): homeless(file.read_text()) for file in files}
    assert len(found) > 100
    assert {file: lines for file, lines in found.items() if lines} == {}


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("mode", ["script", "eager"])
def test_calls_are_checked_on_the_device_of_their_arguments(mode: Execution) -> None:
    """`meta` stands for any other device: what is made there has no values."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 3), nn.Tanh()), torch.randn(4, 6)
    with torch.no_grad():
        wanted = model(x)
    with torch.device("meta"), rl.hybridize(model, x, mode=mode) as hybrid:
        torch.testing.assert_close(hybrid(x), wanted)


def test_steps_and_feeds_run_on_the_device_of_the_model() -> None:
    """Losses are those without a default device."""
    losses = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)  # Adam counts on the default device
        batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
        with (
            torch.device(device),
            rl.TrainStep(model, classify, optimizer, rl.Plan(), device="cpu") as step,
            rl.feed(batches, "cpu") as feed,
        ):
            losses.append([float(step(batch)) for batch in feed])
            step.timeline()
    assert losses[0] == losses[1]
