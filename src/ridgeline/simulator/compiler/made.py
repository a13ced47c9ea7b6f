"""A priced step from what torch's compiler made: its own kernels by their bytes, libraries as timed.

In place of what `fusion` assumes. The kernels and their bytes are those of the compiler's code; each operator
of a library is found again among the operators of the trace, by what it computes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import prod

from ridgeline import units
from ridgeline.compiled_program import CompilerKernel, CompilerProgram, Shape, product_sizes
from ridgeline.simulator.compiler.beside import num_products
from ridgeline.simulator.compiler.rewriting import ALIGNED, rewritten_seconds
from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.dataflow import operator_name
from ridgeline.simulator.pricing.pieces import Piece, PricedStep
from ridgeline.workload import Family, Op, Phase, Workload

KERNEL_RATE = 0.83
"""Share of the best measured bandwidth that a kernel of torch's compiler reaches on a GPU.

Source: measured; all such kernels of BERT-base, ResNet-50 and ConvNeXt-T together (torch 2.11, one H200) took
1 / 0.92, 1 / 0.84 and 1 / 0.74 of the time of their bytes.
"""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "ridgeline.product", "product")
_CONVOLUTIONS = {"convolution": 2, "convolution_backward": 3, "conv_weight_gradient": 3}
_ATTENTION = "_scaled_dot_product"

Issue = Callable[[Phase, Piece], Piece]


def price_made(
    list_: Prices,
    workload: Workload,
    priced: PricedStep,
    programs: Sequence[CompilerProgram],
    *,
    call: Issue,
    kernel: Issue,
    has_optimizer: bool,
) -> PricedStep:
    """A step whose compiled part is such programs.

    Args:
        list_: Prices at the setting.
        workload: The step.
        priced: Its operators as they are run eagerly.
        programs: All of the step's, see `why_unread`.
        call: Makes of its first piece the call of a program.
        kernel: Issues a piece from inside a program.
        has_optimizer: The programs compute the optimizer as well.

    Raises:
        MachineError: no ceiling in bytes per second was measured.
    """
    made = _Made(list_, workload, priced)
    phases: dict[Phase, list[Piece]] = {"forward": [], "backward": []}
    for program in programs:
        phase: Phase = program.phase
        pieces = [kernel(phase, piece) for piece in made.pieces(program)]
        if pieces:
            phases[phase] += [call(phase, pieces[0]), *pieces]
    own = [k for program in programs for k in program.calls if not k.is_library]
    num_called = sum(len(program.order) for program in programs) - len(own)
    num_bytes = sum(k.num_bytes for k in own)
    note = (
        f"read: the compiler made {len(own)} kernels that move {units.num_bytes(num_bytes)}, and calls "
        f"{num_called} operators of libraries"
    )
    return PricedStep(
        forward=tuple(phases["forward"]),
        backward=tuple(phases["backward"]),
        optimizer=() if has_optimizer else priced.optimizer,
        notes=(*priced.notes, *list_.notes, note),
        own_kernels=len(own),
        own_bytes=num_bytes,
    )


class _Made:
    """Turns the kernels of programs into pieces."""

    def __init__(self, list_: Prices, workload: Workload, priced: PricedStep) -> None:
        self._list = list_
        self._ops = workload.ops
        self._eager = {p.op: p for p in (*priced.forward, *priced.backward, *priced.optimizer)}
        # Queues, since equal operators come again and again, each with a place of its own in the step.
        self._open: dict[tuple[Phase, Hashable], deque[int]] = {}
        for index, op in enumerate(self._ops):
            shapes = tuple(spec.shape for spec in op.inputs)
            key = _identity(operator_name(op).rstrip("_"), shapes, op.dtype)
            self._open.setdefault((op.phase, key), deque()).append(index)

    def _loop_seconds(self, num_bytes: int) -> float:
        """Seconds of a kernel of the compiler's own; on a CPU at the best rate, as it pays for no call."""
        if self._list.setting.device == "cpu":
            return self._list.least_copy_seconds(num_bytes)
        return self._list.copy_seconds(max(1, num_bytes)) / KERNEL_RATE

    def pieces(self, program: CompilerProgram) -> Iterator[Piece]:
        """The kernels of a program, each at the place of the library's operator that came last before it."""
        indices = [index for index, op in enumerate(self._ops) if op.phase == program.phase]
        # Kernels without an operator count to the last one before, so that buckets end where they do.
        place = indices[0] if indices else 0
        for kernel in program.calls:
            index = self._found(program.phase, kernel) if kernel.is_library else None
            if index is None:
                yield self._by_bytes(kernel, program.phase, place)
                continue
            # What backward computes again stands where backward does it.
            if self._ops[index].phase == program.phase:
                place = max(place, index)
            yield self._as_timed(kernel, index)._replace(op=place)

    def _found(self, phase: Phase, kernel: CompilerKernel) -> int | None:
        """The operator of the trace that a call is, each in turn; the last one serves for further calls."""
        key = _identity(kernel.name.rstrip("_"), kernel.shapes, kernel.dtype)
        other: Phase = "forward" if phase == "backward" else "backward"
        # A backward pass may compute results of the forward pass again.
        for where in (phase, other):
            found = self._open.get((where, key))
            if found:
                return found.popleft() if len(found) > 1 else found[0]
        return None

    def _as_timed(self, kernel: CompilerKernel, index: int) -> Piece:
        op, piece = self._ops[index], self._eager[index]
        possible = num_products(op) if operator_name(op) == "convolution_backward" else 1
        # The compiler may take the parts of a convolution's gradient by themselves.
        share = min(1.0, kernel.parts / possible) if possible else 1.0
        seconds = piece.work_s
        if self._list.setting.device == "cuda":
            seconds = rewritten_seconds(self._list, op, seconds)
        return piece._replace(
            work_s=share * seconds,
            # No more than the piece now takes, or a padded product would beat its own ideal.
            ideal_s=share * min(piece.ideal_s, seconds),
            roofline_s=share * min(piece.roofline_s, seconds),
            flops=round(share * piece.flops),
            num_bytes=round(share * piece.num_bytes),
        )

    def _by_bytes(self, kernel: CompilerKernel, phase: Phase, place: int) -> Piece:
        """The compiler's own kernel, or an operator that the trace does not have."""
        # Libraries by what they compute, where that is known: their bytes alone would be far too fast.
        op = _as_op(kernel, phase)
        if kernel.is_library and op.flops:
            cost = self._list.op(op)
            work_s, least_s, bound = cost.seconds, cost.roofline_s, cost.bound
        else:
            work_s = self._loop_seconds(kernel.num_bytes)
            least_s = min(work_s, self._list.least_copy_seconds(kernel.num_bytes))
            bound = "memory"
        return Piece(
            name=kernel.name,
            module="",
            op=place,
            work_s=work_s,
            roofline_s=least_s,
            bound=bound,
            flops=op.flops,
            num_bytes=kernel.num_bytes,
            has_kernel=True,
        )


def _identity(name: str, shapes: tuple[Shape, ...], dtype: str) -> Hashable:
    """Equal for operators that compute the same, whatever they are called and however their factors lie."""
    if name in _PRODUCTS:
        kernel = CompilerKernel(
            name=name, is_library=True, operators=(), bytes_read=0, bytes_written=0, shapes=shapes
        )
        batch, *sizes = product_sizes(kernel) or (0,)
        # The compiler pads 16-bit products, so sizes count in multiples of the padding.
        step = ALIGNED if dtype in ("bfloat16", "float16") else 1
        # Sorted, as it may transpose a product for the layout that it prefers.
        return "product", dtype, batch, tuple(sorted(-(-size // step) for size in sizes))
    if name.startswith(_ATTENTION):
        return _ATTENTION, "backward" in name, shapes[:3]
    last = name.rpartition(".")[2]
    if last in _CONVOLUTIONS:
        return "convolution", last != "convolution", shapes[: _CONVOLUTIONS[last]]
    return name, shapes[:1]


def _as_op(kernel: CompilerKernel, phase: Phase) -> Op:
    """An operator of such a size, as far as it is known how much it computes."""
    family: Family = "other"
    flops = 0
    sizes = product_sizes(kernel) if kernel.name in _PRODUCTS else None
    if sizes is not None:
        family, flops = "matmul", 2 * prod(sizes)
    elif kernel.name.startswith(_ATTENTION) and len(kernel.shapes) >= 3:
        # Two products; backward, whose first tensor is the gradient, computes one again and four more.
        products, first = (5, 1) if "backward" in kernel.name else (2, 0)
        query, key = kernel.shapes[first : first + 2]
        family, flops = "attention", products * 2 * prod(query) * key[-2]
    return Op(
        name=f"aten.{kernel.name}.default",
        phase=phase,
        module="",
        family=family,
        dtype=kernel.dtype or "float32",
        inputs=(),
        outputs=(),
        arguments="",
        flops=flops,
        bytes_read=kernel.bytes_read,
        bytes_written=kernel.bytes_written,
    )
