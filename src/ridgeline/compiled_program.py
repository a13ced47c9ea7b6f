"""What torch's compiler made of a step: its kernels in the order of their calls, with the bytes each moves.

Read from the code that the compiler wrote, kept with the trial that had it written, and priced by the
simulator in place of what is assumed of compiling.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal

from ridgeline.codec import Value

Shape = tuple[int, ...]


class CompilerKernel(Value, frozen=True, kw_only=True):
    """One kernel that the compiler wrote, or one operator of a library that its program calls.

    `name` is the compiler's (`triton_poi_fused_relu_2`), or that of the operator (`mm`). `operators` are the
    ATen operators that it came from. `shapes` and `dtype` say what a library's operator takes; `parts` how
    many results it computes of those that it could (a convolution's gradients by image and by weight).
    """

    name: str
    is_library: bool
    operators: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    shapes: tuple[Shape, ...] = ()
    dtype: str = ""
    parts: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written


class CompilerProgram(Value, frozen=True, kw_only=True):
    """A program that the compiler wrote: each of its kernels once, and the order in which they are called.

    `order` are indices into `kernels`, `inputs` the shapes of what the program takes. What has no backward
    counts as forward, and so does a step that is one program.
    """

    phase: Literal["forward", "backward"]
    kernels: tuple[CompilerKernel, ...]
    order: tuple[int, ...]
    inputs: tuple[Shape, ...] = ()

    @property
    def calls(self) -> Iterator[CompilerKernel]:
        """The kernels as they are called."""
        return (self.kernels[index] for index in self.order)


def product_sizes(kernel: CompilerKernel) -> tuple[int, int, int, int] | None:
    """(batch, rows, inner, columns) of a matrix product; None for what is none.

    A sum that the product is added to comes before both factors.
    """
    if len(kernel.shapes) < 2:
        return None
    # The last two, since `addmm` has its sum before them.
    left, right = kernel.shapes[-2:]
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
        return None
    return prod(left[:-2]), left[-2], left[-1], right[-1]
