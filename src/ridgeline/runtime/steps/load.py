"""`load`: run a saved program without the source that it was made from."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError, PackageError
from ridgeline.given import checked
from ridgeline.packages.alone import check_alone
from ridgeline.packages.metadata import Metadata
from ridgeline.packages.package import Package, read_package
from ridgeline.packages.program_call import ProgramCall
from ridgeline.plan import Execution

if TYPE_CHECKING:
    from ridgeline.runtime.steps.whole_step.saved.saving import LoadedStep


@checked(PackageError)
def load(
    path: str | Path, *, device: str | torch.device | None = None
) -> "LoadedCallable | LoadedStep":
    """The program saved in a file: a callable, or a training step that continues where it was saved.

    Loading runs the native code in the file. The file is checked for damage and for fitting this machine
    before that, which is no protection against malice: load files only from people whom you trust to run
    code here.

    Args:
        path: The file written by `save`.
        device: `cpu`, `cuda` or `cuda:1`; None for the kind that it was made for.

    Raises:
        PackageError: there is no such file; it is damaged, foreign or was edited; or its program was made for
            another device, processor, GPU or version of torch. Nothing of it ran.

    Cost: Reads the file once or twice, and allocates its state.
    """
    package = read_package(path, device=device)
    if package.metadata.purpose == "step":
        from ridgeline.runtime.steps.whole_step.saved.saving import load_step

        return load_step(package)
    return LoadedCallable(package)


class LoadedCallable:
    """A function or module that was saved, with its own copy of the parameters; `load` makes it.

    Calls take turns: several threads at once need a lock, or a loaded callable each.

    Attributes:
        path: The file.
        metadata: What is known of the program: inputs, outputs, device, versions.
        mode: The execution that it stands for.
        state: Name to tensor; writing into one changes the next call.

    Raises:
        PackageError: the metadata does not describe a callable, or the system refuses to load the code.
    """

    mode: Execution = "packaged"

    def __init__(self, package: Package) -> None:
        self.path = package.path
        self.metadata: Metadata = package.metadata
        try:
            constants = {
                # JSON has texts for keys.
                int(leaf): value
                for leaf, value in self.metadata.details["constants"].items()
            }
            input_tree = pytree.treespec_loads(self.metadata.input_tree)
            output_tree = pytree.treespec_loads(self.metadata.output_tree)
        except (KeyError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise PackageError(
                "wanted the description of a callable, got one that does not fit "
                f"({type(error).__name__}: {error}) in {self.path}; save the program again with this release"
            ) from error
        num_inputs = len(self.metadata.inputs)
        if num_inputs != input_tree.num_leaves:
            raise PackageError(
                f"wanted the description of a callable, got {num_inputs} inputs for "
                f"{input_tree.num_leaves} leaves of its arguments in {self.path}; save the program again "
                "with this release"
            )
        self.state: dict[str, Tensor] = package.state()
        self._call = ProgramCall(
            package.load_program(),
            self.state,
            inputs=self.metadata.inputs,
            state_specs=self.metadata.state,
            input_tree=input_tree,
            output_tree=output_tree,
            constants=constants,
            device=package.device,
        )

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the function returned for such inputs, as new tensors, in the same structure.

        Raises:
            BatchError: an input is not as the program was compiled for, or is given by name, or requires
                gradients while these are recorded; names it. Or see `check_alone`.
        """
        if named:
            raise BatchError(
                f"wanted inputs by position, since a saved program has no names for them, got "
                f"{', '.join(named)} by name; give them in the order in which the function took them"
            )
        # One tensor is the usual call, and walking a nest would cost as much as a small program.
        is_single = len(inputs) == 1 and isinstance(inputs[0], Tensor)
        check_alone(inputs if is_single else pytree.tree_leaves(inputs))
        # A result without a graph would train nothing, silently; under `no_grad` nobody expects one.
        if torch.is_grad_enabled():
            _check_without_gradients(inputs)
        return self._call(*inputs)

    def __repr__(self) -> str:
        inputs = ", ".join(str(spec) for spec in self.metadata.inputs)
        outputs = ", ".join(str(spec) for spec in self.metadata.outputs)
        return (
            f"LoadedCallable({self.path}: {inputs} -> {outputs}, {self.metadata.device} "
            f"{self.metadata.capability}, {len(self.state)} tensors)"
        )


def _check_without_gradients(inputs: tuple[Any, ...]) -> None:
    """Refuse inputs that want gradients: a saved program computes none, without notice."""
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise BatchError(
                "wanted inputs without gradients, which a saved program does not compute, got tensor "
                f"{index} of shape {tuple(leaf.shape)} that requires them; give it as .detach(), or call "
                "the program under torch.no_grad()"
            )
