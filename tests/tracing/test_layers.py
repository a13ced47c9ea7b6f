"""Layers of traced networks: sums are the step's, and traffic is what the shapes say, counted by hand."""

import torch
from torch import nn

import ridgeline as rl
from ridgeline.simulator.layers.layers import Layer, Layers, layers_of
from ridgeline.workload import Workload

SAMPLES, STEPS, WORDS, WIDTH, UNITS = 4, 3, 100, 32, 64
IDS = torch.zeros(SAMPLES, STEPS, dtype=torch.long)
STATES = 4 * SAMPLES * STEPS * UNITS
"""Bytes of the states of one recurrent layer."""
EMBEDDED = 4 * SAMPLES * STEPS * WIDTH
LOGITS = 4 * SAMPLES * STEPS * WORDS


def mean_loss(model, batch):
    return model(batch).mean()


def word_loss(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def traced(model: nn.Module, batch: torch.Tensor, loss=mean_loss) -> Workload:
    return rl.trace(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def read(model: nn.Module, batch: torch.Tensor, loss=mean_loss) -> dict[str, Layer]:
    """The layers by name, once it is certain that nothing is lost or counted twice."""
    workload = traced(model, batch, loss)
    found = layers_of(workload)
    check_sums(workload, found)
    return {layer.name: layer for layer in found.layers}


def check_sums(workload: Workload, found: Layers) -> None:
    assert sum(layer.flops for layer in found.layers) + found.other_flops == workload.flops
    sent = sum(layer.gradient_bytes for layer in found.layers)
    assert sent == sum(parameter.num_bytes for parameter in workload.gradients)


class Words(nn.Module):
    def __init__(self, recurrent: nn.Module, width: int = UNITS) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(WORDS, WIDTH), recurrent
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embed(ids))
        return self.head(states)


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 10),
        )


def test_images() -> None:
    """The first layer's input wants no gradient; norms have nothing to split; pooled inputs are small."""
    layers = read(Images(), torch.zeros(2, 3, 16, 16))
    assert list(layers) == ["0", "1", "3", "6"]
    first, norm, second, last = layers.values()
    assert (first.family, first.gathered_bytes, first.reduced_bytes) == (
        "convolution",
        4 * 2 * 8 * 256,
        0,
    )
    assert (norm.family, norm.gathered_bytes, norm.reduced_bytes) == ("normalization", 0, 0)
    assert not norm.is_split
    assert norm.gradient_bytes == 4 * 16
    assert (second.gathered_bytes, second.reduced_bytes) == (4 * 2 * 16 * 256, 4 * 2 * 8 * 256)
    assert (last.family, last.gathered_bytes, last.reduced_bytes) == (
        "matmul",
        4 * 2 * 10,
        4 * 2 * 256,
    )
    assert last.flops == 3 * 2 * 2 * 256 * 10
    assert last.gradient_bytes == 4 * (256 * 10 + 10)


def test_frozen_layers() -> None:
    """Have no gradients to send, and where nothing before is trained none of their input is wanted either."""
    model = Images()
    for module in (model[0], model[1]):
        module.requires_grad_(requires_grad=False)
    layers = read(model, torch.zeros(2, 3, 16, 16))
    assert [layer.gradient_bytes > 0 for layer in layers.values()] == [False, False, True, True]
    assert layers["3"].reduced_bytes == 0
    assert layers["6"].reduced_bytes == 4 * 2 * 256


def test_groups() -> None:
    """A convolution whose groups are dealt out shares no input; its outputs are gathered all the same."""
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    depthwise = read(model, torch.zeros(2, 4, 5, 5))["1"]
    assert (depthwise.gathered_bytes, depthwise.reduced_bytes) == (4 * 2 * 8 * 25, 0)


def test_long_short_term_memory() -> None:
    """States are gathered as they are made, and their gradients summed up for the step before and the layer."""
    layers = read(Words(nn.LSTM(WIDTH, UNITS, num_layers=2, batch_first=True)), IDS, word_loss)
    embed, recurrent, head = layers.values()
    assert (embed.family, embed.gathered_bytes, embed.reduced_bytes) == ("gather", EMBEDDED, 0)
    assert recurrent.family == "recurrent"
    assert recurrent.gathered_bytes == 2 * STATES
    assert recurrent.reduced_bytes == EMBEDDED + 3 * STATES
    assert (head.gathered_bytes, head.reduced_bytes) == (LOGITS, STATES)


def test_a_recurrent_layer_step_by_step() -> None:
    """Traced as a multiplication a step it comes to the same, but for the first state, which wants nothing."""
    recurrent = read(Words(nn.GRU(WIDTH, UNITS, batch_first=True)), IDS, word_loss)["recurrent"]
    assert recurrent.family == "recurrent"
    assert recurrent.gathered_bytes == STATES
    assert recurrent.reduced_bytes == EMBEDDED + STATES * (STEPS - 1) // STEPS


def test_dropout_between_recurrent_layers() -> None:
    """Of states that every worker has it makes such states: nothing is gathered again."""
    model = nn.LSTM(WIDTH, UNITS, num_layers=2, batch_first=True, dropout=0.5)
    recurrent = read(Words(model), IDS, word_loss)["recurrent"]
    assert recurrent.gathered_bytes == 2 * STATES
    assert recurrent.reduced_bytes == EMBEDDED + 3 * STATES


def test_both_directions() -> None:
    """Each has its states; both are one input of the next layer."""
    model = nn.LSTM(WIDTH, UNITS, num_layers=2, batch_first=True, bidirectional=True)
    recurrent = read(Words(model, 2 * UNITS), IDS, word_loss)["recurrent"]
    assert recurrent.gathered_bytes == 4 * STATES
    assert recurrent.reduced_bytes == EMBEDDED + (4 + 2) * STATES


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.before(x)
        return self.attention(taken, taken, taken, need_weights=False)[0]


def test_attention_with_a_projection_that_it_does_not_call() -> None:
    """Its weights belong to the module that reads them; heads stay where they are until they are projected."""
    layers = read(Attending(), torch.zeros(STEPS, SAMPLES, WIDTH))
    attention = layers["attention"]
    assert set(layers) == {"before", "attention"}
    assert attention.gradient_bytes == 4 * 4 * (WIDTH * WIDTH + WIDTH)
    assert attention.gathered_bytes == attention.reduced_bytes == 2 * EMBEDDED


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu_(self.mix(self.embed(ids))))


def test_tied_weights_are_one_layer() -> None:
    """Their gradient is sent once, for what both modules do."""
    layers = read(Tied(), IDS, word_loss)
    tied = layers["embed + head"]
    assert set(layers) == {"embed + head", "mix"}
    assert tied.gradient_bytes == 4 * WORDS * WIDTH
    assert (tied.gathered_bytes, tied.reduced_bytes) == (EMBEDDED + LOGITS, EMBEDDED)
    assert tied.flops == 3 * 2 * SAMPLES * STEPS * WIDTH * WORDS


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH, UNITS))
        self.second = nn.Parameter(torch.zeros(UNITS, WORDS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.first) @ self.second


def test_a_model_that_multiplies_by_itself() -> None:
    """What it makes and multiplies again is gathered between, and what the loss takes at the end."""
    loss = lambda model, x: nn.functional.cross_entropy(model(x), x[:, 0].long())  # noqa: E731
    (layer,) = read(Bare(), torch.zeros(SAMPLES, WIDTH), loss).values()
    assert layer.name == "(model)"
    between = 4 * SAMPLES * UNITS
    assert layer.gathered_bytes == between + 4 * SAMPLES * WORDS
    assert layer.reduced_bytes == between


def test_weights_that_are_computed() -> None:
    """A weight norm's result is weights, no activation."""
    model = nn.Sequential(nn.Linear(8, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)))
    layers = read(model, torch.zeros(SAMPLES, 8))
    name = next(name for name in layers if name != "0")
    assert layers[name].gathered_bytes == 4 * SAMPLES * 4
    assert layers[name].reduced_bytes == 4 * SAMPLES * 16
    assert layers[name].gradient_bytes == 4 * (4 * 16 + 4 + 4)


def test_attention_between_projections_is_in_no_layer() -> None:
    """Its FLOP are the step's, and those of no weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.project(x)
            return y @ y.transpose(-1, -2)

    workload = traced(Model(), torch.zeros(SAMPLES, STEPS, WIDTH))
    found = layers_of(workload)
    check_sums(workload, found)
    assert found.other_flops == 3 * 2 * SAMPLES * STEPS * STEPS * WIDTH
