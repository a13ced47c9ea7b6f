"""Small networks of many kinds, as people write them: model, loss, optimizer and ten batches each.

Each maker is called after seeding, so that two calls give the same network.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS = 10


class Network(NamedTuple):
    """One training: `loss_fn(model, batch)` over `batches`."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: optim.Optimizer
    batches: list[Any]


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), 0.01)


def many(make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(STEPS)]


def rows() -> Any:
    return torch.randn(8, 6), torch.randint(0, 5, (8,))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 5))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.layers = kind(6, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.packed:
            return self.head(self.layers(x)[0][:, -1])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return self.head(out.sum(1) / lengths[:, None])


def recurrent(kind: type[nn.RNNBase], *, packed: bool = False) -> Network:
    model = Recurrent(kind, packed=packed)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0], b[1]), b[2])

    batches = many(
        lambda: (torch.randn(4, 7, 6), torch.randint(2, 8, (4,)), torch.randint(0, 5, (4,)))
    )
    return Network(model, loss_fn, adam(model), batches)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.body(
            self.tokens(source),
            self.tokens(target),
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(out)


def translator() -> Network:
    model = Translator()

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0], b[1]).flatten(0, 1), b[1].flatten())

    batches = many(lambda: (torch.randint(1, 11, (4, 6)), torch.randint(1, 11, (4, 5))))
    return Network(model, loss_fn, adam(model), batches)


def masked() -> Network:
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(6, 5))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(4)
        out = m[0](b[0][:, None].expand(8, 4, 6), mask=causal)
        return F.cross_entropy(m[1](out[:, -1]), b[1])

    return Network(model, loss_fn, adam(model), many(rows))


class Experts(nn.Module):
    """Each sample goes to one expert, and every expert takes as many as come."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 5)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == index)
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * weights[mine, None])
        return out


class SplitExperts(Experts):
    """The same, by sorting and splitting where the counts say."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=3).tolist()
        parts = [e(p) for e, p in zip(self.experts, x[order].split(counts), strict=True)]
        return torch.cat(parts)[order.argsort()] * weights[:, None]


def simple(model: nn.Module, loss_fn: Any = classify, optimizer: Any = adam) -> Network:
    return Network(model, loss_fn, optimizer(model), many(rows))


def speech() -> Network:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        log_probs = m(b[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, b[1], b[2], b[3], zero_infinity=True)

    def batch() -> Any:
        return (
            torch.randn(4, 9, 6),
            torch.randint(1, 5, (4, 3)),
            torch.full((4,), 9),
            torch.randint(1, 4, (4,)),
        )

    return Network(model, loss_fn, adam(model), many(batch))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 5, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words)


def bags() -> Network:
    model = Bags()
    batches = many(lambda: (torch.randint(0, 20, (8, 3)), torch.randint(0, 5, (8,))))
    return Network(model, classify, optim.SparseAdam(list(model.parameters()), 0.01), batches)


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.send = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        x, (source, target) = graph["x"], graph["edges"].unbind(1)
        received = torch.zeros_like(x).index_add(0, target, self.send(x)[source])
        return self.head(torch.relu(x + received))


def messages() -> Network:
    model = Messages()

    def batch() -> Any:
        edges = torch.randint(0, 8, (30, 2))
        return {"x": torch.randn(8, 6), "edges": edges}, torch.randint(0, 5, (8,))

    return Network(model, classify, adam(model), many(batch))


def twice() -> Network:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        first, second = m(b[0]), m(b[0])
        return F.cross_entropy(first, b[1]) + (first - second).square().mean()

    return simple(mlp(), loss_fn)


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Describing(nn.Module):
    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.body, self.head, self.as_dict = nn.Linear(6, 8), nn.Linear(8, 5), as_dict

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).relu()
        output = Output(self.head(hidden), hidden)
        return vars(output) if self.as_dict else output


def describing(*, as_dict: bool) -> Network:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        logits = out["logits"] if as_dict else out.logits
        return F.cross_entropy(logits, b[1])

    return simple(Describing(as_dict=as_dict), loss_fn)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.encode(x).chunk(2, -1)
        # Said, because torch's compiler, once loaded, turns the default off.
        code = torch.distributions.Normal(mean, F.softplus(spread), validate_args=True)
        return self.decode(code.rsample()), code


def variational() -> Network:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        out, code = m(b[0])
        prior = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        return F.mse_loss(out, b[0]) + torch.distributions.kl_divergence(code, prior).mean()

    return simple(Autoencoder(), loss_fn)


def penalised() -> Network:
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 5))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        x = b[0].detach().requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, b[1]) + (slope.norm(dim=-1) - 1).square().mean()

    return simple(model, loss_fn)


def by(make: Callable[..., optim.Optimizer], lr: float = 0.01) -> Callable[[], Network]:
    return lambda: simple(mlp(), optimizer=lambda m: make(m.parameters(), lr=lr))


NETWORKS: dict[str, Callable[[], Network]] = {
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "packed lstm": lambda: recurrent(nn.LSTM, packed=True),
    "transformer": translator,
    "mixture of experts": lambda: simple(Experts()),
    "mixture of experts, split": lambda: simple(SplitExperts()),
    "ctc": speech,
    "sparse bags": bags,
    "messages": messages,
    "two passes": twice,
    "dict": lambda: describing(as_dict=True),
    "dataclass": lambda: describing(as_dict=False),
    "distributions": variational,
    "adagrad": by(optim.Adagrad),
    "rmsprop": by(optim.RMSprop),
    "nadam": by(optim.NAdam),
    "radam": by(optim.RAdam),
    "adadelta": by(optim.Adadelta, lr=1.0),
    "adamax": by(optim.Adamax),
    "rprop": by(optim.Rprop),
    "asgd": by(optim.ASGD),
    "gradient penalty": penalised,
    "masked": masked,
}
