"""Snapshots: put a model, its optimizer and the random state back exactly as they were.

Trials, warm-up and equivalence checks run real steps; a snapshot makes them leave no trace.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ridgeline.runtime.random_state import HostGenerators


class Snapshot:
    """A copy of parameters, buffers, optimizer state and settings, and random state.

    Cost: Doubles the memory of what it copies, as long as it lives.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._tensors = {name: tensor.detach().clone() for name, tensor in _named(model)}
        self._state = {p: _copy(state) for p, state in optimizer.state.items()}
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._paths = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._host_rng = HostGenerators.now()

    def restore(self, *, keep_settings: bool = False) -> None:
        """Put everything back, in place wherever a tensor still exists; gradients become None.

        Args:
            keep_settings: Leave the optimizer's settings (learning rate and so on) as they are now.
        """
        with torch.no_grad():
            self._forget_new_buffers()
            for name, tensor in _named(self._model):
                tensor.copy_(self._tensors[name])
            self._restore_state()
            if not keep_settings:
                self._restore_groups()
        self._optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self._cpu_rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)
        self._host_rng.restore()

    def _forget_new_buffers(self) -> None:
        """Buffers that the model registered in a step since: it will do so again."""
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for name in list(module._buffers):  # noqa: SLF001 - there is no public list of one module's
                path = f"{prefix}.{name}" if prefix else name
                if module._buffers[name] is not None and path not in self._paths:  # noqa: SLF001
                    delattr(module, name)

    def _restore_state(self) -> None:
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._state:
                del state[parameter]
        for parameter, saved in self._state.items():
            state[parameter] = _put_back(state.get(parameter, {}), saved)

    def _restore_groups(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            for key, value in saved.items():
                group[key] = _put_back({"": group.get(key)}, {"": value})[""]


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _copy(value: Any) -> Any:
    return pytree.tree_map(_copy_leaf, value)


def _copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _put_back(now: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved values, written into the present tensors where shape and dtype still fit."""
    result = {}
    for key, value in saved.items():
        present = now.get(key)
        if (
            isinstance(value, Tensor)
            and isinstance(present, Tensor)
            and (present.shape, present.dtype, present.device)
            == (value.shape, value.dtype, value.device)
        ):
            present.copy_(value)
            result[key] = present
        else:
            result[key] = _copy(value)
    return result
