"""A call of a model whose arguments and results are known, so that a function of tensors can stand for it."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.capture.casts import operator_settings
from ridgeline.errors import ObstacleError
from ridgeline.guards.layouts import LayoutReads, refused_unread
from ridgeline.guards.model_guard import ModelGuard
from ridgeline.model_graphs.captured import CapturedModel
from ridgeline.tensors.copies import own_copy
from ridgeline.tensors.nests import tensors_in

Captured = Callable[..., tuple[Tensor, ...]]
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def model_program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The program that is read: a call of the model as it was written."""
    return model._call_impl(*args, **kwargs)  # noqa: SLF001 - `__call__` may be replaced meanwhile


class KnownCall:
    """A captured call of a model: for which arguments it is, and how its result is put together.

    Raises:
        ObstacleError: an argument lies on the host.
        CaptureError: the model's code cannot be read.

    Cost: A copy of the arguments, and a reading of the model: seconds for a large one.
    """

    call: Captured

    def __init__(self, model: nn.Module, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        self._guard = ModelGuard(model)
        self._name = type(model).__name__
        self._structure = structure
        self._leaves = [None if isinstance(leaf, Tensor) else _own_array(leaf) for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._key = _key(leaves)
        self._setting = operator_settings()
        self._result: tuple[list[Any], list[tuple[int, int]], pytree.TreeSpec] | None = None
        self._dataclass: Any = None
        device = next(iter(model.parameters())).device.type
        if any(leaf.device.type != device for leaf in tensors_in(leaves)):
            raise ObstacleError(
                f"wanted arguments of {self._name} on the device, got a tensor on the host, whose values a "
                "graph would keep; move it before the call"
            )
        # The caller's own tensors may hold the graph of what computed them.
        copies = [own_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        example = _brought(self._with_own_arrays(copies), structure)
        self._reads = refused_unread(LayoutReads, model_program, {"model": model}, example)

    def changed(self) -> str | None:
        """What of the model, or of what its code reads, is not as it was; None while nothing is.

        In other settings than those of the capture (autocast, say) that is unknown, and None is the answer.
        """
        why = self._guard.changed()
        # Guards were made in the modes of the capture, and fail in others for that alone.
        if why is None and operator_settings() == self._setting:
            why = self._reads.broken()
        return why

    def fits(self, leaves: list[Any], structure: pytree.TreeSpec) -> bool:
        """Whether the capture serves these arguments, of a model that is as it was."""
        return (
            structure == self._structure
            and _key(leaves) == self._key
            and operator_settings() == self._setting
            and self._guard.changed() is None
            and self._reads.fit(_brought(self._with_own_arrays(leaves), structure))
        )

    def _with_own_arrays(self, leaves: list[Any]) -> list[Any]:
        """The arguments with the capture's arrays in the place of equal ones: guards ask where those lie."""
        pairs = zip(self._leaves, leaves, strict=True)
        return [own if isinstance(own, numpy.ndarray) else leaf for own, leaf in pairs]

    def arguments(self, tensors: tuple[Tensor, ...]) -> Any:
        """Positional arguments and keywords of the model's call."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._structure)

    def tensors_of(self, result: Any) -> tuple[Tensor, ...]:
        """The tensors of the model's result; the rest of it is kept.

        Raises:
            ObstacleError: something in it is neither a tensor nor a plain value.
        """
        leaves, structure = pytree.tree_flatten(result)
        self._dataclass = None
        if structure.is_leaf() and is_dataclass(result):  # one that is not registered
            values = {field.name: getattr(result, field.name) for field in fields(result)}
            leaves, structure = pytree.tree_flatten(values)
            # Its tensors would hold all that the capture saved for its backward pass.
            self._dataclass = _filled(result, dict.fromkeys(values))
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_ATOMS))]
        if strange:
            raise ObstacleError(
                f"wanted results of {self._name} in tuples, lists, dicts or a dataclass, got "
                f"{type(strange[0]).__name__}; register it with torch's pytree, or use another execution mode"
            )
        # One that the result holds twice is captured, and returned, as one.
        found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        numbers = {key: number for number, key in enumerate(found)}
        places = [
            (index, numbers[id(leaf)]) for index, leaf in enumerate(leaves) if id(leaf) in found
        ]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._result = rest, places, structure
        return tuple(found.values())

    def result(self, leaves: list[Any]) -> Any:
        """What a replay gives for arguments, as the model returns it."""
        outputs = self.call(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        assert self._result is not None
        rest, places, structure = self._result
        filled = list(rest)
        for place, number in places:
            filled[place] = outputs[number]
        found = pytree.tree_unflatten(filled, structure)
        return found if self._dataclass is None else _filled(self._dataclass, found)

    def has_kept_gradients(self) -> bool:
        """Whether somebody keeps gradients that the next replay would write over."""
        return isinstance(self.call, CapturedModel) and self.call.has_kept_gradients()

    def copy_gradients(self) -> None:
        """Have parameters get copies of gradients from now on."""
        if isinstance(self.call, CapturedModel):
            self.call.copies_gradients = True

    def close(self) -> None:
        """Drop the graphs."""
        close = getattr(self.call, "close", None)
        if close is not None:
            close()


def _filled(template: Any, values: dict[str, Any]) -> Any:
    """A dataclass like another one with other values, be it frozen or not."""
    made = copy.copy(template)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _own_array(leaf: Any) -> Any:
    """An array that its caller cannot write into; anything else as it is."""
    return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf


def _brought(leaves: list[Any], structure: pytree.TreeSpec) -> dict[str, Any]:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return {"args": args, "kwargs": kwargs}


def _key(leaves: list[Any]) -> list[Any]:
    """What must be the same for a replay: of tensors what they are like, of all else the value."""
    return [*map(_key_of, leaves)]


def _key_of(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, numpy.ndarray):  # whose comparison is no single answer
        return leaf.shape, leaf.dtype, leaf.tobytes()
    # With the type, since True equals 1 and 1.0.
    return type(leaf), leaf
