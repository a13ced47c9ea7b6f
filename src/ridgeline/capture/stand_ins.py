"""Tensors that a function uses besides its inputs: found while it is traced, and replaced by stand-ins.

A dispatch mode sees every operator that the function runs. Whatever real tensor comes along there is state
of the function: a parameter, a buffer, a tensor that it closes over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import CaptureError

Memory = tuple[Any, ...]
"""What makes two tensor objects one variable, see `memory_of`."""


class StandIns(TorchDispatchMode):
    """Hands each operator a stand-in for every real tensor that the function uses besides its inputs."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor], used: dict[Memory, Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in
        self.used = used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKES_CONSTANT:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replace(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._stand_in(tensor)


_MAKES_CONSTANT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""`torch.tensor([1.0, 2.0])` in a function makes a tensor of these values in every call: a true constant."""


def memory_of(tensor: Tensor) -> Memory:
    """What makes two tensor objects the same variable: `weight` and `weight.data` are."""
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


def used_tensors(flat: Callable[..., Any], inputs: list[Tensor]) -> dict[Memory, Tensor]:
    """The tensors that the function uses besides its inputs, in the order of first use."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: dict[Memory, Tensor] = {}
    fakes: dict[Memory, Tensor] = {}

    def stand_in(real: Tensor) -> Tensor:
        key = memory_of(real)
        if key not in found:
            # Kept, so that no other tensor gets the same memory meanwhile.
            found[key], fakes[key] = real, mode.from_tensor(real)
        return fakes[key]

    stand_ins = [mode.from_tensor(tensor) for tensor in inputs]
    versions = [tensor._version for tensor in stand_ins]  # noqa: SLF001 (how often it was written to)
    with mode:
        flat(StandIns(stand_in, found), list(stand_ins))
    for index, (tensor, version) in enumerate(zip(stand_ins, versions, strict=True)):
        if tensor._version != version:  # noqa: SLF001
            raise CaptureError(
                f"wanted a function that leaves its inputs as they are, got one that updates input {index} "
                "in place; clone the input first, or close over a tensor that is to be updated"
            )
    return found


def lifted_function(
    flat: Callable[..., Any], found: dict[Memory, Tensor]
) -> Callable[..., list[Any]]:
    """The function with the tensors that it uses as its first arguments."""

    def lifted(*tensors: Tensor) -> list[Any]:
        given = dict(zip(found, tensors, strict=False))

        def stand_in(real: Tensor) -> Tensor:
            if memory_of(real) not in given:
                raise CaptureError(
                    "wanted a function that uses the same tensors in every call, got one that used a new "
                    f"{tuple(real.shape)} tensor in its second; keep one tensor, and write new values into it"
                )
            return given[memory_of(real)]

        return flat(StandIns(stand_in, found), list(tensors[len(found) :]))

    return lifted


def take_grads(used: dict[Memory, Tensor], given: list[Tensor]) -> dict[Memory, Tensor]:
    """The gradients that a trace left in `.grad`, which is None again afterwards."""
    for index, tensor in enumerate(given):
        if tensor.grad is not None:
            raise CaptureError(
                "wanted a function that leaves its inputs as they are, got one that sets .grad of input "
                f"{index}; return the gradient of torch.autograd.grad instead"
            )
    taken: dict[Memory, Tensor] = {}
    for key, tensor in used.items():
        grad = tensor.grad if tensor.is_leaf else None
        # A gradient that was there before is a real tensor, and stays.
        if isinstance(grad, FakeTensor):
            taken[key] = grad
            tensor.grad = None
    return taken
