"""What is said of a program that torch's compiler cannot read."""

import functools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codecache import CppPythonBindingsCodeCache

from ridgeline.errors import CaptureError
from ridgeline.guards.obstacles import obstacle
from ridgeline.guards.reading import UnreadableError, read_program
from ridgeline.plan import Plan
from ridgeline.programs.inductor import name_unreadable_libraries
from ridgeline.session import TrainStep

GENERATOR, NUMPYS = torch.Generator(), np.random.default_rng(0)
TRACED = torch.fx.symbolic_trace(nn.ReLU())
NUMBERS = np.ones(2)


class Rated:
    """Its rate is computed when it is first asked for."""

    @functools.cached_property
    def rate(self) -> float:
        """In Python 3.11 behind a lock."""
        return 2.0


RATED = Rated()


@functools.singledispatch
def scaled(by: object, x: Tensor) -> Tensor:
    """By numbers only."""
    return x


@scaled.register
def _(by: float, x: Tensor) -> Tensor:
    return x * by


class Listed(torch.autograd.Function):
    """Its slopes are no number."""

    slopes = (1.0, 2.0)


def forked(x: Tensor) -> Tensor:
    """As it was given, with other draws."""
    with torch.random.fork_rng(devices=[]):
        return x


SAID = {
    "a draw from a torch.Generator, whose state is kept where a captured program does not look; draw outside "
    "and pass what it gives, or draw without it": lambda x: x + torch.rand(3, generator=GENERATOR),
    "a draw of random numbers that are not torch's (random): draw with torch, or outside of the step": (
        lambda x: x * NUMPYS.random()
    ),
    "a call of a functools.singledispatch function, which looks for types where a captured program does not "
    "look": lambda x: scaled(2.0, x),
    "a call of fork_rng(), which gives no tensor": forked,
    "a branch on a number of NumPy's, whose value a program leaves open; make it Python's own, by item(), "
    "where it is set": lambda x: x * 2 if NUMBERS.sum() > 1 else x,
    "slopes of an autograd.Function, in whose class the compiler reads numbers and texts only; hold it in a "
    "name of the module, or pass it to apply()": lambda x: torch.clamp(x, Listed.slopes),
    "a call of Interpreter.__init__, which the compiler does not read": lambda x: (
        torch.fx.Interpreter(TRACED).run(x)
    ),
    "a branch on the value of a tensor": lambda x: x * 2 if x.sum() > 0 else x,
    "a call of torch.is_inference_mode_enabled(), where a captured program does not look": lambda x: (
        x if torch.is_inference_mode_enabled() else x * 2
    ),
}
if sys.version_info < (3, 12):  # no lock since
    SAID |= {
        "a lock, as the first read of a functools.cached_property takes one; read that once before": lambda x: (
            x * RATED.rate
        )
    }


@pytest.mark.parametrize("said", SAID)
def test_what_the_compiler_calls_by_its_own_words_is_named(said: str) -> None:
    """Torch's first lines are of its workings, `missing tp_iter` say; each version has others."""
    code: Callable[[Tensor], Tensor] = SAID[said]
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(code, backend="eager", fullgraph=True)(torch.ones(3))
    assert obstacle(raised.value).rpartition(" (test_obstacles.py:")[0] == said


def test_an_error_that_quotes_another_is_cut_at_its_first_line() -> None:
    """Torch's compiler quotes what operators raised in one line, line ends and all."""
    quoted = RuntimeError(
        'when making fake tensor call: RuntimeError("No data.\\nIf you are using")'
    )
    assert obstacle(quoted) == 'when making fake tensor call: RuntimeError("No data'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Pending unbacked symbols {u0} not in returned outputs",
            "a size that the values of tensors",
        ),
        (
            "only integers are valid indices (got SymInt)",
            "an index that the values of tensors decide",
        ),
        (
            "modified by an inplace operation: [torch.FloatTensor [3, 4]] is at version 2",
            "a tensor (FloatTensor [3, 4]) that the code changes in place before backward, where compiled",
        ),
    ],
)
def test_what_torch_says_for_its_developers_is_said_in_words(text: str, words: str) -> None:
    assert obstacle(RuntimeError(text)).startswith(words)


def mean(x: Tensor) -> Tensor:
    raise ValueError(f"no {x.ndim} rows")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            lambda x: x * random.choice([1, 2]),
            r"a draw of random numbers that are not torch's \(Random.choice\): draw with torch, or outside of the step",
        ),
        (
            lambda x: x * time.time(),
            r"a call of time.time, which the compiler does not read \(",
        ),
        (lambda x: x.apply_(abs), r"an operator on no tensor \(.*BuiltinVariable\(abs\)"),
        (
            lambda x: torch.as_tensor([x.sum()]),
            "a look at the values of a tensor, which has none as ",
        ),
        (
            mean,
            r"ValueError\(.*'no 1 rows'.*\), raised as the compiler read the code \(test_obstacles",
        ),
    ],
)
def test_what_stops_the_compiler_is_said_in_words(
    code: Callable[[Tensor], Any], words: str
) -> None:
    """Its own errors begin with names that it gives to kinds of failures."""
    called: dict[str, Any] = {}
    exec("def program(code, x): return code(x)", called)
    with pytest.raises(UnreadableError, match=f"got {words}"):
        read_program(called["program"], {"code": code, "x": torch.ones(4)})


def test_an_observer_of_quantization_is_named() -> None:
    observer = "module: torch.ao.quantization.quantize, qualname: _observer_forward_hook, skip reason: file"
    assert obstacle(RuntimeError(f"marked as skipped\n {observer}")) == (
        "an observer of torch.ao.quantization (_observer_forward_hook), which decides by values of its buffers"
    )


def test_a_batch_that_is_made_to_want_gradients_is_named() -> None:
    """As energies of physics are often written; the next step would find the batch changed."""

    def forces(model: nn.Module, batch: Tensor) -> Tensor:
        batch.requires_grad_(True)
        (force,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return force.square().mean()

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, forces, optimizer, plan=Plan(execution="step-graph"))
    step(torch.ones(2, 3))
    message = r"as in x\.clone\(\)\.requires_grad_\(\) \(test_obstacles.py:\d+ in forces\); use execution='eager'"
    with pytest.raises(CaptureError, match=message):
        step(torch.ones(2, 3))


def test_a_library_that_was_not_written_whole_is_named(tmp_path: Path) -> None:
    """A process that is ended while torch's compiler writes leaves such in its cache."""
    name_unreadable_libraries()
    file = tmp_path / "kernel.main.so"
    file.write_bytes(b"\x7fELF")
    with pytest.raises(ImportError) as raised:
        CppPythonBindingsCodeCache._load_library(str(file), "kernel")
    # Else torch would take it for loaded.
    assert f"kernel.{CppPythonBindingsCodeCache.entry_function}" not in sys.modules
    assert str(raised.value) == (
        f"wanted a library of torch's compiler that can be loaded, got {file}: file too short; if a process "
        "was ended while it compiled, remove this file and start again"
    )
