"""Makes the steps of this folder importable, and runs step programs without compiling them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.steps.whole_step import runner as step_graph
from ridgeline.runtime.steps.whole_step.program import StepProgram

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="module")
def compiled_in_this_process() -> Iterator[None]:
    """The compiler's pool of processes would outlive the tests."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@pytest.fixture
def compiler_begins_anew() -> Iterator[None]:
    """The compiler knows nothing of earlier cases, whose code may be the same, and starts no processes."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run operator by operator instead of compiled, which takes milliseconds to prepare.

    On one thread: what is compared are a few numbers, for which a second thread is only waited for.
    """

    def as_traced(program: StepProgram, _notes: list[str]) -> Any:
        def call(flat: list[Tensor]) -> Any:
            with torch.no_grad():
                return program.graph(*flat)

        return call

    monkeypatch.setattr(step_graph, "compile_graph", as_traced)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
