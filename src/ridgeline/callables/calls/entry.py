"""One captured program: a mode made for one signature."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.equivalence import CallComparison, check_results, compare_calls
from ridgeline.callables.calls.forms import (
    CallableForm,
    brief,
    make_form,
    name_of,
    without_gradients,
)
from ridgeline.callables.calls.repeated import Repeats
from ridgeline.errors import BatchError, CaptureError
from ridgeline.execution import MODES, Form
from ridgeline.optimizers.shared_memory import WrittenMemory
from ridgeline.plan import Execution
from ridgeline.programs.distinct_results import memory_number
from ridgeline.programs.inductor import FAILURES
from ridgeline.state.saved_state import preserved
from ridgeline.tensors.batch import signature
from ridgeline.tensors.copies import is_noted, num_writes, overlaps, strided_copy


class Entry:
    """A callable in one mode for arguments of one signature.

    Args:
        mode: The mode.
        fn: The callable as written.
        args: Example arguments.
        tensors: That `fn` reads besides; put back bitwise after warm-up and check.
        device: Where it runs.
        static_io: Read from `inputs`, and let the next call overwrite results.
        forms: Forms of the same callable and signature that exist already; made ones are added.
        repeats: How the arguments repeat tensors, where what is captured is given each of them once.

    Attributes:
        repeats: As given.
        inputs: With `static_io` the tensors to write into, in the structure of the arguments.
        notes: What was done differently, and why.
        run: Calls it with arguments of the example's shapes.
        fast: The same for arguments that have its strides, too.
        comparison: Outcome of the check against `fn`.
        compile_s: Seconds to make it, up to the end of its first call.

    Raises:
        CaptureError: the program cannot be captured or compiled, an argument is expanded or unfolded, or a
            result lies in the memory of one whose sign is only noted, or of one that a graph has a copy of.
    """

    def __init__(
        self,
        mode: Execution,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        tensors: list[Tensor],
        device: torch.device,
        *,
        static_io: bool = False,
        forms: dict[Form, CallableForm] | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self.repeats = repeats
        if repeats is not None:
            fn, args = repeats.wrapped(fn), repeats.distinct(args)
        self.mode = mode
        self._args = args
        self._device = device
        self._form_name, is_replayed = MODES[mode].form, MODES[mode].is_replayed
        # Shared by modes with and without a graph: the same compiled program serves both.
        forms = {} if forms is None else forms
        begin = time.perf_counter()
        _check_dense(args)
        # What the first calls write is put back bitwise, or later calls would not begin where the user's
        # do.
        with preserved(tensors):
            # Before anything is compiled: a linter's refusal costs nothing, a failed capture the process.
            self.notes = _inspected(fn, args, device) if is_replayed else ()
            # Once a form: modes with and without a graph give the same results to look at.
            if self._form_name not in forms:
                written = () if mode == "eager" else _written(fn, args, tensors)
                form = make_form(self._form_name, fn, args)
                forms[self._form_name] = form._replace(written=WrittenMemory(written))
            self.form = forms[self._form_name]
            self.notes += self.form.notes
            self._replay(args, static_io) if is_replayed else self._direct(args, static_io)
            self._run_first(fn)
            if device.type == "cuda":
                # The first call is part of the price of a mode, kernels included.
                torch.cuda.synchronize(device)
        self.compile_s = time.perf_counter() - begin
        self.comparison = CallComparison(0.0, 0.0, "the program as written")
        if mode != "eager":
            self.comparison = compare_calls(fn, self.run, args, tensors)
            self.notes += self.comparison.notes
        if repeats is not None:
            self.run, self.fast = repeats.calling(self.run), repeats.calling(self.fast)

    def call_static(self, *args: Any) -> Any:
        """With `static_io`: load the arguments, if there are any, and run.

        Raises:
            BatchError: see `load`.
        """
        if args:
            self.load(*args)
        return self.replay()

    def close(self) -> None:
        """Give up the graph and what the form holds."""
        self.close_graph()
        self.form.close()

    def load(self, *args: Any) -> None:
        """With `static_io`: copy arguments into `inputs`.

        Raises:
            BatchError: another structure, shape or dtype than the example's.
        """
        if signature(args) != signature(self._args):
            raise BatchError(
                f"wanted arguments like the example, {_describe(self._args)}, got {_describe(args)}; with "
                "static_io=True there is one signature: hybridize again for another"
            )
        static, given = pytree.tree_leaves(self.inputs), pytree.tree_leaves(args)
        # A recorded copy would hold the graph of each call's arguments, and the one before it.
        with torch.no_grad():
            for target, source in zip(static, given, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)

    def _run_first(self, fn: Callable[..., Any]) -> None:
        """The first call, in which a program can still turn out to be beyond its mode."""
        try:
            self.run(*self._args)
        except (*FAILURES, torch.jit.Error) as error:
            raise CaptureError(
                f"wanted {name_of(fn)} to run in mode {self.mode!r}, got {brief(error)}; use another mode"
            ) from error

    def _direct(self, args: tuple[Any, ...], static_io: bool) -> None:
        self.close_graph: Callable[[], None] = _nothing
        call = self.form.call
        self.run, is_written = call, True
        if self.form.needs_layout:
            leaves = pytree.tree_leaves(args)
            strides = tuple(x.stride() if isinstance(x, Tensor) else None for x in leaves)
            self.run = _with_layout(call, strides)
            # Guards compare strides but not noted signs, so that the short way would take these for written.
            is_written = not any(isinstance(x, Tensor) and is_noted(x) for x in leaves)
        self.fast = call if is_written else self.run
        self.inputs: tuple[Any, ...] = ()
        if static_io:
            # In the strides of the example, which compiled code relies on.
            self.inputs = inputs = pytree.tree_map_only(Tensor, strided_copy, args)
            self.replay: Callable[[], Any] = lambda: call(*inputs)
            self.run = self.fast = self.call_static

    def _replay(self, args: tuple[Any, ...], static_io: bool) -> None:
        from ridgeline.callables.calls.graph import CallGraph

        graph = CallGraph(self.form.call, args, static_io=static_io)
        if not (static_io or graph.owns_results):
            graph.close()
            raise CaptureError(
                "wanted results apart from the arguments, got one that is an argument or a view of it, and "
                "that a graph, which reads copies of these, would give as another; return a clone, or use a "
                "mode without a graph"
            )
        self.close_graph = graph.close
        self.run = self.fast = graph
        self.inputs = graph.inputs
        if static_io:
            self.replay = graph.replay
            self.run = self.fast = self.call_static


def _with_layout(call: Callable[..., Any], strides: tuple[Any, ...]) -> Callable[..., Any]:
    """`call` with arguments written with the strides of the example, which compiled code relies on."""

    def run(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        for index, (leaf, stride) in enumerate(zip(leaves, strides, strict=True)):
            if isinstance(leaf, Tensor) and (leaf.stride() != stride or is_noted(leaf)):
                leaves[index] = torch.empty_strided(
                    leaf.shape, stride, dtype=leaf.dtype, device=leaf.device
                ).copy_(leaf)
        return call(*pytree.tree_unflatten(leaves, structure))

    return run


def _inspected(
    fn: Callable[..., Any], args: tuple[Any, ...], device: torch.device
) -> tuple[str, ...]:
    """Refuse before the capture what cannot be captured: a failed capture would take the process along.

    What cannot be judged by looking is tried in a child process first.
    """
    from ridgeline.lint.child_trial import check_trial, try_in_child
    from ridgeline.lint.lint import check_capturable, inspect_callable, is_doubtful

    lint = inspect_callable(fn, args, device=device)
    check_capturable(lint.findings)
    if not is_doubtful(lint):
        return ()
    outcome = try_in_child("ridgeline.callables.calls.graph:capture_once", {"fn": fn, "args": args})
    return (check_trial(outcome, lint.doubts),)


def _check_dense(args: tuple[Any, ...]) -> None:
    """Refuse arguments in whose memory a captured program could not be given other values."""
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and overlaps(leaf):
            raise CaptureError(
                "wanted arguments whose elements each have memory of their own, got a tensor of shape "
                f"{tuple(leaf.shape)} and strides {leaf.stride()} (expanded or unfolded); give it as "
                ".contiguous()"
            )


def _written(fn: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that a call writes, whose results are looked at.

    Raises:
        CaptureError: a captured program cannot give these results.
    """
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    before = num_writes(counted)
    result = without_gradients(fn)(*args)
    check_results(result, tensors)
    _check_written(result, args)
    pairs = zip(counted, before, num_writes(counted), strict=True)
    uncounted = [tensor for tensor in tensors if tensor.is_inference()]
    return [tensor for tensor, then, now in pairs if then != now] + uncounted


def _check_written(result: Any, args: tuple[Any, ...]) -> None:
    """Refuse results in the memory of an argument that the captured program would be given a copy of."""
    noted = {
        memory_number(leaf)
        for leaf in pytree.tree_leaves(args)
        if isinstance(leaf, Tensor) and is_noted(leaf)
    }
    for leaf in pytree.tree_leaves(result) if noted else ():
        if memory_number(leaf) in noted:
            raise CaptureError(
                "wanted results apart from arguments whose sign or conjugation is only noted, got one of "
                f"shape {tuple(leaf.shape)} in the memory of such; give it as .resolve_conj() or "
                ".resolve_neg()"
            )


def _describe(args: tuple[Any, ...]) -> str:
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in pytree.tree_leaves(args)
    ]
    return f"({', '.join(parts)})"


def _nothing() -> None:
    """Nothing to give up."""
