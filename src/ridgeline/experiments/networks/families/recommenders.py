"""Recommenders: large tables of embeddings and small perceptrons; one with sparse gradients."""

from functools import partial

import torch
from torch import Tensor, nn

from ridgeline.experiments.networks.network import Parts, Scale, network, perceptron

RECOMMENDER = "recommender"
TABLES = 26
DENSE = 13
"""Categorical and dense features of a sample. Source: the Criteo data set."""


class DLRM(nn.Module):
    """Bags of embeddings and dense features, their products in pairs, a perceptron on top.

    Source: Naumov et al., Deep Learning Recommendation Model (2019).
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(TABLES))
        self.bottom = perceptron(DENSE, 8 * width, 2 * width, width)
        pairs = (TABLES + 1) * TABLES // 2
        self.top = perceptron(pairs + width, 16 * width, 8 * width, 1)
        # Each pair once, and none with itself: an index into the flattened products.
        above = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        self.register_buffer("above", above[0] * (TABLES + 1) + above[1])

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Logits [N] of a click.

        Args:
            dense: [N, 13].
            indices: Rows, all bags of a table behind each other, [26, N x per bag].
            offsets: Where bags begin, [26, N].
        """
        bottom = self.bottom(dense)
        bags = [bag(indices[k], offsets[k]) for k, bag in enumerate(self.bags)]
        features = torch.stack([bottom, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([bottom, products[:, self.above]], 1)).squeeze(1)


class WideAndDeep(nn.Module):
    """A linear model of hashed crosses beside a perceptron of embeddings.

    Source: Cheng et al., Wide & Deep Learning (2016).
    """

    def __init__(self, rows: int, width: int, fields: int) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum")
        self.embedding = nn.Embedding(rows, width)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, 16 * width),
            nn.BatchNorm1d(16 * width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(16 * width, 1),
        )

    def forward(self, fields: Tensor) -> dict[str, Tensor]:
        """Logits of a click, [N], in a dict."""
        deep = self.deep(self.embedding(fields).flatten(1))
        return {"logits": (self.wide(fields) + deep).squeeze(1)}


class SkipGram(nn.Module):
    """Word vectors with sparse gradients: a pair's product against those of random words.

    Source: Mikolov et al., Distributed Representations (2013), negative sampling.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.centre = nn.Embedding(words, width, sparse=True)
        self.context = nn.Embedding(words, width, sparse=True)

    def forward(self, centre: Tensor, context: Tensor) -> Tensor:
        """Products [N, K] of words [N] with words [N, K]."""
        return torch.einsum("nw,nkw->nk", self.centre(centre), self.context(context))


_plain_sgd = partial(torch.optim.SGD, lr=0.1)
adagrad = partial(torch.optim.Adagrad, lr=0.01)
"""Whose steps follow how often a row was used."""


@network(
    RECOMMENDER,
    "26 embedding bags of 100,000 rows, products in pairs, SGD, batch 2048",
    _plain_sgd,
    several_workers=True,
)
def _dlrm(scale: Scale) -> Parts:
    rows, width, count, in_bag = (100_000, 64, 2048, 4) if scale == "gpu" else (500, 8, 32, 2)

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        dense = torch.randn(count, DENSE, generator=generator)
        indices = torch.randint(0, rows, (TABLES, count * in_bag), generator=generator)
        offsets = torch.arange(0, count * in_bag, in_bag).expand(TABLES, count).contiguous()
        clicks = torch.randint(0, 2, (count,), generator=generator).float()
        return dense, indices, offsets, clicks

    def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, clicks = batch
        return nn.functional.binary_cross_entropy_with_logits(model(*inputs), clicks)

    return Parts(lambda: DLRM(rows, width), draw, loss_fn)


@network(
    RECOMMENDER,
    "wide & deep of 26 fields in one table, a dict as output, Adagrad, batch 4096",
    adagrad,
)
def _wide_and_deep(scale: Scale) -> Parts:
    rows, width, count, fields = (200_000, 32, 4096, 26) if scale == "gpu" else (1000, 8, 64, 10)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, rows, (count, fields), generator=generator)
        return chosen, torch.randint(0, 2, (count,), generator=generator).float()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0])["logits"], batch[1])

    return Parts(lambda: WideAndDeep(rows, width, fields), draw, loss_fn)


@network(
    RECOMMENDER,
    "word vectors with sparse gradients, Adagrad, batch 4096 x 16",
    adagrad,
    is_sparse=True,
)
def _skip_gram_sparse(scale: Scale) -> Parts:
    words, width, count, others = (100_000, 256, 4096, 16) if scale == "gpu" else (1000, 16, 64, 4)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        centre = torch.randint(0, words, (count,), generator=generator)
        return centre, torch.randint(0, words, (count, others), generator=generator)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        products = model(*batch)
        is_real = torch.zeros_like(products)
        # The first of the words is the neighbour, the others were drawn at random.
        is_real[:, 0] = 1.0
        return nn.functional.binary_cross_entropy_with_logits(products, is_real)

    return Parts(lambda: SkipGram(words, width), draw, loss_fn)


NETWORKS = (_dlrm, _wide_and_deep, _skip_gram_sparse)
