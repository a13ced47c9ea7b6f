"""A training step loaded from a file: it trains on without the model, the loss or the optimizer's source."""

import math
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError, PackageError, first_line
from ridgeline.packages.alone import check_alone
from ridgeline.packages.archive import METADATA, ROOT, SEAL, STATE
from ridgeline.packages.metadata import TensorMetadata
from ridgeline.packages.package import Package, read_package, write_package
from ridgeline.runtime.steps.whole_step.binding import bind
from ridgeline.runtime.steps.whole_step.saved.details import SavedRandomState, StepDetails
from ridgeline.tensors import batch as batches
from ridgeline.tensors.batch_pattern import BatchPattern


class LoadedStep:
    """A saved training step: `loss = step(batch)`.

    Made by `load_step`. It owns its state: parameters, buffers, optimizer state, learning rates. Settings of
    the optimizer that are numbers of Python (weight decay, momentum) are part of the program: to change
    one, save the step again from its source.

    Args:
        package: The verified file.
        details: What it says of the step.
        structure: Of a batch.
        state: The tensors, in the order of the program's inputs; used as they are.

    Attributes:
        device: Where it runs; batches are moved there.
        metadata: Shapes, versions and so on.
        details: Settings that are part of the program, among others.
    """

    def __init__(
        self,
        package: Package,
        details: StepDetails,
        structure: pytree.TreeSpec,
        state: dict[str, Tensor],
    ) -> None:
        self.device = package.device
        self.metadata = package.metadata
        self.details = details
        self._path = package.path
        self._state = state
        self._structure = structure
        try:
            self._leaves = self._example_leaves()
        except RuntimeError as error:  # no memory for such a batch
            raise PackageError(
                f"wanted a step for batches that this machine can hold, got "
                f"{first_line(error, type(error).__name__)} for those of {package.path}; save the step again"
            ) from error
        examples = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._pattern = BatchPattern(pytree.tree_unflatten(self._leaves, structure))
        self._step = bind(package.load_program(), list(state.values()), examples, details.written)

    def __call__(self, batch: Any) -> Tensor:
        """Train on one batch; its mean loss, detached and 0-d.

        What the step writes into its batch is written into this one, where it is on the step's device.

        Args:
            batch: Of the structure, shapes and dtypes that the step was saved with.

        Raises:
            BatchError: the batch is another; names the first leaf that differs. Or see `check_alone`.
        """
        inputs = self._pattern.tensors(batch)
        if inputs is None:
            # Only where the pattern did not fit as it is: a batch on the device costs no look at every
            # leaf.
            moved = batches.to_device(batch, self.device)
            inputs = self._pattern.tensors(moved)
            if inputs is None:
                raise BatchError(self._mismatch(moved))
        check_alone(inputs)
        return self._step(inputs)[0]

    def step(self, batch: Any) -> Tensor:
        """The same as calling it."""
        return self(batch)

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by the names they had in the model, tied ones under each of theirs; the very tensors."""
        return self._of_role("parameter")

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by the names they had in the model; the very tensors."""
        return self._of_role("buffer")

    def state(self) -> dict[str, Tensor]:
        """Everything that the step reads and writes, by name; the very tensors."""
        return dict(self._state)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers, as `model.load_state_dict(..., strict=False)` takes them."""
        return {**self.parameters(), **self.buffers()}

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each parameter group.

        Cost: On a GPU, waits for the device.
        """
        return tuple(float(tensor) for tensor in self._of_role("rate").values())

    @lr.setter
    def lr(self, rates: float | Sequence[float]) -> None:
        """Set the learning rate of each group, or one for all.

        Raises:
            PackageError: another number of rates than there are groups, or one negative or not finite.
        """
        tensors = list(self._of_role("rate").values())
        values = [rates] * len(tensors) if isinstance(rates, int | float) else list(rates)
        if len(values) != len(tensors):
            raise PackageError(
                f"wanted a learning rate for each of {len(tensors)} parameter groups, got {len(values)} for "
                f"the step in {self._path}; give one number, or one for each group"
            )
        for value in values:
            if not 0.0 <= value < math.inf:
                raise PackageError(
                    f"wanted finite learning rates >= 0, got {value!r} for the step in {self._path}; its "
                    "rates are as they were"
                )
        for tensor, value in zip(tensors, values, strict=True):
            tensor.fill_(value)

    def save(self, path: str | Path) -> Path:
        """Write the step as it is now; nothing is compiled.

        Raises:
            PackageError: the file that it was loaded from is gone or was replaced, or the path does not end
                in `.pt2`.
            OSError: the file cannot be written; what was there is untouched.
        """
        # The native code is not kept in memory, so it is copied from the file that it came from.
        origin = read_package(self._path)
        if origin.metadata.checksums != self.metadata.checksums:
            raise PackageError(
                f"wanted the program that was loaded from {self._path}, got a file replaced since; save the "
                "step from its source"
            )
        random = SavedRandomState.now(self.device)
        details = msgspec.structs.replace(self.details, random=random)
        metadata = msgspec.structs.replace(
            self.metadata, details=msgspec.to_builtins(details), checksums={}
        )
        with tempfile.TemporaryDirectory(prefix="ridgeline-step-") as directory:
            program = Path(directory) / "program.pt2"
            _copy_program(self._path, program)
            return write_package(path, program=program, metadata=metadata, state=self._state)

    def close(self) -> None:
        """Release what is held on the device; the state stays readable."""
        self._step.close()

    def __repr__(self) -> str:
        count = sum(
            tensor.numel() for name, tensor in self._of_role("parameter", tied=False).items()
        )
        return f"LoadedStep({self._path}, {count} parameters, {self.device})"

    def _of_role(self, role: str, *, tied: bool = True) -> dict[str, Tensor]:
        pairs = zip(self._state.items(), self.details.roles, strict=True)
        found = {name: tensor for (name, tensor), its in pairs if its == role}
        if tied:
            aliases = self.details.aliases.items()
            found |= {alias: found[name] for alias, name in aliases if name in found}
        return found

    def _example_leaves(self) -> list[Any]:
        """A batch of zeros: zeros are valid as labels and as indices."""
        tensors = iter(self.metadata.inputs)
        leaves: list[Any] = []
        for index in range(self._structure.num_leaves):
            if str(index) in self.details.constants:
                leaves.append(self.details.constants[str(index)])
                continue
            spec = next(tensors)
            leaves.append(
                spec.restore(
                    torch.zeros(spec.shape, dtype=spec.torch_dtype, device="cpu"), self.device
                )
            )
        return leaves

    def _mismatch(self, batch: Any) -> str:
        """What is wrong with a batch, naming the first leaf."""
        remedy = (
            f"the step in {self._path} was saved for such batches only: pad or convert the batch"
        )
        example = pytree.tree_unflatten(self._leaves, self._structure)
        wanted = dict(_named_leaves(example))
        got = dict(_named_leaves(batch))
        for name in (*wanted, *got):
            mine = _describe(wanted[name]) if name in wanted else "no such leaf"
            theirs = _describe(got[name]) if name in got else "no such leaf"
            if mine != theirs:
                return f"wanted leaf {name} of the batch as {mine}, got {theirs}; {remedy}"
        return f"wanted batches of structure {self._structure}, got {pytree.tree_structure(batch)}; {remedy}"


def _named_leaves(batch: Any) -> list[tuple[str, Any]]:
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return [(pytree.keystr(path) or "0", leaf) for path, leaf in leaves]


def _describe(leaf: Any) -> str:
    return str(TensorMetadata.of(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


def _copy_program(source: Path, target: Path) -> None:
    """The members of a package that are the program itself."""
    # These are written anew, with the state of now, and the seal is over both.
    own = {f"{ROOT}/{name}" for name in (METADATA, SEAL, STATE)}
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        for name in archive.namelist():
            if name not in own:
                copy.writestr(name, archive.read(name))
