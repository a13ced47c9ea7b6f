"""Models of a library that looks at values of a mask, or of a text without one, train as one program.

The library is a stand-in for `transformers`, with its names. Compiled programs are interpreted, and graphs emulated
on the CPU.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.callables.hybridize import hybridize
from ridgeline.capture.mask_looks import spare_looks
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
EXECUTIONS: tuple[Execution, ...] = ("compiled", "step-graph", "graph")
NAMES = (
    "transformers.masking_utils",
    "transformers.modeling_attn_mask_utils",
    "transformers.modeling_utils",
)
SOURCE = """
import torch

def is_torchdynamo_compiling():
    return torch.compiler.is_compiling()

def _ignore_causal_mask_sdpa(padding_mask, length):
    is_tracing = torch.jit.is_tracing() or is_torchdynamo_compiling()
    return bool(not is_tracing and padding_mask.all())

def _prepare_4d_attention_mask_for_sdpa(mask, dtype):
    is_tracing = torch.jit.is_tracing() or is_torchdynamo_compiling()
    if not is_tracing and torch.all(mask == 1):
        return None
    return (mask[:, None, None] == 1).expand(-1, 1, mask.shape[1], -1)

def _unmask(mask):
    return not is_torchdynamo_compiling()

def warn_if_padding_and_no_attention_mask(input_ids, attention_mask):
    if torch.jit.is_tracing() or is_torchdynamo_compiling():
        return
    if attention_mask is None and 0 in input_ids[:, [-1, 0]]:
        warnings.append("padded, and no mask was given")

warnings = []
"""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the library; what the compiler has kept of it would serve the next test."""
    torch.compiler.reset()
    for name in NAMES:
        module = types.ModuleType(name)
        exec(SOURCE, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules[NAMES[0]]
    torch.compiler.reset()


class Attending(nn.Module):
    """Attention with a mask of paddings, or without one where nothing is padded."""

    def __init__(self, kind: str, library: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.kind, self.library = kind, library

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words)[:, None]
        if self.kind == "causal":
            is_causal = self.library._ignore_causal_mask_sdpa(mask, words.shape[1])
            seen = None if is_causal else _causal(mask)
        elif self.kind == "none":
            self.library.warn_if_padding_and_no_attention_mask(words, None)
            is_causal, seen = True, None
        else:
            is_causal = False
            seen = self.library._prepare_4d_attention_mask_for_sdpa(mask, x.dtype)
        found: Tensor = nn.functional.scaled_dot_product_attention(
            x, x, x, attn_mask=seen, is_causal=is_causal
        )
        return found.square()


def _causal(mask: Tensor) -> Tensor:
    size = mask.shape[1]
    return torch.ones(size, size, dtype=torch.bool).tril() & (mask[:, None, None] == 1)


def batch(index: int) -> dict[str, Tensor]:
    words = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(index))
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, 6 - index % 3 :] = 0  # every third batch is not padded
    return {"words": words, "mask": mask}


def losses(kind: str, execution: Execution, library: Any) -> Tensor:
    torch.manual_seed(0)
    model = Attending(kind, library)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).mean()
        return loss

    with PlannedStep(model, loss_of, optimizer, Plan(execution=execution), device="cpu") as step:
        return torch.stack([step(batch(index)) for index in range(9)])


@pytest.mark.parametrize("kind", ["causal", "both", "none"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_every_form_follows_the_mask(kind: str, execution: Execution, library: Any) -> None:
    """With and without paddings."""
    wanted = losses(kind, "eager", library)
    is_replayed = execution == "graph"
    with emulated_graphs() if is_replayed else contextlib.nullcontext(), interpreted():
        got = losses(kind, execution, library)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_hybridized_models_are_one_program(library: Any) -> None:
    """Made of fakes, in which no value can be looked at."""
    model = Attending("both", library)
    examples = (batch(0)["words"], batch(0)["mask"])
    with torch.no_grad(), interpreted(), hybridize(model, examples, mode="compiled") as fast:
        for index in range(3):
            given = batch(index).values()
            torch.testing.assert_close(fast(*given), model(*given), rtol=1e-5, atol=1e-7)


def test_steps_as_written_still_look(library: Any) -> None:
    """And functions that compute otherwise in a program are told what is so."""
    spare_looks()
    spare_looks()  # changes nothing
    mask = torch.ones(2, 3)
    assert library._ignore_causal_mask_sdpa(mask, 3)
    assert not library._ignore_causal_mask_sdpa(mask.fill_(0), 3)
    library.warn_if_padding_and_no_attention_mask(mask, None)
    assert len(library.warnings) == 1
    with torch._subclasses.FakeTensorMode() as fakes:
        fake = fakes.from_tensor(mask)
        assert not library._ignore_causal_mask_sdpa(fake, 3)
        assert library._unmask(fake)
        library.warn_if_padding_and_no_attention_mask(fake, None)
    assert len(library.warnings) == 1
