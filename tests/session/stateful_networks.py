"""Small networks whose steps do more than compute: they keep state, read values, or cannot be copied or watched."""

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from everyday_networks import Network, adam, classify, many, mlp, rows, simple
from torch import Tensor, nn, optim
from torch.nn import functional as F


def metric() -> Network:
    seen: list[float] = []

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        seen.append((out.argmax(-1) == b[1]).float().mean().item())
        loss = F.cross_entropy(out, b[1])
        return loss * 2 if loss.item() > 1.5 and len(seen) % 2 else loss

    return simple(mlp(), loss_fn)


class Counting(optim.Optimizer):
    """Keeps a count in Python, and looks at the norm of each gradient."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                self.norms.append(parameter.grad.norm().item())
                scale = group["lr"] / (self.count * max(self.norms[-1], 1.0))
                parameter.sub_(state["mean"], alpha=scale)


def lazily_cached() -> Network:
    cache: dict[str, Tensor] = {}

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        if "w" not in cache:
            cache["w"] = torch.linspace(0.5, 1.5, 5)
        return F.cross_entropy(m(b[0]) * cache["w"], b[1])

    return simple(mlp(), loss_fn)


@functools.lru_cache(maxsize=4)
def table(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


def cached_table() -> Network:
    table.cache_clear()

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]) * table(5), b[1])

    model = mlp()
    return Network(model, loss_fn, adam(model), many(rows))


def scaled() -> Network:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return scaler.scale(classify(m, b))

    return simple(mlp(), loss_fn)


def with_proxies() -> Network:
    model = mlp()
    proxies = nn.Parameter(torch.randn(7, 5))

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]) @ proxies.T, b[1])

    optimizer = optim.Adam([*model.parameters(), proxies], 0.01)
    return Network(model, loss_fn, optimizer, many(rows))


def lazily_shaped() -> Network:
    return simple(nn.Sequential(nn.LazyLinear(12), nn.Dropout(0.1), nn.ReLU(), nn.LazyLinear(5)))


def averaging() -> Network:
    mean = torch.zeros(5)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        nonlocal mean
        out = m(b[0])
        mean = mean * 0.9 + out.detach().mean(0) * 0.1
        return F.cross_entropy(out - mean, b[1])

    return simple(mlp(), loss_fn)


def uncopyable() -> Network:
    model = mlp()
    model.lock = threading.Lock()
    return simple(model)


def momentum_teacher() -> Network:
    """Follows the model by giving its parameters other memory, and keeps a queue of what it said."""
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    queue, seen = torch.zeros(8, 5), {"at": 0}

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        with torch.no_grad():
            for mine, own in zip(teacher.parameters(), m.parameters(), strict=True):
                mine.data = mine.data * 0.9 + own.data * 0.1
            said = teacher(b[0])
        out = m(b[0])
        loss = F.mse_loss(out, said) + (out @ queue.clone().T).square().mean()
        queue[seen["at"] : seen["at"] + 4] = said[:4]
        seen["at"] = (seen["at"] + 4) % 8
        return loss

    return simple(model, loss_fn)


def of_one_element() -> Network:
    return simple(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1]).view(1, 1))


def scripted() -> Network:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return simple(torch.jit.script(nn.Linear(6, 5)))


def nested(layout: torch.layout) -> Network:
    """Samples of different lengths in one tensor."""

    def loss_fn(m: nn.Module, b: Tensor) -> Tensor:
        return m(torch.cat(b.unbind())).square().mean()

    def batch() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            parts = [torch.randn(length, 6) for length in (2, 5, 3)]
            return torch.nested.nested_tensor(parts, layout=layout)

    model = mlp()
    return Network(model, loss_fn, adam(model), [batch() for _ in range(10)])


class Watchful(nn.Module):
    """Refuses to run under a dispatch mode, as code does that keeps modes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("modes are not for this network")
        return self.body(x)


class Learner(nn.Module):
    """A network of functions, as for meta-learning, whose methods take and give what its author needed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))]
        )
        self.opt = adam(self)

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        return F.linear(x, *(self.weights if weights is None else weights))

    def parameters(self) -> Any:
        return self.weights

    def buffers(self) -> Any:
        return []

    def zero_grad(self, weights: Any) -> None:
        for weight in weights:
            weight.grad = None

    def train(self, positive: Tensor, negative: Tensor) -> None:
        raise AssertionError("this trains by itself")


def learner() -> Network:
    model = Learner()

    def loss_fn(m: Learner, b: Any) -> Tensor:
        gradients = torch.autograd.grad(F.cross_entropy(m(b[0]), b[1]), m.parameters())
        steps = zip(m.parameters(), gradients, strict=True)
        return F.cross_entropy(m(b[0], [weight - 0.1 * step for weight, step in steps]), b[1])

    return Network(model, loss_fn, model.opt, many(rows))


STATEFUL: dict[str, Callable[[], Network]] = {
    "metric": metric,
    "own optimizer": lambda: simple(mlp(), optimizer=lambda m: Counting(m.parameters())),
    "lazy cache": lazily_cached,
    "cached table": cached_table,
    "gradient scaler": scaled,
    "proxies": with_proxies,
    "lazily shaped": lazily_shaped,
    "averaging": averaging,
    "uncopyable": uncopyable,
    "momentum teacher": momentum_teacher,
    "of one element": of_one_element,
    "scripted": scripted,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "watchful": lambda: simple(Watchful()),
    "methods of its own": learner,
}
