"""What a call may change, as a flat table of leaves: path (a Python expression over `w`) to value.

Two worlds are equal where their portraits are. Tensors are kept as copies with shape, strides, dtype and what
they share memory with; numbers with their type, so that 0.0, -0.0, 0 and False are four.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
SKIPPED = frozenset(
    (
        "_parameters",
        "_buffers",
        "_modules",
        "_compiled_call_impl",
        "_is_full_backward_hook",
        *HOOKS,
        *("_is_torch_compile", "_torchdynamo_wrapper_id"),
    )
) | {f"{name}_{more}" for name in HOOKS for more in ("with_kwargs", "always_called")}
"""What torch keeps in a module for itself; parameters, buffers, modules and hooks are drawn apart."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


FORM = ("foreach", "fused", "capturable")
"""How an optimizer computes, which a step that is replayed chooses; so it does how state lies in memory."""


class TensorLeaf(NamedTuple):
    """A tensor as it was: `shares` is the first path that has the same memory."""

    value: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    kind: str
    shares: str


class Portrait:
    """Draws values; one for all that belong together, so that shared memory is seen.

    `is_replayed`: it is of a training step that a GPU replays, whose learning rates lie in tensors.
    """

    def __init__(self, *, with_gradients: bool, is_replayed: bool = False) -> None:
        self.leaves: dict[str, Any] = {}
        self._is_replayed = is_replayed
        self._with_gradients = with_gradients
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []
        self._storages: dict[int, str] = {}

    def draw(self, path: str, value: Any) -> None:
        """Add a value and all that it leads to."""
        if isinstance(value, PLAIN):
            self.leaves[path] = (type(value).__name__, repr(value))
            return
        # Which of two equal tuples it is, nobody can change anything by.
        if id(value) in self._seen and not isinstance(value, (tuple, frozenset)):
            self.leaves[path] = ("same as", self._seen[id(value)])
            return
        self._seen[id(value)] = path
        self._kept.append(value)  # else its id could become another's
        if isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, Optimizer):
            self._optimizer(path, value)
        else:
            self._other(path, value)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        key = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        shares = self._storages.setdefault(key, path) if key else path
        self.leaves[path] = TensorLeaf(
            tensor.detach().clone().cpu().as_subclass(Tensor),  # two copies of a class do not mix
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.requires_grad,
            type(tensor).__name__ + (" of inference" if tensor.is_inference() else ""),
            shares if shares != path else "",
        )
        if self._with_gradients and tensor.is_leaf and tensor.grad is not None:
            self.draw(f"{path}.grad", tensor.grad)

    def _module(self, path: str, module: nn.Module) -> None:
        own = vars(module)
        for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            self.draw(f"{path}.{name}", tensor)
        for name, child in own["_modules"].items():
            self.draw(f"{path}[{name}]" if name.isdigit() else f"{path}.{name}", child)
        for name in HOOKS:
            self.draw(f"{path}.{name}", list(own[name].values()))
        for name, value in own.items():
            if name not in SKIPPED and not name.startswith("__"):  # TorchScript leaves some
                self.draw(f"{path}.{name}", value)
        self._class_of(path, module)

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params" or (self._is_replayed and key in FORM):
                    continue
                is_rate = self._is_replayed and key in ("lr", "initial_lr")
                seen = f"{float(value):.5g}" if is_rate else value  # float32 there
                self.draw(f"{path}.param_groups[{index}][{key!r}]", seen)
            for place, parameter in enumerate(group["params"]):
                at = f"{path}.param_groups[{index}]['params'][{place}]"
                self.draw(at, parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    is_laid_out = self._is_replayed and isinstance(value, Tensor)
                    seen = value.contiguous() if is_laid_out else value
                    self.draw(f"{path}.state[{at}][{key!r}]", seen)

    def _other(self, path: str, value: Any) -> None:
        self.leaves[path] = ("type", type(value).__name__)
        if isinstance(value, dict):
            for key, part in value.items():
                self.draw(f"{path}[{key!r}]", part)
        elif isinstance(value, (list, tuple, collections.deque)):
            self.leaves[f"len({path})"] = len(value)
            for index, part in enumerate(value):
                self.draw(f"{path}[{index}]", part)
        elif isinstance(value, (set, frozenset)):
            self.leaves[path] = ("set", repr(sorted(value, key=repr)))
        elif isinstance(value, np.ndarray):
            self.draw(f"torch.from_numpy({path}.copy())", torch.from_numpy(value.copy()))
        elif isinstance(value, torch.Generator):
            self.draw(f"{path}.get_state()", value.get_state())
        elif isinstance(value, np.random.Generator):
            self.draw(f"repr({path}.bit_generator.state)", repr(value.bit_generator.state))
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self.draw(f"{path}.__func__", value.__func__)
        elif isinstance(value, type):
            self._class(path, value)
        else:
            self._object(path, value)

    def _function(self, path: str, function: types.FunctionType) -> None:
        self.leaves[path] = ("function", function.__qualname__)
        if function.__module__.startswith("torch"):
            return
        for index, cell in enumerate(function.__closure__ or ()):
            try:
                contents = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.draw(f"{path}.__closure__[{index}].cell_contents", contents)
        self.draw(f"{path}.__defaults__", function.__defaults__)

    def _object(self, path: str, value: Any) -> None:
        if type(value).__module__.startswith(
            ("torch", "builtins", "numpy", "functools", "weakref")
        ):
            return
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(value, "__dict__", {}), *slots]
        if dataclasses.is_dataclass(value):
            names += [field.name for field in dataclasses.fields(value)]
        for name in dict.fromkeys(names):
            if hasattr(value, name) and not name.startswith("__"):
                self.draw(f"{path}.{name}", getattr(value, name))
        self._class_of(path, value)

    def _class_of(self, path: str, value: Any) -> None:
        if not type(value).__module__.startswith(("torch", "types", "collections")):
            self.draw(f"type({path})", type(value))

    def _class(self, path: str, kind: type) -> None:
        self.leaves[path] = ("class", kind.__qualname__)
        if kind.__module__.startswith(("torch", "builtins", "numpy", "types")):
            return
        for name, value in vars(kind).items():
            if not name.startswith("__") and isinstance(value, (*PLAIN, Tensor, list, dict)):
                self.draw(f"{path}.{name}", value)


class Ambient(NamedTuple):
    """What the whole process shares: random state and modes."""

    torch_random: Tensor
    cuda_random: Tensor | None
    python_random: Any
    numpy_random: Any
    dtype: torch.dtype
    modes: tuple[Any, ...]

    @staticmethod
    def now() -> Ambient:
        """As it is."""
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        )
        numbers = random.getstate(), np.random.get_state(legacy=False)
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return Ambient(torch.get_rng_state(), on_gpu, *numbers, torch.get_default_dtype(), modes)

    def restore(self) -> None:
        """Random state and default dtype as they were; the modes are contexts, which end by themselves."""
        torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random)
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        torch.set_default_dtype(self.dtype)

    def draw(self) -> dict[str, Any]:
        """Leaves to compare."""
        on_gpu = self.cuda_random
        numpy = {**self.numpy_random, **self.numpy_random["state"]}
        del numpy["state"]
        return {
            "torch.get_rng_state()": hash(self.torch_random.numpy().tobytes()),
            "torch.cuda.get_rng_state()": None
            if on_gpu is None
            else hash(on_gpu.numpy().tobytes()),
            "random.getstate()": hash(self.python_random),
            "numpy.random.get_state()": hash((numpy.pop("key").tobytes(), *numpy.items())),
            "torch.get_default_dtype()": self.dtype,
            "modes of torch": self.modes,
        }
