"""Clouds of points: convolutions over the neighbours that each point has in the present features."""

import itertools

import torch
from torch import Tensor, nn

from ridgeline.experiments.draws import labelled
from ridgeline.experiments.networks.network import Parts, Scale, adam, network
from ridgeline.tasks.images import cross_entropy

POINTS = "point cloud"
CLASSES = 40


class EdgeConvolution(nn.Module):
    """A point's features and the differences to its nearest neighbours, through one layer, the largest kept.

    Source: Wang et al., Dynamic Graph CNN (2019), section 3.
    """

    def __init__(self, inputs: int, outputs: int, neighbours: int) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.layer = nn.Sequential(
            nn.Conv2d(2 * inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, points, inputs] to [N, points, outputs]."""
        # Who is near is a choice, through which no gradient passes.
        with torch.no_grad():
            nearest = torch.cdist(x.float(), x.float()).topk(self.neighbours, largest=False).indices
        batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
        around = x[batch, nearest]
        own = x[:, :, None].expand_as(around)
        edges = torch.cat([own, around - own], 3).permute(0, 3, 1, 2)
        return self.layer(edges).amax(3).transpose(1, 2)


class PointNetwork(nn.Module):
    """Four edge convolutions, all of their features, and a classifier."""

    def __init__(self, width: int, neighbours: int) -> None:
        super().__init__()
        sizes = (3, width, width, 2 * width, 4 * width)
        self.layers = nn.ModuleList(
            EdgeConvolution(a, b, neighbours) for a, b in itertools.pairwise(sizes)
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * sum(sizes[1:]), 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(4 * width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Points [N, points, 3] to logits [N, classes]."""
        found: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        features = torch.cat(found, 2)
        return self.classifier(torch.cat([features.amax(1), features.mean(1)], 1))


@network(POINTS, "4 edge convolutions over 20 nearest neighbours, batch 32 of 1024 points", adam)
def _point_cloud(scale: Scale) -> Parts:
    count, points, width, neighbours = (32, 1024, 64, 20) if scale == "gpu" else (2, 64, 8, 4)

    draw = labelled(count, points, 3, classes=CLASSES)
    return Parts(lambda: PointNetwork(width, neighbours), draw, cross_entropy)


NETWORKS = (_point_cloud,)
