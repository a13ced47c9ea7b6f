"""Speech: convolutions with attention or a GRU, and connectionist temporal classification (CTC)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.network import Parts, Scale, adamw, network

SPEECH = "speech"
SYMBOLS = 32


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a convolution over time, half a perceptron: [N, T, width] to the same.

    Source: Gulati et al., Conformer (2020), figure 1.
    """

    def __init__(self, width: int, heads: int, kernel: int, dropout: float = 0.1) -> None:
        super().__init__()
        # Each is added by half, so that both together are one perceptron.
        self.before, self.after = (_half(width, dropout) for _ in range(2))
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.conv_norm = nn.LayerNorm(width)
        self.convolutions = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1),
            nn.GLU(dim=1),
            nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
            nn.Dropout(dropout),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + 0.5 * self.before(x)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolutions(self.conv_norm(x).transpose(1, 2)).transpose(1, 2)
        return self.norm(x + 0.5 * self.after(x))


def _half(width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.SiLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )


class Conformer(nn.Module):
    """Spectra [N, T, bands], a fourth of them in time, through conformer blocks to log-probabilities."""

    def __init__(self, bands: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv2d(1, width // 4, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width // 4, width // 4, 3, 2, 1),
            nn.ReLU(),
        )
        self.project = nn.Linear(width // 4 * (bands // 4), width)
        self.blocks = nn.Sequential(*(ConformerBlock(width, heads, 15) for _ in range(blocks)))
        self.output = nn.Linear(width, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """[T / 4, N, symbols]."""
        x = self.shrink(x[:, None]).transpose(1, 2).flatten(2)
        x = self.output(self.blocks(self.project(x)))
        return x.float().log_softmax(2).transpose(0, 1)


class WaveGRU(nn.Module):
    """Convolutions over the wave itself and a bidirectional GRU: [N, samples] to log-probabilities."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 1
        for kernel, stride in ((10, 5), (8, 4), (4, 4), (4, 2)):
            layers += [
                nn.Conv1d(inputs, width, kernel, stride, bias=False),
                nn.GroupNorm(1, width),
                nn.GELU(),
            ]
            inputs = width
        self.convolutions = nn.Sequential(*layers)
        self.gru = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.output = nn.Linear(2 * width, SYMBOLS)

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, symbols]."""
        features, _ = self.gru(self.convolutions(x[:, None]).transpose(1, 2))
        return self.output(features).float().log_softmax(2).transpose(0, 1)


def ctc_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Of texts with given lengths; the loss reads the lengths on the host."""
    sound, texts, lengths = batch
    spoken = model(sound)
    durations = torch.full_like(lengths, spoken.shape[0])
    # A text longer than its sound has an infinite loss, whose gradient is no number.
    return nn.functional.ctc_loss(spoken, texts, durations, lengths, zero_infinity=True)


def _spoken(shape: tuple[int, ...], most: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Draws sounds of a shape, and texts of at most so many symbols with their lengths."""

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        sound = torch.randn(shape, generator=generator)
        texts = torch.randint(1, SYMBOLS, (shape[0], most), generator=generator)
        lengths = torch.randint(most // 2, most + 1, shape[:1], generator=generator)
        return sound, texts, lengths

    return draw


@network(SPEECH, "8 conformer blocks of width 256, CTC, 16 x 800 frames", adamw, clip_norm=5.0)
def _conformer_ctc(scale: Scale) -> Parts:
    bands, width, blocks, heads, shape, most = (
        (80, 256, 8, 4, (16, 800, 80), 60) if scale == "gpu" else (16, 32, 1, 2, (2, 64, 16), 5)
    )
    return Parts(lambda: Conformer(bands, width, blocks, heads), _spoken(shape, most), ctc_loss)


@network(SPEECH, "convolutions over waves, GRU, CTC, 16 x 64,000 samples", adamw)
def _wave_gru_ctc(scale: Scale) -> Parts:
    width, shape, most = (256, (16, 64_000), 60) if scale == "gpu" else (16, (2, 4000), 5)
    return Parts(lambda: WaveGRU(width), _spoken(shape, most), ctc_loss)


NETWORKS = (_conformer_ctc, _wave_gru_ctc)
