"""Snapshots: put a model, its optimizer and the random state back exactly as they were.

Trials, warm-up and equivalence checks run real steps; a snapshot makes them leave no trace.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError
from ridgeline.optimizers.groups import parameters_of, state_methods
from ridgeline.reach.generators import Generators
from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import StateChange, has_changed
from ridgeline.tensors.copies import overlaps
from ridgeline.tensors.nests import tensors_in

Name = tuple[int, str]
"""The number of a network, the model first, and a path in it."""


class Stateful(Protocol):
    """What makes the workers' gradients one, as far as it has to be put back."""

    def state_dict(self) -> dict[str, Tensor]:
        """What it remembers from step to step."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember that instead."""
        ...


class Snapshot:
    """A copy of parameters, buffers, optimizer state and settings, and random state.

    Args:
        model: Gradients of what the optimizer holds become None when it is put back.
        optimizer: Made from the model's parameters.
        loss_fn: Other networks that it can get at (a teacher, say) are copied too, with their gradients.
        synchronizer: What it remembers from step to step is copied.

    Raises:
        CaptureError: a network that the loss function reads has parameters without shapes yet.

    Cost: Doubles the memory of what it copies, as long as it lives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        synchronizer: Stateful | None = None,
    ) -> None:
        self._synchronizer = synchronizer
        self._remembered = {} if synchronizer is None else _copy(synchronizer.state_dict())
        others = () if loss_fn is None else _networks(loss_fn)
        self._networks = (model, *(other for other in others if other is not model))
        self._optimizer = optimizer
        self._tensors = {name: tensor.detach().clone() for name, tensor in self._named()}
        self._gradients = [(p, _copy(p.grad)) for p in self._parameters_outside()]
        self._state = {
            p: _copy(state) for p, state in state_methods(optimizer).items(optimizer.state)
        }
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._paths = {name: buffer is None for name, _, _, buffer in self._buffers()}
        self._modules = {module for network in self._networks for module in network.modules()}
        self._generators = Generators()

    def tensors(self) -> Iterator[Tensor]:
        """The tensors whose values are kept, as they are now."""
        yield from (tensor for _, tensor in self._named())
        for state in state_methods(self._optimizer).values(self._optimizer.state):
            yield from tensors_in(state)

    def changes_beside(self) -> Iterator[StateChange]:
        """Tensors with other values than they had, but for the model's parameters that the optimizer has.

        Of other networks all are looked at: a loss may be learned with the model.

        Cost: Waits for the device, once for each of them.
        """
        held = {id(p) for p in parameters_of(self._optimizer)}
        for (number, path), tensor in self._named():
            saved = self._tensors.get((number, path))
            is_trained = not number and id(tensor) in held
            if saved is not None and not is_trained and has_changed(saved, tensor):
                where = " of a network that the loss reads" if number else ""
                yield StateChange(f"{path}{where}", saved, tensor)

    def restore(self, *, keep_settings: bool = False) -> None:
        """Put everything back, in place wherever a tensor still exists; trained gradients become None.

        Args:
            keep_settings: Leave the optimizer's settings (learning rate and so on) as they are now.
        """
        with torch.no_grad():
            # First: what is copied back below has to find the names that it was saved under.
            self._forget_new_buffers()
            for name, tensor in self._named():
                saved = self._tensors.get(name)
                if saved is None:
                    # Of a network that a step has made since: from now on as it is now.
                    self._tensors[name] = tensor.detach().clone()
                elif tensor.shape == saved.shape:
                    tensor.copy_(saved)
                else:  # a buffer that grows from nothing to what its first batch needs
                    tensor.data = saved.clone()
            self._restore_state()
            if not keep_settings:
                self._restore_groups()
            for parameter, saved in self._gradients:
                parameter.grad = _put_back(parameter.grad, saved)
        # Gradients of the steps in between are of values that are no more.
        self._optimizer.zero_grad(set_to_none=True)
        if self._synchronizer is not None:
            self._synchronizer.load_state_dict(self._remembered)
        self._generators.restore()

    def _named(self) -> list[tuple[Name, Tensor]]:
        """Parameters and buffers, each tensor once; not those without memory, or whose elements share it."""
        found = {
            id(tensor): ((number, path), tensor)
            # Reversed, so that a tensor that several networks share is named by the model.
            for number, network in reversed([*enumerate(self._networks)])
            for path, tensor in (*network.named_parameters(), *network.named_buffers())
            if not (tensor.is_meta or overlaps(tensor))
        }
        return [*found.values()]

    def _parameters_outside(self) -> list[nn.Parameter]:
        """Those in which a backward pass adds gradients that no step forgets."""
        held = {*parameters_of(self._optimizer)}
        found = dict.fromkeys(p for network in self._networks for p in network.parameters())
        return [p for p in found if p not in held]

    def _forget_new_buffers(self) -> None:
        """Buffers that a network registered in a step since, or that were None: it will make them again."""
        for path, module, name, buffer in [*self._buffers()]:
            if path not in self._paths:
                # It may stand at several paths, and a network that a step has made keeps what it has.
                if module in self._modules and hasattr(module, name):
                    delattr(module, name)
            elif buffer is not None and self._paths.get(path):
                setattr(module, name, None)

    def _buffers(self) -> Iterator[tuple[Name, nn.Module, str, Tensor | None]]:
        """By every path: the module, its name for the buffer, and the buffer, which may be None."""
        for number, network in enumerate(self._networks):
            for prefix, module in network.named_modules(remove_duplicate=False):
                # Not `named_buffers`, which leaves out those that are None.
                for name, buffer in module._buffers.items():  # noqa: SLF001
                    yield (number, f"{prefix}.{name}" if prefix else name), module, name, buffer

    def _restore_state(self) -> None:
        state, kind = self._optimizer.state, state_methods(self._optimizer)
        for parameter in [*kind.keys(state)]:
            if parameter not in self._state:
                # A step that ran since made this state; the next step makes it again as the first one
                # would.
                kind.pop(state, parameter)
        for parameter, saved in self._state.items():
            now: dict[str, Any] = kind.get(state, parameter, {})
            before = {key: _put_back(now.get(key), v) for key, v in saved.items()}
            kind.update(state, {parameter: before})

    def _restore_groups(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            for key, value in saved.items():
                group[key] = _put_back(group.get(key), value)


def _networks(loss_fn: Callable[..., Any]) -> list[nn.Module]:
    reach = Reach(loss_fn)
    if reach.lazy:
        raise CaptureError(
            f"wanted networks whose parameters have their shapes, got {len(reach.lazy)} in the loss function "
            "that have none yet; call it once with an example before"
        )
    return reach.networks()


def _copy(value: Any) -> Any:
    return pytree.tree_map(_copy_leaf, value)


def _copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _put_back(present: Any, saved: Any) -> Any:
    """The saved value, written into the present tensor where shape and dtype still fit."""
    if isinstance(saved, Tensor) and isinstance(present, Tensor):
        form = (present.shape, present.dtype, present.device)
        if form == (saved.shape, saved.dtype, saved.device):
            # In place, for graphs and programs read the tensor where it lies.
            return present.copy_(saved)
    return _copy(saved)
