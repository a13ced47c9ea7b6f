"""Functions and modules as packaged programs: compiled ahead of time, called here or saved to a file."""

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ridgeline.capture.flat_program import FlatProgram, as_arguments, flatten_program
from ridgeline.closing import Closing
from ridgeline.errors import CaptureError, PackageError
from ridgeline.guards.settled import filled
from ridgeline.packages.aot import compile_program
from ridgeline.packages.metadata import Metadata, TensorMetadata
from ridgeline.packages.package import check_path, load_compiled, write_package
from ridgeline.packages.program_call import ProgramCall
from ridgeline.plan import Execution
from ridgeline.tensors.nests import children


def package_callable(fn: Callable[..., Any], example_inputs: Any) -> "PackagedCallable":
    """Compile a function or module ahead of time, for inputs like these and without gradients.

    The tensors that it uses besides its inputs stay the user's own: a later update in place is seen by the
    next call. Its Python values (a float attribute, the training flag) are those of now.

    Args:
        fn: Function or module.
        example_inputs: A tuple of positional arguments (nests of tensors), or the only argument.

    Raises:
        CaptureError: it cannot be traced or compiled, or there is no C++ compiler.

    Cost: 5 to 60 seconds, see `compile_program`.
    """
    program = flatten_program(fn, example_inputs)
    metadata = _describe(program)
    directory = Path(tempfile.mkdtemp(prefix="ridgeline-"))
    try:
        path = compile_program(program.graph, [*program.state.values(), *program.inputs], directory)
        return PackagedCallable(program, metadata, path)
    except BaseException:
        shutil.rmtree(directory)
        raise


def save_callable(fn: Callable[..., Any], example_inputs: Any, path: str | Path) -> Path:
    """Compile a function or module and save it with its parameters; `rl.load` needs no source to run it.

    Args:
        fn: Function or module.
        example_inputs: A tuple of positional arguments (nests of tensors), or the only argument.
        path: The file; must end in `.pt2`.

    Raises:
        CaptureError: it cannot be traced or compiled, or there is no C++ compiler.
        PackageError: the path does not end in `.pt2`, or a tensor is of a type that cannot be saved.
        OSError: no room or no permission; whatever stood there before is untouched.

    Cost: 5 to 60 seconds, see `compile_program`.
    """
    target = check_path(path)
    with (
        torch.no_grad(),
        filled(fn, as_arguments(example_inputs)),
        package_callable(fn, example_inputs) as packaged,
    ):
        return packaged.save(target)


class PackagedCallable(Closing):
    """A compiled function or module in the process that made it; `package_callable` makes it.

    Calls take turns: several threads at once need a lock, or a packaged callable each.

    Attributes:
        metadata: What is known of the program.
        mode: The execution that it stands for.
    """

    mode: Execution = "packaged"

    def __init__(self, program: FlatProgram, metadata: Metadata, path: Path) -> None:
        self.metadata = metadata
        self._path = path
        self._state = program.state
        device = program.device
        self._call: Callable[..., Any] = ProgramCall(
            load_compiled(path, device),
            program.state,
            inputs=metadata.inputs,
            state_specs={name: TensorMetadata.of(tensor) for name, tensor in program.state.items()},
            input_tree=program.input_tree,
            output_tree=program.output_tree,
            constants=program.constants,
            device=device,
        )
        # At exit as well, unlike `__del__`; the folder has only what this object compiled.
        self._remove = weakref.finalize(self, shutil.rmtree, path.parent)

    def __call__(self, *inputs: Any) -> Any:
        """What the function returns for these inputs, as new tensors.

        Raises:
            BatchError: an input is not as in the example.
            PackageError: a parameter was replaced by one of another shape, type or device.
        """
        return self._call(*inputs)

    def save(self, path: str | Path) -> Path:
        """Write the program and the present values of its tensors to a file that ends in `.pt2`.

        Raises:
            PackageError: the path does not end in `.pt2`, a tensor is of a type that cannot be saved, or this
                callable was closed.
            OSError: no room or no permission; whatever stood there before is untouched.
        """
        if not self._remove.alive:
            raise PackageError(
                "wanted to save a packaged callable, got one that was closed; save it before"
            )
        return write_package(path, program=self._path, metadata=self.metadata, state=self._state)

    def close(self) -> None:
        """Remove the compiled file; calls no longer work."""
        self._call = _closed
        self._remove()


def _describe(program: FlatProgram) -> Metadata:
    device = program.device.type
    if device not in ("cpu", "cuda"):
        raise CaptureError(
            f"wanted a program on cpu or cuda, got tensors on {device}; move them with .to(device) first"
        )
    return Metadata(
        purpose="callable",
        device="cuda" if device == "cuda" else "cpu",
        inputs=tuple(TensorMetadata.of(tensor) for tensor in program.inputs),
        outputs=tuple(TensorMetadata.of(tensor) for tensor in program.outputs),
        input_tree=_text(program.input_tree),
        output_tree=_text(program.output_tree),
        details={
            "constants": {str(leaf): value for leaf, value in program.constants.items()},
            # Compiled into the code, so that whoever loads it can have the same.
            "threads": torch.get_num_threads(),
        },
    )


def _text(tree: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(tree)
    except NotImplementedError as error:
        strange = next(_strange_classes(tree), "one of another class")
        raise CaptureError(
            f"wanted inputs and outputs in tuples, lists and dicts, got {strange}, which a process that "
            "loads the program need not have; take and return such a nest of the tensors"
        ) from error


def _strange_classes(tree: pytree.TreeSpec) -> Iterator[str]:
    """Names of classes in a structure that a text of it cannot name."""
    for node in (tree, *children(tree)):
        if node is not tree:
            yield from _strange_classes(node)
        elif not node.is_leaf() and node.type not in (tuple, list, dict, OrderedDict):
            kind = node.context if isinstance(node.context, type) else node.type
            yield f"a {getattr(kind, '__qualname__', kind)}"


def _closed(*_inputs: Any) -> Any:
    raise PackageError(
        "wanted to call a packaged callable, got one that was closed; keep it open for calls"
    )
