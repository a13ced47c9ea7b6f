"""The linter on functions: every rule pinned by its text, and what is left alone.

The device captured is the CPU, or torch's `meta` device where host and device must differ.
"""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.lint.lint import (
    Lint,
    check_capturable,
    inspect_callable,
)

FILE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)  # fmt: skip
OUTSIDE = torch.ones(3)


def line_of(program: Callable[..., Any], after: int = 1) -> str:
    code = program.__code__
    return f"{FILE}:{code.co_firstlineno + after} in {code.co_name}"


def item(x: Tensor) -> float:
    return x.sum().item()


def copy_to_host(x: Tensor) -> Tensor:
    return x.cpu()


def boolean_index(x: Tensor) -> Tensor:
    return x[x > 0]


def python_random(x: Tensor) -> Tensor:
    return x * random.random()


def numpy_random(x: Tensor) -> Tensor:
    return x * np.random.rand()


def own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(3, generator=torch.Generator())


def seeding(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


def swap_data(x: Tensor) -> Tensor:
    x.data = torch.zeros(3, 3)
    return x


def unpinned_copy(x: Tensor) -> Tensor:
    return x * OUTSIDE.to("meta")


def host_tensor(x: Tensor) -> Tensor:
    return x * OUTSIDE[0]


def host_rand(x: Tensor) -> Tensor:
    return x * torch.rand(())


MESSAGES = [
    (item, "cpu", "wanted values that stay on the device, got tensor.item() at {}: the host waits for the device to read it, and a replay would keep using what was read at capture; keep it a tensor (torch.where, a mask as a factor), or read it from the result of the step"),
    (copy_to_host, "cpu", "wanted results that stay on the device, got tensor.cpu() at {}: the copy to the host is waited for, and would hold the values seen at capture; copy what the step returns, after the step"),
    (boolean_index, "cpu", "wanted shapes that do not depend on values, got aten.index at {}: the host waits to learn how many elements there are, and a replay would keep that number; use a form of fixed shape: torch.where, masked_fill, a weight of zero, output_size="),
    (python_random, "cpu", "wanted random numbers drawn on the device, got Python's random at {}: it is drawn on the host, once, at capture, and every replay repeats it; draw with device= on the device of the step, or pass it in the batch"),
    (own_generator, "cpu", "wanted the default generator of the device, got aten.rand at {}: a graph advances the default generator only; another one would repeat its numbers or fail; leave out generator=, and seed with torch.manual_seed before the step"),
    (seeding, "cpu", "wanted random state that the step leaves alone, got torch.manual_seed() at {}: seeding and reading the state are host work: refused in a capture, or done once and never again; seed before the step"),
    (sparse, "cpu", "wanted dense tensors, got aten._to_sparse at {}: the number of non-zero entries depends on the data, so the host waits for it; make the gradient dense, for example nn.Embedding(sparse=False)"),
    (swap_data, "cpu", "wanted parameters and buffers changed in place, got tensor.data = ... at {}: the name gets another tensor, while every replay reads the one of the capture; write into it: copy_, add_, lerp_"),
    (unpinned_copy, "meta", "wanted data that is on the device already, got aten._to_copy at {}: a copy from host memory that is not pinned, or not requested with non_blocking=True, makes the host wait; put it in the batch or a buffer of the model, or make it on the device (torch.full, torch.arange)"),
    (host_tensor, "meta", "wanted every tensor of the step on the device, got aten.select at {}: a tensor on the host is read once, at capture, and every replay repeats what it held then; move it to the device before: register_buffer in the model, or a leaf of the batch"),
    (host_rand, "meta", "wanted random numbers drawn on the device, got aten.rand at {}: it is drawn on the host, once, at capture, and every replay repeats it; draw with device= on the device of the step, or pass it in the batch"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "device", "message"), MESSAGES)
def test_message(program: Callable[..., Any], device: str, message: str) -> None:
    """Each rule says what it wants, what it got, on which line, why, and what to do."""
    (found,) = inspect_callable(program, torch.ones(3, 3, device=device), device=device).findings
    assert str(found) == message.format(line_of(program))


def test_numpy_message() -> None:
    """The generator of numpy is caught by its state, without a line."""
    (found,) = inspect_callable(numpy_random, torch.ones(3), device="cpu").findings
    assert str(found).startswith(
        "wanted random numbers drawn on the device, got numpy.random at an unknown line: it is drawn"
    )


def one_hot(x: Tensor) -> Tensor:
    return nn.functional.one_hot(x.long())


def tensor_from_list(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0], device="meta")


def copy_in(x: Tensor) -> Tensor:
    return x.copy_(OUTSIDE)


def index_from_host(x: Tensor) -> Tensor:
    return x[torch.tensor([0, 1])]


def synchronize(x: Tensor) -> None:
    """Where there is no GPU the call raises, but it was seen; under an alias, too."""
    alias = torch.cuda.synchronize
    with contextlib.suppress(AssertionError, RuntimeError):
        alias()


BREAKING = [
    (lambda x: float(x.sum()), "cpu", "host-sync", "float(tensor)"),
    (lambda x: x if x.sum() > 0 else -x, "cpu", "host-sync", "bool(tensor)"),
    (lambda x: range(x.sum().long()), "cpu", "host-sync", "tensor as an index"),
    (lambda x: x.tolist(), "cpu", "host-sync", "tensor.tolist()"),
    (lambda x: x.numpy(), "cpu", "host-sync", "tensor.numpy()"),
    (lambda x: f"{x.sum():.2f}", "cpu", "host-sync", "tensor in a format string"),
    (repr, "cpu", "host-sync", "printing a tensor"),
    (lambda x: torch.equal(x, x), "cpu", "host-sync", "torch.equal()"),
    (one_hot, "cpu", "host-sync", "aten._local_scalar_dense"),
    (lambda x: torch.linalg.inv(x + 3 * torch.eye(3)), "cpu", "host-sync", "aten._linalg_check_errors"),
    (lambda x: x.nonzero(), "cpu", "dynamic-shape", "aten.nonzero"),
    (lambda x: torch.where(x > 0), "cpu", "dynamic-shape", "aten.nonzero"),
    (lambda x: x.masked_select(x > 0), "cpu", "dynamic-shape", "aten.masked_select"),
    (lambda x: x.unique(), "cpu", "dynamic-shape", "aten._unique2"),
    (lambda x: x.unique_consecutive(), "cpu", "dynamic-shape", "aten.unique_consecutive"),
    (lambda x: x.long().flatten().bincount(), "cpu", "dynamic-shape", "aten.bincount"),
    (lambda x: x.repeat_interleave(x[0].long(), 0), "cpu", "dynamic-shape", "aten.repeat_interleave"),
    (lambda x: x.index_put_((x > 0,), torch.arange(9.0)), "cpu", "dynamic-shape", "aten.index_put_"),
    (lambda x: x * float(OUTSIDE.sum()), "meta", "host-tensor", "aten.sum"),
    (tensor_from_list, "meta", "unpinned-copy", "torch.tensor(..., device='meta')"),
    (lambda x: x[[0, 1]], "meta", "unpinned-copy", "a list as an index"),
    (copy_in, "meta", "unpinned-copy", "aten.copy_"),
    (index_from_host, "meta", "unpinned-copy", "aten.index"),
    (synchronize, "cpu", "host-sync", "torch.cuda.synchronize()"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "device", "rule", "op"), BREAKING)
def test_found(program: Callable[..., Any], device: str, rule: str, op: str) -> None:
    """What breaks a rule is found, under the name that the user knows."""
    found = inspect_callable(program, torch.ones(3, 3, device=device), device=device).findings
    assert [(one.rule, one.op) for one in found] == [(rule, op)]


def fill_by_mask(x: Tensor) -> None:
    x[x > 0] = 0.0


def marked(x: Tensor) -> Tensor:
    mark = torch.ops.profiler._record_function_enter_new("part", None)
    result = x + 1
    torch.ops.profiler._record_function_exit._RecordFunction(mark)
    return result


FINE = [
    (marked, "cpu"),
    (lambda x: x[torch.tensor([0, 1])], "cpu"),
    (fill_by_mask, "cpu"),
    (lambda x: x.repeat_interleave(x[0].long(), 0, output_size=3), "cpu"),
    (lambda x: x.repeat_interleave(2, 0), "cpu"),
    (nn.functional.dropout, "cpu"),
    (lambda x: torch.where(x > 0, x, 0.0), "cpu"),
    (lambda x: x * torch.tensor(2.0), "meta"),
    (lambda x: x * torch.full((3,), 2.0, device="meta"), "meta"),
    (lambda x: x * torch.tensor([2.0, 3.0]).sum().item(), "meta"),
    (lambda x: torch.cat([torch.tensor([], device="meta"), x[0]]), "meta"),
    (lambda x: torch.cat([torch.empty(0).to(x.device), x[0]]), "meta"),
]


@pytest.mark.parametrize(("program", "device"), FINE)
def test_fine(program: Callable[..., Any], device: str) -> None:
    """What a graph can hold gives neither finding nor doubt, constants from Python numbers included."""
    assert inspect_callable(program, torch.ones(3, 3, device=device), device=device) == Lint((), ())


def several(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x * x.max().item()
    return x[x > 0]


def test_all_in_one_pass() -> None:
    """One run finds everything, each thing once, in the order of the program; the refusal lists it."""
    found = inspect_callable(several, torch.ones(3), device="cpu").findings
    assert [one.line for one in found] == [line_of(several, after) for after in (1, 2, 3)]
    with pytest.raises(CaptureError) as caught:
        check_capturable(found)
    assert str(caught.value) == (
        "wanted a program that a CUDA graph can hold, got 3 obstacles; nothing was captured. Remove them, or "
        "use an execution mode without a graph:" + "".join(f"\n- {one}" for one in found)
    )
    check_capturable(())


class Scaled(nn.Module):
    """A layer that takes its scale from its first batch, and holds one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("second", self.first)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.mean()
        self.second = self.first + 1.0
        return x * self.scale + self.second


def test_buffers_are_under_their_names_again() -> None:
    """Also those that were none, and a second name of one tensor."""
    module = Scaled()
    inspect_callable(module, torch.ones(3), device="cpu")
    assert module.scale is None
    assert module.second is module.first


def test_a_sparse_tensor_on_the_host_is_looked_at() -> None:
    """It has no memory of its own by which to know it again."""

    def fn(x: Tensor) -> Tensor:
        rows = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=False)
        return x + len(rows)

    assert inspect_callable(fn, torch.ones(3, device="meta"), device="meta") == Lint((), ())
