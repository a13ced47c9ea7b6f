"""Time series: causal convolutions whose weights are normalised again in every step."""

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ridgeline.experiments.draws import labelled
from ridgeline.experiments.networks.network import Parts, Scale, adam, network
from ridgeline.tasks.images import cross_entropy

SERIES = "time series"
CLASSES = 10


class CausalBlock(nn.Module):
    """Two dilated convolutions that see the past alone, and a way around them: [N, inputs, T] to the same T.

    Source: Bai, Kolter & Koltun, An Empirical Evaluation of Generic Convolutional Networks (2018), figure 1.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int) -> None:
        super().__init__()
        past = (kernel - 1) * dilation
        layers: list[nn.Module] = []
        for size in (inputs, outputs):
            layers += [
                nn.ConstantPad1d((past, 0), 0.0),
                weight_norm(nn.Conv1d(size, outputs, kernel, dilation=dilation)),
                nn.ReLU(),
                nn.Dropout(0.1),
            ]
        self.layers = nn.Sequential(*layers)
        self.around = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return nn.functional.relu(self.layers(x) + self.around(x))


class CausalNetwork(nn.Module):
    """Blocks whose view of the past doubles, and a classifier of the last moment."""

    def __init__(self, inputs: int, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(CausalBlock(inputs if not i else width, width, 3, 2**i) for i in range(blocks))
        )
        self.output = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Series [N, inputs, T] to logits [N, classes]."""
        return self.output(self.blocks(x)[:, :, -1])


@network(
    SERIES,
    "8 blocks of causal convolutions with normalised weights, batch 64 of 512 moments",
    adam,
    clip_norm=1.0,
)
def _causal_convolutions(scale: Scale) -> Parts:
    count, length, inputs, width, blocks = (
        (64, 512, 8, 128, 8) if scale == "gpu" else (4, 32, 4, 16, 3)
    )

    draw = labelled(count, inputs, length, classes=CLASSES)
    return Parts(lambda: CausalNetwork(inputs, width, blocks), draw, cross_entropy)


NETWORKS = (_causal_convolutions,)
