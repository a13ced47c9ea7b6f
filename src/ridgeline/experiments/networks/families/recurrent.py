"""Recurrent networks: a language model of LSTM layers, a GRU, packed sequences, cells in a Python loop."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ridgeline.experiments.draws import labelled, next_tokens
from ridgeline.experiments.networks.network import Parts, Scale, adam, network, token_loss
from ridgeline.tasks.images import cross_entropy

RECURRENT = "recurrent"


class LSTMLanguageModel(nn.Module):
    """Embedding, two LSTM layers with dropout, logits of the next token: tokens [N, T] to [N, T, V].

    Source: Zaremba et al., Recurrent Neural Network Regularization (2014), medium.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits at each place."""
        features, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.output(self.dropout(features))


class GRUClassifier(nn.Module):
    """A bidirectional GRU over signals [N, T, C], its last states classified."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, width, num_layers=2, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of signals."""
        _, last = self.gru(x)
        # The last layer, forward and backward.
        return self.classifier(torch.cat([last[-2], last[-1]], 1))


class PackedTagger(nn.Module):
    """An LSTM over packed sequences: tokens [N, T] with lengths [N] on the CPU, to tags of each token."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.output = nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits [N, T, tags]."""
        # Torch packs by lengths in the host's memory.
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        features, _ = self.lstm(packed)
        # As long as the batch, also where none of its sequences is.
        padded, _ = pad_packed_sequence(features, batch_first=True, total_length=tokens.shape[1])
        return self.output(padded)


class CellLoop(nn.Module):
    """A recurrent cell in a Python loop, with layer normalisation, as research code has it."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(channels, width)
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Signals [N, T, C] to logits."""
        state = x.new_zeros(x.shape[0], self.width)
        for moment in x.unbind(1):
            state = self.norm(self.cell(moment, state))
        return self.classifier(state)


rmsprop = partial(torch.optim.RMSprop, lr=1e-3)
"""Which has no fused form."""


@network(
    RECURRENT,
    "2 LSTM layers of 650 with dropout, clipping, 64 x 70 tokens",
    adam,
    clip_norm=0.25,
    several_workers=True,
)
def _lstm_language_model(scale: Scale) -> Parts:
    vocabulary, width, count, length = (10000, 650, 64, 70) if scale == "gpu" else (200, 64, 8, 16)

    draw = next_tokens(count, length, vocabulary)
    return Parts(lambda: LSTMLanguageModel(vocabulary, width), draw, token_loss)


@network(RECURRENT, "2 bidirectional GRU layers of 512, RMSprop, 128 x 200", rmsprop)
def _gru_classifier(scale: Scale) -> Parts:
    count, length, channels, width = (128, 200, 64, 512) if scale == "gpu" else (8, 20, 8, 32)
    draw = labelled(count, length, channels, classes=10)
    return Parts(lambda: GRUClassifier(channels, width, 10), draw, cross_entropy)


@network(RECURRENT, "bidirectional LSTM over packed sequences, 64 x up to 100 tokens", adam)
def _packed_lstm(scale: Scale) -> Parts:
    vocabulary, width, count, length = (10000, 512, 64, 100) if scale == "gpu" else (200, 32, 8, 16)
    tags = 20

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens = torch.randint(0, vocabulary, (count, length), generator=generator)
        labels = torch.randint(0, tags, (count, length), generator=generator)
        lengths = torch.randint(length // 4, length + 1, (count,), generator=generator)
        is_padding = torch.arange(length)[None] >= lengths[:, None]
        return tokens, lengths, labels.masked_fill(is_padding, -100)

    return Parts(lambda: PackedTagger(vocabulary, width, tags), draw, token_loss)


@network(RECURRENT, "GRU cell in a Python loop of 50, batch 64", adam, clip_norm=1.0)
def _cell_loop(scale: Scale) -> Parts:
    count, length, channels, width = (64, 50, 64, 256) if scale == "gpu" else (8, 10, 8, 32)
    draw = labelled(count, length, channels, classes=10)
    return Parts(lambda: CellLoop(channels, width, 10), draw, cross_entropy)


NETWORKS = (_lstm_language_model, _gru_classifier, _packed_lstm, _cell_loop)
