"""Graph networks: messages along edges, added up at nodes; attention over a node's neighbours."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.network import Parts, Scale, adam, network

GRAPH = "graph"


class MessagePassing(nn.Module):
    """Layers in which every edge carries its source's features to its target: mean, then a linear layer.

    Source: Hamilton et al., GraphSAGE (2017), mean aggregation.
    """

    def __init__(self, features: int, width: int, classes: int, layers: int = 3) -> None:
        super().__init__()
        sizes = [features, *[width] * layers]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.others = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Node features [nodes, features] and edges [2, edges] to logits of each node."""
        source, target = edges
        ones = torch.ones_like(target, dtype=x.dtype)
        # A node that no edge leads to would divide by nothing.
        degree = x.new_zeros(x.shape[0]).index_add(0, target, ones).clamp(min=1.0)
        for own, others in zip(self.own, self.others, strict=True):
            summed = torch.zeros_like(x).index_add(0, target, x[source])
            x = torch.relu(own(x) + others(summed / degree[:, None]))
        return self.classifier(x)


class GraphAttention(nn.Module):
    """A layer of attention: a softmax over the edges that meet in a node, by scatters.

    Source: Velickovic et al., Graph Attention Networks (2018).
    """

    def __init__(self, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inputs, heads * width, bias=False)
        self.from_source = nn.Parameter(0.1 * torch.randn(heads, width))
        self.from_target = nn.Parameter(0.1 * torch.randn(heads, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """[nodes, inputs] to [nodes, heads x width]."""
        source, target = edges
        h = self.linear(x).unflatten(1, (self.heads, -1))
        score = (h * self.from_source).sum(2)[source] + (h * self.from_target).sum(2)[target]
        score = nn.functional.leaky_relu(score, 0.2)
        index = target[:, None].expand_as(score)
        lowest = score.new_full((x.shape[0], self.heads), -torch.inf)
        # Softmax is the same whatever is taken off all scores, so no gradient passes here.
        largest = lowest.scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - largest[target]).exp()
        total = torch.zeros_like(largest).scatter_add(0, index, weight)
        weight = weight / total[target]
        messages = weight[:, :, None] * h[source]
        # Under autocast messages have another dtype than what they are added up in.
        mixed = torch.zeros_like(h, dtype=messages.dtype).index_add(0, target, messages)
        return mixed.flatten(1)


class AttentionNetwork(nn.Module):
    """Two layers of attention and a classifier of nodes."""

    def __init__(self, features: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first = GraphAttention(features, width, heads)
        self.second = GraphAttention(heads * width, width, heads)
        self.classifier = nn.Linear(heads * width, classes)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Logits of each node."""
        x = nn.functional.elu(self.first(self.dropout(x), edges))
        return self.classifier(nn.functional.elu(self.second(self.dropout(x), edges)))


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, edges, labels = batch
    return nn.functional.cross_entropy(model(x, edges), labels)


def _graph(
    nodes: int, edges: int, features: int, classes: int
) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        x = torch.randn(nodes, features, generator=generator)
        ends = torch.randint(0, nodes, (2, edges), generator=generator)
        return x, ends, torch.randint(0, classes, (nodes,), generator=generator)

    return draw


@network(GRAPH, "3 layers with index_add, 50,000 nodes, 500,000 edges", adam)
def _message_passing(scale: Scale) -> Parts:
    nodes, edges, features, width = (
        (50_000, 500_000, 64, 64) if scale == "gpu" else (200, 1000, 16, 32)
    )
    return Parts(
        lambda: MessagePassing(features, width, 10), _graph(nodes, edges, features, 10), _loss
    )


@network(GRAPH, "2 layers of 8 heads, softmax by scatters, 20,000 nodes, 200,000 edges", adam)
def _graph_attention(scale: Scale) -> Parts:
    nodes, edges, features, width, heads = (
        (20_000, 200_000, 128, 32, 8) if scale == "gpu" else (100, 500, 16, 8, 2)
    )
    return Parts(
        lambda: AttentionNetwork(features, width, heads, 10),
        _graph(nodes, edges, features, 10),
        _loss,
    )


NETWORKS = (_message_passing, _graph_attention)
