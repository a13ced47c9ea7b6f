"""`rl.hybridize`: a function or module in its fastest equivalent form, with the same results."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.dispatch import CallDispatch
from ridgeline.callables.calls.forms import capturing, name_of
from ridgeline.callables.calls.reads import CallReads, check_given, check_shapes, device_of
from ridgeline.callables.calls.repeated import map_each
from ridgeline.callables.calls.report import HybridReport, ModeRow
from ridgeline.callables.calls.search import search
from ridgeline.capture.named_arguments import positional
from ridgeline.closing import Closing
from ridgeline.errors import CaptureError, PlanError, SideEffectError
from ridgeline.execution import check_offered
from ridgeline.given import checked
from ridgeline.guards.reading import UnreadableError
from ridgeline.guards.settled import WritingError, filled
from ridgeline.plan import Execution
from ridgeline.reach.side_effects import refuse_streams, refusing_writes
from ridgeline.reach.undo import undone
from ridgeline.tensors.copies import overlaps, written


@checked(PlanError, but=("fn_or_module", "mode"))
def hybridize(
    fn_or_module: Callable[..., Any],
    example_inputs: Any,
    mode: Execution | Literal["auto"] = "auto",
    *,
    calls: int | None = None,
    budget_s: float = 120.0,
    static_io: bool = False,
    max_shapes: int = 2,
) -> "Hybrid":
    """The callable in its fastest form that gives the same results, or in the mode asked for.

    Calls are inference: they run under `no_grad`, and results carry no gradients. Whether a module is in
    training or evaluation mode is left as it is (dropout then drops, batch norm updates its statistics).
    An argument that requires gradients makes its call eager, with gradients; that is counted.

    Before a mode is used its results are compared with the callable's own over several calls with changed
    inputs, parameters and random state. Before every call the guards of torch's compiler are compared: all
    that decided what is computed, from attributes at any depth to autocast. Updates of parameters in place
    are seen at once; parameters, modules, hooks or objects that were replaced lead to a new capture, other
    values (`training`, `self.scale`, memory layouts) to a further one, see `max_shapes`. A callable that the
    compiler cannot read in one piece, or that changes more than the values of tensors (a counter, a list),
    is not captured. Where only first calls do that (they fill a cache, or look at the first batch), these run
    as written, with what they are given; making the form leaves no trace of the example.

    Args:
        fn_or_module: What to call; any nest of tensors and constants in and out. Calls may give arguments by
            name, if these can be given by position, too.
        example_inputs: A tuple of its positional arguments, or the only one if it is a tensor.
        mode: `auto` measures what the device offers; or the name of a mode, see `rl.Plan.execution`.
        calls: How often it will be called, if known: compiling is then weighed against its gain.
        budget_s: Seconds for the search of `auto`. A compilation that has begun is not broken off.
        static_io: Read inputs from the tensors of `.inputs`, which the caller writes, and let every call
            overwrite the results of the one before. Then `hybrid()` on a CUDA graph is the bare replay:
            nothing is looked at, so make another `Hybrid` after replacing parameters or changing settings,
            and make a first call that fills a cache before.
        max_shapes: Signatures that are captured; calls with further ones run eagerly, counted in the report.

    Raises:
        PlanError: the mode is not offered on the device, or an argument is out of range.
        CaptureError: the mode asked for cannot capture the program (in `auto`: its row says so),
            parameters have no shapes or no values yet, or there is nothing to call.
        EquivalenceError: the mode asked for gave other results; names the difference.
        PackageError: the mode asked for is `packaged`, and the program could not be packaged.
        SideEffectError: the callable draws from an iterator or writes to files, which no comparison could
            take back (`auto` runs it as written).

    Cost: Compiles, seconds to minutes; in `auto` about `budget_s`. Waits for the device.
    """
    if max_shapes < 1 or budget_s < 0 or (calls is not None and calls < 0):
        raise PlanError(
            f"wanted max_shapes >= 1, budget_s >= 0 and calls >= 0, got {max_shapes}, {budget_s} s and "
            f"{calls} for hybridize; change them"
        )
    check_shapes(fn_or_module)
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    check_given(fn_or_module, args)
    # Captures rely on the example's strides, so what is expanded or lazily conjugated is written out first.
    # With `static_io` each argument is a tensor of its own, which the caller writes.
    args = pytree.tree_map_only(Tensor, _example, args) if static_io else map_each(_example, args)
    dispatch = CallDispatch(fn_or_module, args, static_io=static_io, max_shapes=max_shapes)
    try:
        with contextlib.ExitStack() as until_made:
            if mode == "auto":
                return _searched(dispatch, calls, budget_s, until_made)
            return _asked_for(dispatch, mode, calls, until_made)
    except BaseException:
        dispatch.close()
        raise


class Hybrid(Closing):
    """A callable in one execution mode; made by `rl.hybridize`, called like the original.

    Not meant for several threads at once. Use it in a `with` block, or `close()` it, to give up graphs.
    """

    def __init__(self, dispatch: CallDispatch, report: HybridReport) -> None:
        self._dispatch = dispatch
        self._report = report

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The result for these inputs; with `static_io` and no inputs, for what `.inputs` hold.

        Raises:
            BatchError: an input lies on another device than the example, or can be given by name only; with
                `static_io`, has another structure, shape or dtype.
            PlanError: it was closed.

        Cost: 2 to 4 us beside the captured program, 10 to 50 more with names. A further
            shape or setting is captured (seconds, once) until there are `max_shapes`.
        """
        if named:
            inputs = positional(self._dispatch.fn, inputs, named)
        return self._dispatch.front(*inputs)

    def __copy__(self) -> Self:
        return self  # its programs are those of one callable

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        """Refused: a copy would still call the callable that this one was made of.

        Raises:
            PlanError: always.
        """
        raise _not_copied()

    def __reduce__(self) -> Any:
        """Refused, likewise.

        Raises:
            PlanError: always.
        """
        raise _not_copied()

    def __repr__(self) -> str:
        return f"Hybrid({self._report.subject}, mode={self.mode!r}, {self._report.device})"

    @property
    def mode(self) -> Execution:
        """The mode of the calls that fit a captured program."""
        return self._dispatch.mode

    @property
    def inputs(self) -> tuple[Any, ...]:
        """With `static_io`: the arguments whose tensors the next call reads; write into them in place.

        Raises:
            PlanError: it was made without `static_io`.
        """
        if not self._dispatch.static_io:
            raise PlanError(
                "wanted the static inputs of a Hybrid, got one made with static_io=False; pass inputs to the "
                "call, or make it with static_io=True"
            )
        return self._dispatch.inputs

    @property
    def report(self) -> HybridReport:
        """Modes, times, differences, the choice and its reason, and what was counted so far."""
        return msgspec.structs.replace(
            self._report, notes=tuple(self._dispatch.notes), counters=dict(self._dispatch.counters)
        )

    def save(self, path: str | Path) -> Path:
        """Write the callable with its parameters as a package that `rl.load` runs without its source.

        Raises:
            CaptureError: the program cannot be exported.
            PackageError: it could not be compiled or written.

        Cost: Compiles, seconds to minutes.
        """
        from ridgeline.packages.callables import save_callable

        args = pytree.tree_map_only(Tensor, torch.detach, self._dispatch.args)  # each by itself
        return save_callable(self._dispatch.fn, args, path)

    def close(self) -> None:
        """Give up graphs and compiled programs; calls afterwards are errors. Results stay valid.

        Cost: Waits for the device if there are graphs.
        """
        self._dispatch.close()


def _not_copied() -> PlanError:
    return PlanError(
        "wanted something to copy or pickle, got a Hybrid, whose programs call the callable that it was made "
        "of; copy that, and hybridize(...) the copy; save(path) writes it with its parameters"
    )


def _example(tensor: Tensor) -> Tensor:
    """A tensor to capture around: without gradients, each element in memory and as it is written there."""
    tensor = written(tensor.detach())
    is_dense = tensor.layout != torch.strided or not overlaps(tensor)
    return tensor if is_dense else tensor.contiguous()


def _asked_for(
    dispatch: CallDispatch, mode: Execution, calls: int | None, until_made: contextlib.ExitStack
) -> Hybrid:
    device = device_of(dispatch.fn, dispatch.args)
    check_offered(mode, "callable", device.type)
    dispatch.mode = mode
    row = _untimed(mode)
    if mode != "eager":
        # First, as the compiler draws from counters while it reads.
        refuse_streams(dispatch.fn, dispatch.args)
        reads, refusal = _read(dispatch, until_made)
        if reads is not None:
            entry = dispatch.make(dispatch.args, reads)
        elif mode == "compiled" and _is_left_to_compiler(refusal, dispatch):
            with refusing_writes():
                entry = dispatch.make_unread(dispatch.args, str(refusal))
        else:
            raise _with_ways_out(refusal, dispatch) from refusal.__cause__
        # Closed before the refusal is raised: its graph would otherwise live as long as the traceback.
        if not entry.comparison.is_equal:
            entry.close()
        entry.comparison.check(mode)
        row = msgspec.structs.replace(
            row, compile_s=entry.compile_s, difference=entry.comparison.difference
        )
        dispatch.use_unread(entry) if reads is None else dispatch.use(entry, reads)
    else:
        dispatch.use_eager()
    return _reported(dispatch, "requested by name", (row,), calls=calls)


def _read(
    dispatch: CallDispatch, until_made: contextlib.ExitStack
) -> tuple[CallReads | None, CaptureError]:
    """What the callable reads; or nothing, and why.

    One that writes with its first call only is captured as it is after it, and put back at the end: that call
    is the user's, and runs as written. A caller of `static_io` would not come by there.
    """
    nothing = CaptureError("nothing is in the way")
    try:
        try:
            return CallReads(dispatch.fn, dispatch.args), nothing
        except WritingError:
            if dispatch.static_io:
                raise
        with torch.no_grad():
            # Left only when the form is made, since captures and comparisons call the function with its cache
            # filled.
            until_made.enter_context(filled(dispatch.fn, dispatch.args))
        return CallReads(dispatch.fn, dispatch.args), nothing
    except CaptureError as error:
        return None, error


def _is_left_to_compiler(refusal: CaptureError, dispatch: CallDispatch) -> bool:
    """Whether `torch.compile` may run, in several pieces, what could not be read in one."""
    return isinstance(refusal, UnreadableError) and not dispatch.static_io


def _with_ways_out(refusal: CaptureError, dispatch: CallDispatch) -> CaptureError:
    """The refusal of what the compiler cannot read, with what a caller may do instead."""
    if not isinstance(refusal, UnreadableError):
        return refusal
    compiled = "" if dispatch.static_io else "mode='compiled', which leaves it to Python, or "
    return UnreadableError(f"{refusal}; do that around the call, or use {compiled}mode='eager'")


def _searched(
    dispatch: CallDispatch, calls: int | None, budget_s: float, until_made: contextlib.ExitStack
) -> Hybrid:
    try:
        refuse_streams(dispatch.fn, dispatch.args)
        reads, refusal = _read(dispatch, until_made)
        return _fastest(dispatch, reads, refusal, calls, budget_s)
    except SideEffectError as error:
        dispatch.use_eager()
        reason = f"no call of it can be taken back: {error}"
        return _reported(dispatch, reason, (_untimed("eager"),), calls=calls)


def _fastest(
    dispatch: CallDispatch,
    reads: CallReads | None,
    refusal: CaptureError,
    calls: int | None,
    budget_s: float,
) -> Hybrid:
    with capturing(), contextlib.ExitStack() as kept:
        if reads is None:  # code that was not read may change anything, each time that it is called
            kept.enter_context(undone(dispatch.fn, dispatch.args))
            kept.enter_context(refusing_writes())
        found = search(
            dispatch.fn,
            dispatch.eager,
            dispatch.args,
            reads,
            device_of(dispatch.fn, dispatch.args),
            refusal=str(refusal),
            is_left_to_compiler=_is_left_to_compiler(refusal, dispatch),
            calls=calls,
            budget_s=budget_s,
            static_io=dispatch.static_io,
        )
    dispatch.mode = found.decision.mode
    if found.entry is not None:
        dispatch.use_unread(found.entry) if reads is None else dispatch.use(found.entry, reads)
    else:
        dispatch.use_eager()
    return _reported(dispatch, found.decision.reason, found.rows, calls=calls, budget_s=budget_s)


def _untimed(mode: Execution) -> ModeRow:
    return ModeRow(mode=mode, status="measured", reason="not timed")


def _reported(
    dispatch: CallDispatch,
    reason: str,
    rows: tuple[ModeRow, ...],
    *,
    calls: int | None,
    budget_s: float | None = None,
) -> Hybrid:
    report = HybridReport(
        subject=name_of(dispatch.fn),
        device=device_of(dispatch.fn, dispatch.args).type,
        chosen=dispatch.mode,
        reason=reason,
        rows=rows,
        calls=calls,
        budget_s=budget_s,
    )
    return Hybrid(dispatch, report)
