"""Checking a form of a callable against the callable itself, before it is used.

A program can bake in what was true when it was captured: a Python number, a branch, a value read to the
host, a weight. So several calls are made both ways, from the same state and the same random numbers, while
inputs and parameters are changed between calls; results and changed buffers must agree.
"""

import contextlib
import enum
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.reach.reach import Reach
from ridgeline.state.random_state import seed_all
from ridgeline.state.saved_state import SavedState, preserved
from ridgeline.tensors.call_perturbation import nudge, perturb_tensors, perturbed_inputs
from ridgeline.tensors.copies import real_parts, strided_copy
from ridgeline.tensors.nests import map_tensors, tensors_in

TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest accepted difference relative to the largest value of the tensor. Another order of additions stays
an order of magnitude below; inputs and parameters are varied by 6 % and more, far above. The coarsest
floating dtype among inputs, tensors read and results decides; other dtypes must be equal."""
TF32_TOLERANCE = 5e-3
CONSTANTS = (
    bool, int, float, complex, str, bytes, types.NoneType, enum.Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
"""What may stand among results besides tensors: it never changes, and `==` compares it."""
NUM_CALLS = 4
PARTS = "results, then the module's own"
ROUNDING_FACTOR = 4.0
"""A form may be this many times as far from eager as `NUM_NUDGES` runs that differ in last bits."""
NOISE_FACTOR = 16.0
"""The same for a buffer that is little but rounding, where such runs say only how large it is. Source:
running means of MobileNetV3 over two samples, compiled on a CPU, are 3.9 times as far as three runs are."""
NUM_NUDGES = 3
MOST_ROUNDING = 0.01
"""Where last bits move a result further than this share of it, a constant might hide, since `ROUNDING_FACTOR`
times as much is near the least by which parameters are changed."""


Outcome = tuple[Any, list[Tensor]]
"""What one call leaves: its result, and the tensors of the module."""


class CallComparison(NamedTuple):
    """Outcome of a check: the largest relative difference, what was accepted, and where it was met.

    `rounding` is how far last bits alone move the same tensor, where that was looked at.
    """

    difference: float
    tolerance: float
    where: str
    rounding: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether the difference is accepted."""
        return self.difference <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference as a multiple of what is accepted."""
        if not self.difference:
            return 0.0
        return self.difference / self.tolerance if self.tolerance else math.inf

    @property
    def notes(self) -> tuple[str, ...]:
        """What was accepted beyond the usual tolerance, and why."""
        if not self.rounding or not self.is_equal:
            return ()
        note = (
            f"differs from eager by {self.difference:.1e} in {self.where}, which the last bits of inputs and "
            f"parameters alone move by {self.rounding:.1e}"
        )
        return (note,)

    def check(self, mode: str) -> None:
        """Refuse a mode that gave other results.

        Raises:
            EquivalenceError: the difference is above the tolerance.
        """
        if not self.is_equal and self.rounding > MOST_ROUNDING:
            raise EquivalenceError(
                f"wanted mode {mode!r} to give the results of eager, got a difference of "
                f"{self.difference:.3g} in {self.where}, which the last bits of inputs and parameters alone "
                f"move by {self.rounding:.1e}, so that nothing can be compared; give another example (batch "
                "statistics of more samples, say), or use mode='eager'"
            )
        if not self.is_equal:
            raise EquivalenceError(
                f"wanted mode {mode!r} to give the results of eager within {self.tolerance:.0e}, got a "
                f"difference of {self.difference:.3g} in {self.where}; something is baked into the captured "
                "program (a Python number, a branch, a value read to the host, a weight): use mode='eager', "
                "or compute it with tensors"
            )


def compare_calls(
    fn: Callable[..., Any],
    candidate: Callable[..., Any],
    args: tuple[Any, ...],
    tensors: list[Tensor],
) -> CallComparison:
    """Call both several times with perturbed inputs, parameters and random state.

    Args:
        fn: The callable as written.
        candidate: A form of it.
        args: Example arguments; left as they are.
        tensors: That `fn` reads besides; they and the random state are put back bitwise.

    Raises:
        CaptureError: the function writes into its arguments, which only eager execution can honour; or it
            gives no number in any call, with which nothing could be compared.

    Cost: Eight calls, two copies of the tensors, and a wait for the device; three calls more for each of four
        in which a difference may be rounding.
    """
    worst = CallComparison(0.0, 0.0, "nothing")
    unknown: set[int] | None = None
    with torch.no_grad(), preserved(tensors) as saved, _own_generators(fn) as own:
        outcome = functools.partial(_outcome, generators=own)
        for index in range(NUM_CALLS):
            call_args = perturbed_inputs(args, index)
            expected, got = (outcome(run, call_args, saved, index) for run in (fn, candidate))
            tolerance = tolerance_of([*pytree.tree_leaves((args, expected)), *tensors])
            difference, where = largest_difference(expected, got)
            found = CallComparison(difference, tolerance, where)
            if tolerance < difference < math.inf:
                nudged = (
                    outcome(fn, call_args, saved, index, nudged=number)
                    for number in range(NUM_NUDGES)
                )
                found = _beside_rounding(expected, got, nudged, tolerance)
            nothing = _without_numbers(expected[0])
            unknown = nothing if unknown is None else unknown & nothing
            if index == 0 or found.excess > worst.excess:
                worst = found._replace(where=f"{found.where} in perturbed call {index + 1}")
            # A mode is refused by its first difference; further calls would only cost time.
            if not worst.is_equal:
                break
    if unknown and worst.is_equal:
        raise CaptureError(
            "wanted example inputs for which the function gives numbers, got NaN alone in tensor "
            f"{min(unknown)} of each result, beside which any program would look right; give other inputs, "
            "or use mode='eager'"
        )
    return worst


@contextlib.contextmanager
def _own_generators(fn: Callable[..., Any]) -> Iterator[list[torch.Generator]]:
    """Generators of torch's that a callable holds: seeded alike for both forms, and at the end as before."""
    found = [g for g in Reach(fn).generators if isinstance(g, torch.Generator)]
    before = [generator.get_state() for generator in found]
    try:
        yield found
    finally:
        for generator, state in zip(found, before, strict=True):
            generator.set_state(state)


def _beside_rounding(
    expected: Outcome, got: Outcome, nudged: Iterable[Outcome], tolerance: float
) -> CallComparison:
    """The tensor that differs most beside what rounding does to it in the callable itself.

    What it decides (batch statistics of two samples, a mean that is nothing but rounding) differs by much in
    any program. A result that it decides is refused, since nothing was compared; a buffer is not, beside
    which there are the results.
    """
    wanted, found = pytree.tree_leaves(expected), pytree.tree_leaves(got)
    others = [pytree.tree_leaves(other) for other in nudged]
    num_results = len(pytree.tree_leaves(expected[0]))
    worst = CallComparison(0.0, tolerance, "the result")
    for index, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        difference, allowed, rounding = _difference(mine, theirs), tolerance, 0.0
        if difference > tolerance:
            # Another structure than that of the call itself: values decide which, and last bits the values.
            moved = [leaves[index] for leaves in others if len(leaves) == len(wanted)]
            rounding = max((_difference(mine, leaf) for leaf in moved), default=0.0)
            if rounding <= MOST_ROUNDING:
                allowed = max(tolerance, ROUNDING_FACTOR * rounding)
            elif index >= num_results and math.isfinite(rounding):
                allowed = NOISE_FACTOR * rounding
        one = CallComparison(difference, allowed, f"tensor {index} ({PARTS})", rounding)
        worst = max(worst, one, key=lambda comparison: comparison.excess)
    return worst


def _without_numbers(result: Any) -> set[int]:
    """The tensors of a result that are NaN throughout: equal as they are, they say nothing of a program."""
    return {
        place
        for place, leaf in enumerate(pytree.tree_leaves(result))
        if isinstance(leaf, Tensor)
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.numel()
        and bool(leaf.isnan().all())
    }


def check_results(result: Any, own: Sequence[Tensor] = ()) -> None:
    """Refuse results that a captured program cannot make again, nor anyone compare.

    Raises:
        CaptureError: a part is neither a tensor nor a constant that cannot change, or it is one of `own`.
    """
    mine = set(map(id, own))
    for leaf in pytree.tree_leaves(result):
        if id(leaf) in mine:
            raise CaptureError(
                f"wanted results that are new in every call, got a tensor of shape {tuple(leaf.shape)} that "
                "the callable holds itself, and a captured program would give as another one; return a copy, "
                "or use mode='eager'"
            )
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            raise CaptureError(
                f"wanted results in tuples, lists and dictionaries of tensors, numbers and texts, got a "
                f"{type(leaf).__name__} among them; return such a nest, register the class with "
                "torch.utils._pytree.register_dataclass, or use mode='eager'"
            )


def _outcome(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    saved: SavedState,
    index: int,
    *,
    generators: Sequence[torch.Generator],
    nudged: int | None = None,
) -> Outcome:
    """Copies of the result and of the tensors of the module after one call from the saved state.

    With `nudged` the call begins with other last bits, another number with others.
    """
    # Both start from the same values: batch-norm statistics, say, move with every call.
    saved.restore_tensors()
    # Every other call only, so that inputs are changed without parameters and with them.
    if index % 2:
        perturb_tensors(saved.tensors)
    seed_all(index)
    for generator in generators:
        generator.manual_seed(index)
    # Each gets copies of its own: what one writes into its arguments must not reach the other.
    given = pytree.tree_map_only(Tensor, strided_copy, args)
    if nudged is not None:
        nudge([*saved.tensors, *tensors_in(given)], nudged)
    versions = [tensor._version for tensor in tensors_in(given)]  # noqa: SLF001
    # A captured graph returns its own memory, which the next replay overwrites.
    result = map_tensors(torch.clone, run(*given))
    after = [tensor._version for tensor in tensors_in(given)]  # noqa: SLF001
    if versions != after:
        raise CaptureError(
            "wanted a function that leaves its arguments as they are, got one that writes into argument "
            f"{[a != b for a, b in zip(versions, after, strict=True)].index(True)} (counted over the tensors "
            "in order); copy it inside the function, or use mode='eager'"
        )
    return result, [tensor.detach().clone() for tensor in saved.tensors]


def largest_difference(
    expected: Any, got: Any, parts: str = PARTS, least_size: float = 0.0
) -> tuple[float, str]:
    """The largest difference relative to the largest finite value of its tensor, and where it is.

    Args:
        expected: A nest of tensors and constants.
        got: Another, which should be the same.
        parts: What the nest consists of, in words.
        least_size: Share of the largest value of all tensors that each counts as having reached.
    """
    wanted, structure = pytree.tree_flatten(expected)
    found, other = pytree.tree_flatten(got)
    if structure != other:
        return math.inf, "the structure of the result"
    least = least_size * max(map(_size, wanted), default=0.0) if least_size else 0.0
    worst, where = 0.0, "the result"
    for index, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        difference = _difference(mine, theirs)
        size = _size(mine) if least else 0.0
        if 0.0 < size < least:
            difference *= size / least
        if difference > worst:
            worst, where = difference, f"tensor {index} ({parts})"
    return worst, where


def _size(leaf: Any) -> float:
    """The largest finite number of a tensor; 0 of what holds none."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return 0.0
    finite = leaf.detach().abs()
    finite = finite[torch.isfinite(finite)]
    return float(finite.max()) if finite.numel() else 0.0


def _difference(expected: Any, got: Any) -> float:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        is_constant = type(expected) is type(got) and isinstance(expected, CONSTANTS)
        return 0.0 if is_constant and expected == got else math.inf
    if (expected.shape, expected.dtype, expected.device) != (got.shape, got.dtype, got.device):
        return math.inf
    if expected.numel() == 0:
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, got) else math.inf
    # Differences of 16-bit numbers would be rounded to 16 bits themselves.
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (real_parts(tensor.to(wide)) for tensor in (expected, got))
    is_finite = torch.isfinite(a)
    # Masks of attention hold infinities on purpose: these have to agree exactly, sign included.
    if not torch.allclose(a[~is_finite], b[~is_finite], equal_nan=True):
        return math.inf
    if not bool(is_finite.any()):
        return 0.0
    if not bool(torch.isfinite(b[is_finite]).all()):
        return math.inf
    gap = float((a[is_finite] - b[is_finite]).abs().max())
    size = float(a[is_finite].abs().max())
    return gap / size if size else gap


def tolerance_of(leaves: Sequence[Any]) -> float:
    """What is accepted for a program over these tensors, under the present precision settings."""
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    if torch.float32 in dtypes and torch.backends.cuda.matmul.allow_tf32:
        return max(tolerance, TF32_TOLERANCE)
    return tolerance
