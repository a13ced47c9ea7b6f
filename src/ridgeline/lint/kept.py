"""Running a program without a trace: random state, parameters and buffers are put back afterwards."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ridgeline.state.saved_state import preserved


@contextlib.contextmanager
def module_kept(module: Any, *, parameters: bool = True) -> Iterator[None]:
    """Random state, parameters and buffers of a module as before, at the end.

    Args:
        module: Of what is none, random state alone is kept.
        parameters: Without, parameters are not looked at.
    """
    if not isinstance(module, nn.Module):
        with preserved([]):
            yield
        return
    tensors = [*module.buffers(), *(module.parameters() if parameters else ())]
    with preserved(tensors), buffers_attached(module):
        yield


@contextlib.contextmanager
def buffers_attached(module: nn.Module) -> Iterator[None]:
    """Buffers that were replaced meanwhile are put back under their names, at the end; None as well."""
    # Not `named_buffers`, which leaves out those that are None, and further names of one tensor.
    before = [(inner, dict(inner._buffers)) for inner in module.modules()]  # noqa: SLF001
    try:
        yield
    finally:
        for inner, buffers in before:
            for name, tensor in buffers.items():
                setattr(inner, name, tensor)
