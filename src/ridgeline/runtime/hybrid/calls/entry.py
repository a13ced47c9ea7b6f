"""One captured program: a mode made for one signature, and the quick test that a call fits it."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError, CaptureError
from ridgeline.execution import MODES, Form
from ridgeline.plan import Execution
from ridgeline.runtime.batch import signature
from ridgeline.runtime.hybrid.calls.equivalence import Comparison, check_results, compare_calls
from ridgeline.runtime.hybrid.calls.forms import (
    CallableForm,
    brief,
    make_form,
    name_of,
    without_gradients,
)
from ridgeline.runtime.hybrid.calls.state import CallState, preserved
from ridgeline.runtime.hybrid.inductor import FAILURES


class Entry:
    """A callable in one mode for arguments of one signature.

    Args:
        mode: The mode.
        fn: The callable as written.
        args: Example arguments.
        state: What `fn` reads; put back bitwise after warm-up and check.
        device: Where it runs.
        static_io: Read from `inputs`, and let the next call overwrite results.
        forms: Forms of the same callable and signature that exist already; made ones are added.

    Attributes:
        inputs: With `static_io` the tensors to write into, in the structure of the arguments.
        notes: What was done differently, and why.
        comparison: Outcome of the check against `fn`.
        compile_s: Seconds to make it, up to the end of its first call.

    Raises:
        CaptureError: the program cannot be captured or compiled.
    """

    def __init__(
        self,
        mode: Execution,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        state: CallState,
        device: torch.device,
        *,
        static_io: bool = False,
        forms: dict[Form, CallableForm] | None = None,
    ) -> None:
        self.mode = mode
        self._args = args
        self._device = device
        self._form_name, is_replayed = MODES[mode].form, MODES[mode].is_replayed
        forms = {} if forms is None else forms
        begin = time.perf_counter()
        with preserved(state.tensors()):
            self.notes = _inspected(fn, args, device) if is_replayed else ()
            if mode != "eager" and self._form_name not in forms:
                check_results(without_gradients(fn)(*args))
            if self._form_name not in forms:
                forms[self._form_name] = make_form(self._form_name, fn, args)
            self.form = forms[self._form_name]
            self.notes += self.form.notes
            self._replay(args, static_io) if is_replayed else self._direct(args, static_io)
            self._run_first(fn)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.compile_s = time.perf_counter() - begin
        self.comparison = Comparison(0.0, 0.0, "the program as written")
        if mode != "eager":
            self.comparison = compare_calls(fn, self.run, args, state)

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
        self.run = call
        self.strides: tuple[Any, ...] | None = None
        if self.form.needs_layout:
            leaves = pytree.tree_leaves(args)
            self.strides = tuple(x.stride() if isinstance(x, Tensor) else None for x in leaves)
            self.run = _with_layout(call, self.strides)
        self.fast = call
        self.inputs: tuple[Any, ...] = ()
        if static_io:
            self.inputs = inputs = pytree.tree_map_only(Tensor, _own, args)
            self.replay: Callable[[], Any] = lambda: call(*inputs)
            self.run = self.fast = self.call_static

    def _replay(self, args: tuple[Any, ...], static_io: bool) -> None:
        from ridgeline.runtime.hybrid.calls.graph import CallGraph

        graph = CallGraph(self.form.call, args, static_io=static_io)
        self.close_graph = graph.close
        self.run = self.fast = graph
        self.strides = None
        self.inputs = graph.inputs
        if static_io:
            self.replay = graph.replay
            self.run = self.fast = self.call_static


def guarded(
    entry: Entry,
    args: tuple[Any, ...],
    is_unchanged: Callable[[], bool],
    casting: bool,
    *,
    miss: Callable[..., Any],
) -> Callable[..., Any]:
    """A call that goes straight into the entry if it fits, and to `miss` if not.

    Cost: 2 to 4 us for a small module with one tensor as its argument.
    """
    if not args or not all(type(arg) is Tensor for arg in args):
        return miss
    shapes = [arg.shape for arg in args]
    dtypes = [arg.dtype for arg in args]
    devices = [arg.device for arg in args]
    strides = entry.strides or ()
    has_strides, fast, num = entry.strides is not None, entry.fast, len(args)
    kind = args[0].device.type
    is_casting = torch.is_autocast_enabled

    def call_one(*given: Any) -> Any:
        if len(given) == 1:
            x = given[0]
            if (
                type(x) is Tensor
                and x.shape == shape
                and x.dtype is dtype
                and x.device == device
                and not x.requires_grad
                and (not has_strides or x.stride() == stride)
                and is_casting(kind) is casting
                and is_unchanged()
            ):
                return fast(x)
        return miss(*given)

    def call_several(*given: Any) -> Any:
        if (
            len(given) == num
            and all(type(x) is Tensor and not x.requires_grad for x in given)
            and [x.shape for x in given] == shapes
            and [x.dtype for x in given] == dtypes
            and [x.device for x in given] == devices
            and (not has_strides or tuple([x.stride() for x in given]) == strides)
            and is_casting(kind) is casting
            and is_unchanged()
        ):
            return fast(*given)
        return miss(*given)

    if num > 1:
        return call_several
    shape, dtype, device = shapes[0], dtypes[0], devices[0]
    stride = strides[0] if strides else None
    return call_one


def _with_layout(call: Callable[..., Any], strides: tuple[Any, ...]) -> Callable[..., Any]:
    """`call` with arguments brought to the strides of the example, which compiled code relies on."""

    def run(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        for index, (leaf, stride) in enumerate(zip(leaves, strides, strict=True)):
            if isinstance(leaf, Tensor) and leaf.stride() != stride:
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
    from ridgeline.runtime.hybrid.capture.child_trial import check_trial, try_in_child
    from ridgeline.runtime.hybrid.capture.lint import (
        check_capturable,
        inspect_callable,
        is_doubtful,
    )

    lint = inspect_callable(fn, args, device=device)
    check_capturable(lint.findings)
    if not is_doubtful(lint):
        return ()
    outcome = try_in_child(
        "ridgeline.runtime.hybrid.calls.graph:capture_once", {"fn": fn, "args": args}
    )
    return (check_trial(outcome, lint.doubts),)


def _own(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor.detach())


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
