"""A fake twin of a training step: the same model, optimizer and batch, on tensors without data.

Modules and the optimizer are copied, their tensors are replaced by fake ones, so whatever the step does
to its twin, the user's objects stay as they are.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.tensors.memory_format import in_channels_last
from ridgeline.tracing.subject import Subject


def make_twin(model: nn.Module, optimizer: Optimizer, batch: Any, mode: FakeTensorMode) -> Subject:
    """The fake twin of a step, on tensors of a fake mode that takes real ones as well.

    Raises:
        WorkloadError: the model cannot be copied or has tensors that cannot be faked, or the optimizer
            trains parameters that are not the model's.
    """
    _refuse(model, optimizer)
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Before anything is copied: `deepcopy` takes from the memo what is in it.
        memo[id(tensor)] = fake = mode.from_tensor(tensor)
        # A fake of a parameter that has a gradient gets one, too, and backward would add to it instead of
        # making it.
        fake.grad = None
    # Constants to the fake mode, which then knows their values where an optimizer reads them.
    for setting in _scalar_settings(optimizer):
        memo[id(setting)] = mode.fake_tensor_converter.from_real_tensor(
            mode, setting.detach().clone(), make_constant=True
        )
    try:
        with _FakeCopies(mode, memo):
            twin = _copied(model, memo)
            # Not by its constructor: what arguments the class takes is unknown.
            stepper = object.__new__(type(optimizer))
            memo[id(optimizer)] = stepper
            stepper.__dict__.update(copy.deepcopy(vars(optimizer), memo))
    # What cannot be pickled raises `TypeError`, what refuses a copy itself `copy.Error`.
    except (TypeError, copy.Error) as error:
        raise WorkloadError(
            f"wanted a model and an optimizer that copy.deepcopy can copy, got {error} in "
            f"{type(model).__name__} or {type(optimizer).__name__}; keep open files, locks, processes "
            "and loaders outside of them"
        ) from error
    _settle_foreach(optimizer, stepper)
    move = partial(_fake_on, mode, next(iter(model.parameters())).device)
    return Subject(
        mode=mode,
        model=twin,
        optimizer=stepper,
        batch=pytree.tree_map_only(Tensor, move, batch),
        parameters=dict(twin.named_parameters()),
        originals={id(parameter): name for name, parameter in model.named_parameters()},
    )


def channels_last(twin: Subject) -> Subject:
    """The twin with images and convolution weights in channels-last memory, as the runtime lays them out."""
    with twin.mode, torch.no_grad():
        for tensor in (*twin.model.parameters(), *twin.model.buffers()):
            # By `.data`, as parameters have to stay the objects that optimizer and hooks know.
            tensor.data = in_channels_last(tensor.data)
        for state in twin.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = in_channels_last(value)
        return replace(twin, batch=pytree.tree_map_only(Tensor, in_channels_last, twin.batch))


class Undistributed(nn.Module):
    """Stands for a `DistributedDataParallel` in a twin, which has no process group: the network alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is ever sent."""
        return nullcontext()


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if not isinstance(model, DistributedDataParallel):
        return copy.deepcopy(model, memo)
    twin = Undistributed(copy.deepcopy(model.module, memo))
    twin.training = model.training
    # Whoever refers to the wrapped model in what is copied gets the twin, too.
    memo[id(model)] = twin
    return twin


class _FakeCopies(TorchFunctionMode):
    """Makes `copy.deepcopy` of a tensor a fake tensor, whatever the tensor is a part of."""

    def __init__(self, mode: FakeTensorMode, memo: dict[int, Any]) -> None:
        super().__init__()
        self._mode = mode
        self._memo = memo

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor = args[0]
            if id(tensor) not in self._memo:
                self._memo[id(tensor)] = self._mode.from_tensor(tensor)
            return self._memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _refuse(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise for what cannot be faked, naming it."""
    for name, parameter in model.named_parameters():
        if type(parameter) not in (nn.Parameter, Tensor):
            raise WorkloadError(
                f"wanted plain parameters, got {name} of type {type(parameter).__name__}; trace the "
                "model before it is wrapped or distributed"
            )
    known = {id(parameter) for parameter in model.parameters()}
    strange = [p for p in parameters_of(optimizer) if id(p) not in known]
    if strange:
        raise WorkloadError(
            f"wanted an optimizer over parameters of the model, got {len(strange)} others, the first "
            f"of shape {tuple(strange[0].shape)}; make what owns them a submodule of the model"
        )


def _fake_on(mode: FakeTensorMode, device: torch.device, tensor: Tensor) -> Tensor:
    fake = mode.from_tensor(tensor)
    if tensor.device == device:
        return fake
    with mode:
        return fake.detach().to(device).requires_grad_(tensor.requires_grad)


def _scalar_settings(optimizer: Optimizer) -> Iterator[Tensor]:
    """Scalars on the CPU in parameter groups (learning rates), whose values optimizers compute with."""
    for group in optimizer.param_groups:
        for value in group.values():
            if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
                yield value


def _settle_foreach(optimizer: Optimizer, twin: Optimizer) -> None:
    """Fix the choice between looping and multi-tensor kernels as torch makes it for real parameters.

    Left to itself, the twin would loop: fake tensors are not among the types that torch's rule knows.

    Source: `torch.optim.optimizer._default_to_fused_or_foreach` and its use in `torch.optim.adam`.
    """
    for real, fake in zip(optimizer.param_groups, twin.param_groups, strict=True):
        if "foreach" not in real or real["foreach"] is not None or real.get("fused") is not None:
            continue
        lacks_kernel = isinstance(real.get("lr"), Tensor) and real.get("capturable") is False
        fake["foreach"] = (
            all(p.device.type == "cuda" for p in real["params"])
            and not real.get("differentiable", False)
            and not lacks_kernel
        )
