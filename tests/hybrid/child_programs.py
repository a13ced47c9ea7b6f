"""Programs that a child process runs in the tests of child trials; importable by name."""

import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Counting(torch.optim.SGD):
    """Keeps a number beside its settings."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def wrong_loss_fn(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("this loss never works")


def check_inputs(*, value: Tensor, number: int) -> None:
    """The payload is as it was; the launcher's variables are gone, others are not."""
    if value.tolist() != [1.0, 2.0] or number != 7:
        raise ValueError(f"got {value} and {number}")
    if "RANK" in os.environ or os.environ["MINE"] != "kept":
        raise ValueError(f"got {sorted(os.environ)}")


def fail() -> None:
    raise ValueError("on purpose")


def die() -> None:
    print("last words")  # noqa: T201 - output of the child
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def hang(*, path: str) -> None:
    """Start a process, tell its number through a pipe, and wait for what never comes."""
    pid = os.fork()
    if pid == 0:
        threading.Event().wait()
    with open(path, "w") as file:  # noqa: PTH123 - one line
        file.write(str(pid))
    threading.Event().wait()


class Unloadable:
    """Can be written, but not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("cannot be read here")


def take(*, value: object) -> None:
    torch.zeros(1)


def call(*, value: Any, check: Any) -> None:
    """Both have come from the parent's main module, which is there by its name, for the compiler."""
    if sys.modules["__main__"].__dict__ is not check.__globals__:
        raise ValueError("another module")
    if type(value).__name__ != "Value" or value.number() != 2:
        raise ValueError(str(value.number()))
    check()


def capture(*, reads: bool) -> None:
    """Capture a product on a GPU, with or without reading a value in the middle."""
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        if reads:
            y = y * y.sum().item()
    graph.replay()
    if y.sum().item() != 16.0:
        raise ValueError(f"got {y}")


def losses(model: torch.nn.Module) -> list[float]:
    """Of three steps on [3, 4] inputs."""
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.linspace(-1, 1, 12).view(3, 4)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def require_losses(*, model: torch.nn.Module, wanted: list[float]) -> None:
    if losses(model) != wanted:
        raise ValueError("other losses")
