"""Torch's transformers train with masks in every form, and follow a mask whose values change.

Compiled programs are interpreted, and graphs emulated on the CPU.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.capture.mask_looks import spare_looks, sparing
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tracing.capture import trace

NUM_WORDS, WIDTH, LENGTH, STEPS, CHANGED = 20, 16, 7, 9, 6
EXECUTIONS: tuple[Execution, ...] = (
    "graph",
    "model-graph",
    "compiled",
    "compiled+graph",
    "compiled+model-graph",
    "step-graph",
)
causal_mask = nn.Transformer.generate_square_subsequent_mask


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What the compiler has kept of a class's code would serve the next test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Encoder(nn.Module):
    """A language model, with the mask that it is given, held, or made in each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(WIDTH, NUM_WORDS)
        self.mask: Tensor | None = None

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the words that follow."""
        if self.mask is None:
            self.mask = causal_mask(words.shape[1])
        mask = causal_mask(words.shape[1]) if self.kind == "made" else self.mask
        padding = words == 0 if self.kind == "padded" else None
        x = self.words(words) * math.sqrt(WIDTH)
        scores: Tensor = self.out(self.encoder(x, mask, src_key_padding_mask=padding))
        return scores


class Translator(nn.Module):
    """Encoder and decoder, with a mask for the second only."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 1, 1, WIDTH, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, NUM_WORDS)
        self.mask = causal_mask(LENGTH - 1)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the words that follow."""
        x = self.words(words)
        scores: Tensor = self.out(self.both(x.flip(1), x, tgt_mask=self.mask))
        return scores


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """How badly the next word is told."""
    return nn.functional.cross_entropy(model(words[:, :-1]).transpose(1, 2), words[:, 1:])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "held": lambda: Encoder("held"),
    "made": lambda: Encoder("made"),
    "padded": lambda: Encoder("padded"),
    "translator": Translator,
}
ways = pytest.mark.parametrize("execution", EXECUTIONS)
mismatched = pytest.mark.filterwarnings("ignore:Support for mismatched src_key_padding_mask")


def words_of(index: int) -> Tensor:
    """A batch."""
    return torch.randint(NUM_WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(index))


def losses(name: str, execution: Execution | None) -> list[float]:
    """Of some steps, before the last of which the mask lets through what it did not."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []

    def plain(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with contextlib.ExitStack() as stack:
        run: Callable[[Tensor], Tensor] = plain
        if execution is not None:
            plan = Plan(execution=execution)
            run = stack.enter_context(PlannedStep(model, loss_of, optimizer, plan, device="cpu"))
        for index in range(STEPS):
            if index == CHANGED and isinstance(mask := getattr(model, "mask", None), Tensor):
                mask.zero_()
            found.append(float(run(words_of(index))))
    return found


@mismatched
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # the interpreter's functions
@ways
@pytest.mark.parametrize("name", ["held", "padded", "translator"])
def test_every_form_follows_the_mask(name: str, execution: Execution) -> None:
    """Also where it was causal when a program was made, and is not any more."""
    wanted = losses(name, None)
    is_replayed = execution not in ("compiled", "step-graph")
    with emulated_graphs() if is_replayed else contextlib.nullcontext(), interpreted():
        assert losses(name, execution) == pytest.approx(wanted, rel=1e-5)


def test_the_change_of_the_mask_shows() -> None:
    """Else the test above would pass with any mask."""
    untouched, changed = losses("made", None), losses("held", None)
    assert untouched[:CHANGED] == pytest.approx(changed[:CHANGED], rel=1e-6)
    assert abs(untouched[CHANGED] - changed[CHANGED]) > 1e-3


def test_steps_as_written_still_look() -> None:
    """Attention that is told of a causal mask computes half as much."""
    spare_looks()
    spare_looks()  # changes nothing
    look = transformer._detect_is_causal_mask
    mask = causal_mask(4)
    assert look(mask)
    assert look(mask, None, 4)
    assert not look(mask, None, 5)
    assert not look(mask, False)
    assert look(torch.zeros(4, 4), True)
    assert not look(torch.zeros(4, 4))
    assert not look(None)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_reads_encoders_as_before() -> None:
    """It takes the function that looks for a part of the program."""
    spare_looks()
    model, x = Encoder("held").encoder.eval(), torch.randn(2, 4, WIDTH)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x, causal_mask(4)), model(x, causal_mask(4)))


def test_the_compiler_reads_encoders_whole_inside_only() -> None:
    """Programs of a script's own keep their look, and with it the faster attention."""
    spare_looks()
    model, words = Encoder("made"), torch.randint(NUM_WORDS, (2, LENGTH))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with sparing():
        torch.testing.assert_close(compiled(words), model(words))
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(words)


def test_traces_do_not_run() -> None:
    """A step that looks is traced all the same, and nothing in the trace is a look."""
    model = Encoder("held")
    workload = trace(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), words_of(0))
    assert "_local_scalar_dense" not in {op.name.rpartition(".")[2] for op in workload.ops}
