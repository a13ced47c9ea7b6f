"""What one call of a callable reads besides its arguments, and takes for granted of it all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ridgeline.callables.calls.forms import name_of
from ridgeline.callables.calls.front import call_program
from ridgeline.capture.casts import operator_settings
from ridgeline.errors import CaptureError
from ridgeline.guards.settled import settled_guards, tensors_of
from ridgeline.tensors.nests import tensors_in


class CallReads:
    """The guards of a call, its tensors and its device; for the callable as written.

    Attributes:
        guards: Of `call_program`, in the modes of now but without gradients.
        tensors: What it reads besides the arguments, each once.
        device: The first GPU that an argument or one of the tensors lies on, or the CPU.
        settings: Modes that change what an operator computes.

    Raises:
        UnreadableError: torch's compiler cannot read the call in one piece.
        WritingError: the call changes something besides tensors.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        modes = torch.is_inference_mode_enabled(), torch.get_default_dtype()
        self.settings = (*operator_settings(), *modes)
        with torch.no_grad():
            self.guards = settled_guards(call_program, fn, args, name_of(fn))
        # Also those that this call does not read: they are put back, and a comparison perturbs them, like all
        # others.
        own = (*fn.parameters(), *fn.buffers()) if isinstance(fn, nn.Module) else ()
        self.tensors = [*{id(t): t for t in (*self.guards.tensors, *own)}.values()]
        self.device = _first_gpu([*tensors_in(args), *self.tensors])


def device_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.device:
    """The first GPU that an argument, or a tensor that the callable can get at, lies on; or the CPU."""
    return _first_gpu([*tensors_in(args), *tensors_of(fn)])


def _first_gpu(tensors: list[Tensor]) -> torch.device:
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def check_given(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse what cannot be called, or has tensors without values, of which nothing could be compared.

    Raises:
        CaptureError: it is not callable or is a class, or a tensor lies on the device `meta`.
    """
    if not callable(fn) or isinstance(fn, type):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise CaptureError(
            f"wanted a function or module, got {got} in hybridize(...); give what is called, "
            "and an example of its arguments behind it"
        )
    meta = [tensor for tensor in (*tensors_in(args), *tensors_of(fn)) if tensor.is_meta]
    if meta:
        raise CaptureError(
            f"wanted tensors with values, got one of shape {tuple(meta[0].shape)} on the device 'meta'; move "
            "the example to a device, and fill a model there with .to_empty(device=...) and its weights"
        )


def check_shapes(fn: Callable[..., Any]) -> None:
    """Refuse a model that gets its shapes with its first call.

    Raises:
        CaptureError: a parameter or buffer has no shape yet.
    """
    for module in fn.modules() if isinstance(fn, nn.Module) else ():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and is_lazy(tensor):
                raise CaptureError(
                    f"wanted a model whose parameters have their shapes, got {name!r} of a "
                    f"{type(module).__name__} that has none yet; call the model once with an example before"
                )
