"""Weight gradients on a second stream: those of one stream, in every replay."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from ridgeline.plan import Execution, Plan
from ridgeline.programs import inductor
from ridgeline.programs.beside import gradients
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tasks.resnet18 import ResNet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_STEPS = 20


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradients_of(execution: Execution, layout: torch.memory_format) -> tuple[Any, PlannedStep]:
    """The gradients of each of some steps, most of them replays, that leave the parameters as they are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # In double precision: rounding that batch norm amplifies and a ReLU turns into a jump stays far below a
    # race. It is also slow, so that whoever does not wait for the second stream reads what is not there yet.
    model = ResNet18(10).cuda().to(dtype=torch.float64, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    generator = torch.Generator().manual_seed(1)
    found = []
    with PlannedStep(
        model, loss_fn, optimizer, Plan(execution=execution, kernels="combined")
    ) as step:
        for _ in range(NUM_STEPS):
            x = torch.randn(8, 1, 16, 16, generator=generator)
            step((x.cuda().double(), torch.randint(0, 10, (8,), generator=generator).cuda()))
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found, step


def read_early(code: str) -> list[str]:
    """Lines of generated code that read a result made beside before it is joined."""
    found, names = [], set[str]()
    for line in re.sub(r" *#.*", "", code).splitlines():
        made = re.match(r" *(\w+) = torch\.ops\.ridgeline\.(conv_weight_gradient|product)", line)
        renamed = re.fullmatch(r" *(\w+) = (\w+)", line)
        if made:
            names.add(made[1])
        elif renamed and renamed[2] in names:
            names.add(renamed[1])
        elif "ridgeline.join" in line or re.match(r"def |    def ", line):
            names.clear()
        elif names & set(re.findall(r"\w+", line)) and not re.match(r" *(del|assert_\w+)\b", line):
            found.append(line)
    return found


def check_same(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """But for rounding: a race would give other numbers altogether."""
    assert len(got[-1]) == len(want[-1]) > 50
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """No program comes from a cache; a `monkeypatch` would take the setting away, since it has an alias."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("execution", "layout"),
    [
        ("compiled+graph", torch.contiguous_format),
        ("compiled+graph", torch.channels_last),
        ("regional+graph", torch.contiguous_format),
    ],
)
def test_gradients_are_those_of_one_stream(
    monkeypatch: pytest.MonkeyPatch, execution: Execution, layout: torch.memory_format
) -> None:
    """Also where both streams are joined after every operator; and nothing falls back to plain options."""
    moved: list[int] = []
    put_beside = gradients.put_beside

    def counted(*args: Any, **settings: Any) -> int:
        moved.append(put_beside(*args, **settings))
        return moved[-1]

    monkeypatch.setattr(gradients, "put_beside", counted)
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "replayed_options", lambda **_: inductor.plain_options())
        want, _ = gradients_of(execution, layout)
    assert not moved
    for most_kept in (gradients.MOST_KEPT_BYTES, 0):
        moved.clear()
        monkeypatch.setattr(gradients, "MOST_KEPT_BYTES", most_kept)
        (got, step), codes = run_and_get_code(gradients_of, execution, layout)
        code = "\n".join(codes)
        assert "ridgeline.join" in code
        assert not read_early(code)
        assert sum(moved) >= 8
        assert not [note for note in step.notes if "plain options" in note]
        check_same(got, want)
