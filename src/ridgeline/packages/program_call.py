"""Calling a compiled program in the structure of the function that it was made from.

The checks are what stands between a wrong input and wrong memory: compiled code believes the shapes,
types and strides that it was compiled for. One native call compares all tensors; only when something
differs is it looked at closely.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError, PackageError
from ridgeline.packages.metadata import TensorMetadata
from ridgeline.packages.package import Run
from ridgeline.tensors.copies import is_noted, written
from ridgeline.tensors.nests import builder


class ProgramCall:
    """A loaded program, called as the function that it was made from.

    Args:
        run: The loaded program.
        state: Name to tensor, in the program's order. They stay the caller's: what is written into them, by
            the caller or by the program, is seen by the next call and by the caller.
        inputs: Specs of the tensors that a call gives.
        state_specs: Specs that the state must keep.
        input_tree: Structure of the positional arguments of a call.
        output_tree: Structure of what a call returns.
        constants: Leaf of the output structure to its value, for leaves that are no tensors.
        device: Where all tensors must be.
    """

    def __init__(
        self,
        run: Run,
        state: Mapping[str, Tensor],
        *,
        inputs: Sequence[TensorMetadata],
        state_specs: Mapping[str, TensorMetadata],
        input_tree: pytree.TreeSpec,
        output_tree: pytree.TreeSpec,
        constants: Mapping[int, Any],
        device: torch.device,
    ) -> None:
        self._run = run
        self._state = tuple(state.values())
        self._names = tuple(state)
        self._specs = (*(state_specs[name] for name in state), *inputs)
        self._num_inputs = len(inputs)
        self._tree = input_tree
        self._is_flat = input_tree == pytree.tree_structure((0,) * len(inputs))
        self._build = _output_builder(output_tree, constants)
        self._device = device
        # Nothing passes before the first close look, which makes the guard for what it saw.
        self._passes: Callable[..., bool] = _never

    def __call__(self, *arguments: Any) -> Any:
        """Run the program; the outputs are new tensors, which no later call overwrites.

        Raises:
            BatchError: another structure, or an input that is no tensor or of another shape, type or device.
            PackageError: a tensor of the state was exchanged for one of another shape, type or device.

        Cost: An input of other strides is copied.
        """
        if not self._is_flat or len(arguments) != self._num_inputs:
            arguments = self._leaves(arguments)
        tensors = [*self._state, *arguments]
        if not self._passes(*tensors):
            tensors = self._fitted(tensors)
        return self._build(self._run(tensors))

    def _leaves(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves, tree = pytree.tree_flatten(arguments)
        if tree != self._tree:
            raise BatchError(
                f"wanted inputs of structure {_text(self._tree)}, got {_text(tree)}; call it as the function "
                "that it was made from"
            )
        return tuple(leaves)

    def _fitted(self, tensors: list[Any]) -> list[Tensor]:
        """The tensors, laid out as the program wants them; the guard is made again if it was too strict."""
        first = len(self._names)
        fitted = [*tensors[:first]]
        fitted += [self._fit(index, given) for index, given in enumerate(tensors[first:], first)]
        if not self._passes(*fitted):
            # The state, too, which is looked at here only: where the guard passes, it is as it was.
            fitted = [self._fit(index, tensor) for index, tensor in enumerate(fitted)]
            # It knows also of inference mode and gradients, which do not matter here. The guard belongs to
            # torch's compiler, which checks its own inputs with it.
            guards = TensorGuards(*fitted, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._passes = guards.check
        return fitted

    def _fit(self, index: int, tensor: Any) -> Tensor:
        spec = self._specs[index]
        if not isinstance(tensor, Tensor):
            raise self._misfit(index, repr(tensor))
        got = TensorMetadata.of(tensor)
        if (got.shape, got.dtype, tensor.device) != (spec.shape, spec.dtype, self._device):
            raise self._misfit(index, f"{got} on {tensor.device}")
        if got.stride == spec.stride and not is_noted(tensor):
            return tensor
        if index < len(self._names):
            lies = "signs only noted" if is_noted(tensor) else f"strides {tensor.stride()}"
            raise self._misfit(index, f"{got} on {tensor.device} with {lies}")
        return spec.restore(written(tensor), self._device)

    def _misfit(self, index: int, got: str) -> BatchError | PackageError:
        wanted = f"{self._specs[index]} on {self._device}"
        if index < len(self._names):
            return PackageError(
                f"wanted {self._names[index]} as {wanted}, as it was packaged, got {got}; package the "
                "model again after such a change"
            )
        return BatchError(
            f"wanted input{self._path(index - len(self._names))} as {wanted}, got {got}; the program was "
            "compiled for the former: convert the input, or package it for such inputs"
        )

    def _path(self, index: int) -> str:
        """Where the leaf stands, as one would write it: ` 0`, or ` 1['mask']`."""
        numbered = pytree.tree_unflatten(list(range(self._num_inputs)), self._tree)
        paths = [path for path, _leaf in pytree.tree_flatten_with_path(numbered)[0]]
        argument, *inner = paths[index]
        return f" {pytree.keystr((argument,)).strip('[]')}{pytree.keystr(tuple(inner))}"


def _never(*_tensors: Any) -> bool:
    return False


def _output_builder(
    tree: pytree.TreeSpec, constants: Mapping[int, Any]
) -> Callable[[list[Tensor]], Any]:
    """From the program's flat outputs to what the function returns."""
    if not constants and tree == pytree.tree_structure(0):
        return lambda outputs: outputs[0]
    if not constants and tree == pytree.tree_structure((0,) * tree.num_leaves):
        return tuple

    build_nest = builder(tree)

    def build(outputs: list[Tensor]) -> Any:
        tensors = iter(outputs)
        leaves = [constants[i] if i in constants else next(tensors) for i in range(tree.num_leaves)]
        return build_nest(leaves)

    return build


def _text(tree: pytree.TreeSpec) -> str:
    """The structure with `...` for its leaves, as one would write the arguments."""
    return repr(pytree.tree_unflatten([...] * tree.num_leaves, tree)).replace("Ellipsis", "...")
