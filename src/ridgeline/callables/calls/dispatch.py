"""Where a call of a `Hybrid` goes: into a captured program that fits it, or to the program as written.

`front` compares guards. What passes none of them is looked at in full: it may be worth a capture of its own,
be the same program for arguments that lie otherwise in memory, or run eagerly, counted and noted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.entry import Entry
from ridgeline.callables.calls.forms import (
    CallableForm,
    capturing,
    compiled_with_guards,
    without_gradients,
)
from ridgeline.callables.calls.front import front_of
from ridgeline.callables.calls.reads import CallReads, device_of
from ridgeline.callables.calls.repeated import map_each, repeats_of
from ridgeline.capture.casts import casting
from ridgeline.capture.interception import intercepted, is_special
from ridgeline.capture.unchecked import NOTE
from ridgeline.errors import BatchError, CaptureError, PackageError, PlanError
from ridgeline.execution import Form
from ridgeline.guards.settled import WritingError, tensors_of
from ridgeline.plan import Execution
from ridgeline.reach.undo import undone
from ridgeline.tensors.batch import signature
from ridgeline.tensors.nests import tensors_in

GRADIENTS = "calls whose arguments require gradients ran eagerly"
OTHER_KIND = "calls with arguments of another structure or dtype than the example ran eagerly"
SPECIAL = "calls with subclasses of Tensor ran eagerly"
OWN = (
    "calls with a parameter or buffer of the callable as an argument ran eagerly, since code may ask whether "
    "it is given its own; give a clone to have them captured"
)
OF_WRITTEN = "calls with arguments in the memory of buffers that they write ran eagerly"
WRITING = "calls that change more than the values of tensors, such as those that fill a cache, ran eagerly"
REPLACED = "parameters, modules, hooks or objects were replaced after the capture: captured again"
TURNS_ON = "torch._C._set_grad_enabled(True)"
"""In the text of a program that was read: what `enable_grad` does."""

MOST_READINGS = 32
"""After so many calls that were read again, what changes changes all the time, and reading takes longer."""
MANY_READINGS = (
    f"calls after {MOST_READINGS} that had to be read again ran eagerly: what changes in them changes all "
    "the time"
)


class Captured(NamedTuple):
    """A captured program, or None for calls that run eagerly, and what it takes for granted.

    `call` is how it is called: one that lies in memory as the example did needs no look at that.
    """

    entry: Entry | None
    reads: CallReads
    call: Callable[..., Any]


class CallDispatch:
    """The captured programs of one callable in one mode.

    Args:
        fn: The callable as written.
        args: Example arguments.
        static_io: There is one captured program, whose inputs the caller writes.
        max_shapes: Most captured programs.

    Attributes:
        mode: The mode of the captured programs.
        front: What a call of the `Hybrid` goes to.
        notes: What was done differently, and why; each once.
        counters: `eager_calls`, `shapes`, `rebuilds`.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], *, static_io: bool, max_shapes: int
    ) -> None:
        self.fn = fn
        self.args = args
        self.static_io = static_io
        self.mode: Execution = "eager"
        self.eager = without_gradients(fn)
        self.notes: list[str] = []
        self.counters = {"eager_calls": 0, "shapes": 0, "rebuilds": 0}
        self.front: Callable[..., Any] = self._as_written
        self._max_shapes = max_shapes
        self._captured: list[Captured] = []
        self._unread: set[Any] = set()
        self._writing: set[Any] = set()
        self._num_readings = 0
        self._only: Entry | None = None
        self._kind = _kind(args)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """With `static_io`: what the next call reads."""
        entries = [self._only, *(item.entry for item in self._captured)]
        return next(entry.inputs for entry in entries if entry is not None)

    def make(self, args: tuple[Any, ...], reads: CallReads) -> Entry:
        """A captured program for such arguments; not yet used.

        Raises:
            CaptureError, PackageError: see `Entry`; or the call is one in inference mode whose code turns
                gradients on, of which nothing is recorded there.
        """
        if torch.is_inference_mode_enabled() and TURNS_ON in reads.guards.graph:
            raise CaptureError(
                "wanted code in inference mode that leaves gradients off, got some that turns them on "
                "(torch.enable_grad()), which only outside records what is computed; call it under no_grad()"
            )
        if reads.guards.leaves_out_checks:
            self._note(NOTE)
        with capturing():
            return Entry(
                self.mode,
                self.fn,
                args,
                reads.tensors,
                reads.device,
                static_io=self.static_io,
                repeats=repeats_of(args),
            )

    def make_unread(self, args: tuple[Any, ...], why: str) -> Entry:
        """A program that `torch.compile` guards, of a callable that cannot be read in one piece.

        Raises:
            CaptureError: it cannot be compiled.
        """
        with undone(self.fn, args), capturing():
            forms: dict[Form, CallableForm] = {"compiled": compiled_with_guards(self.fn, args, why)}
            device = device_of(self.fn, args)
            return Entry("compiled", self.fn, args, tensors_of(self.fn), device, forms=forms)

    def use_unread(self, entry: Entry) -> None:
        """Send all calls without gradients to a program that looks after itself."""
        for note in entry.notes:
            self._note(note)
        self.counters["shapes"] += 1
        self._only = entry

        def front(*inputs: Any) -> Any:
            if torch.is_grad_enabled() and _requires_gradients(inputs):
                self._count_eager(GRADIENTS)
                return self.fn(*inputs)
            if why := intercepted():
                self._count_eager(f"calls {why}")
                return self.eager(*inputs)
            return entry.run(*inputs)

        self.front = front

    def use(self, entry: Entry, reads: CallReads) -> None:
        """Send calls that fit to the program."""
        self.counters["shapes"] += 1
        for note in entry.notes:
            self._note(note)
        self._captured.append(Captured(entry, reads, self._apart(entry, entry.fast)))
        self._link()

    def use_eager(self) -> None:
        """Send calls to the program as written, with `static_io` by way of inputs of its own."""
        self.mode = "eager"
        if not self.static_io:
            self._link()
            return
        tensors, device = tensors_of(self.fn), device_of(self.fn, self.args)
        with capturing():
            self._only = Entry("eager", self.fn, self.args, tensors, device, static_io=True)
        self.front = self._only.call_static

    def close(self) -> None:
        """Give up all captured programs; calls are errors from now on."""
        self._drop(self._captured)
        if self._only is not None:
            self._only.close()
        self.front = _closed

    def _link(self) -> None:
        captured = [item for item in self._captured if item.entry is not None]
        if self.static_io and captured:
            self.front = captured[0].entry.call_static  # type: ignore[union-attr]
        elif self.mode == "eager":
            self.front = self._as_written
        else:
            table = [(item.reads.guards.holds, item.call) for item in self._captured]
            self.front = front_of(self.fn, table, self._look_closely)

    def _as_written(self, *inputs: Any) -> Any:
        """Eager mode: without gradients, unless an argument asks for them."""
        if torch.is_grad_enabled() and _requires_gradients(inputs):
            return self.fn(*inputs)
        return self.eager(*inputs)

    def _look_closely(self, *inputs: Any) -> Any:
        """A call that no guards let pass."""
        if torch.is_grad_enabled() and _requires_gradients(inputs):
            self._count_eager(GRADIENTS)
            return self.fn(*inputs)
        if why := intercepted():
            self._count_eager(f"calls {why}")
        elif any(map(is_special, pytree.tree_leaves(inputs))):
            self._count_eager(SPECIAL)
        elif self._takes_its_own(inputs):
            self._count_eager(OWN)
        elif _kind(inputs) != self._kind:
            self._count_eager(OTHER_KIND)
        else:
            _check_devices(self.args, inputs)
            self._forget_replaced(inputs)
            item = self._capture(inputs)
            if item is not None:
                return item.call(*inputs)
        return self.eager(*inputs)

    def _takes_its_own(self, inputs: tuple[Any, ...]) -> bool:
        """Whether an argument is a tensor that the callable itself reads, too."""
        # By identity: a view of a parameter is another tensor to code that asks with `is`.
        own = {id(tensor) for item in self._captured for tensor in item.reads.tensors}
        return not own.isdisjoint(map(id, pytree.tree_leaves(inputs)))

    def _capture(self, inputs: tuple[Any, ...]) -> Captured | None:
        """A captured program for these arguments, made now; None if this call has to run eagerly."""
        kind = self._signature(inputs)
        # Reading takes longer than many calls, so it ends after some that led to nothing.
        if kind in self._unread:  # a note said why
            self.counters["eager_calls"] += 1
            return None
        if self._num_readings >= MOST_READINGS:
            self._count_eager(MANY_READINGS)
            return None
        self._num_readings += 1
        # A program without gradients reads the same whether an argument requires some.
        args = map_each(torch.detach, inputs)
        try:
            reads = CallReads(self.fn, args)
        except WritingError as error:
            if kind in self._writing:  # it has filled what it wanted to, and continues
                self._unread.add(kind)
            self._writing.add(kind)
            self._count_eager(f"{WRITING}: {error}")
            return None
        except CaptureError as error:
            self._unread.add(kind)
            self._count_eager(f"another shape or setting ran eagerly: {error}")
            return None
        entries = (c.entry for c in self._captured if c.entry and _serves(c.reads, reads))
        # Another layout alone needs no program: the captured one is given copies in its own.
        same = next((entry for entry in entries if entry.repeats == repeats_of(args)), None)
        if same is not None:
            item = Captured(same, reads, self._apart(same, same.run))
        elif len({id(item.entry) for item in self._captured}) >= self._max_shapes:
            self._unread.add(kind)
            most = f"max_shapes={self._max_shapes} are captured"
            self._count_eager(f"calls with further shapes or settings ran eagerly: {most}")
            return None
        else:
            item = self._entered(args, reads)
        self._captured.append(item)
        self._link()
        return item

    def _entered(self, args: tuple[Any, ...], reads: CallReads) -> Captured:
        """A new captured program; one without where that cannot be."""
        entry = None
        try:
            entry = self.make(args, reads)
            if entry.comparison.is_equal:
                self.counters["shapes"] += 1
                return Captured(entry, reads, self._apart(entry, entry.fast))
            entry.close()
            why = (
                f"mode {self.mode!r} differs by {entry.comparison.difference:.3g} in "
                f"{entry.comparison.where}"
            )
        except (CaptureError, PackageError) as error:
            why = str(error)
        self._note(f"another shape or setting ran eagerly: {why}")
        # With its guards all the same: the next such call goes straight to the code as written.
        return Captured(None, reads, self._eagerly)

    def _apart(self, entry: Entry, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` where no argument shows what it writes: the code may read that behind a write."""
        written = entry.form.written
        if not written:
            return run

        def call(*inputs: Any) -> Any:
            if written.meets(tensors_in(inputs)):
                self._count_eager(OF_WRITTEN)
                return self.eager(*inputs)
            return run(*inputs)

        return call

    def _eagerly(self, *inputs: Any) -> Any:
        """A call that fits what could not be captured."""
        self.counters["eager_calls"] += 1
        return self.eager(*inputs)

    def _forget_replaced(self, inputs: tuple[Any, ...]) -> None:
        """Forget what was captured around parameters, modules or objects that were replaced."""
        arguments = {"fn": self.fn, "args": inputs}
        gone = [item for item in self._captured if not item.reads.guards.could_hold(arguments)]
        # Before a capture of what is new, which would count against `max_shapes` beside programs that nobody
        # can call.
        if gone:
            self.counters["rebuilds"] += 1
            self._note(REPLACED)
            self._drop(gone)
            self._unread.clear()
            self._writing.clear()
            self._link()  # to nothing that was closed, whatever comes of the next capture

    def _drop(self, gone: list[Captured]) -> None:
        kept = [item for item in self._captured if not any(item is other for other in gone)]
        # One program may serve several layouts of its arguments; it closes with the last of them.
        used = {id(item.entry) for item in kept}
        for item in {id(item.entry): item for item in gone}.values():
            if item.entry is not None and id(item.entry) not in used:
                item.entry.close()
        self._captured = kept

    def _signature(self, inputs: tuple[Any, ...]) -> Any:
        """What arguments look like: calls that could not be read are known by it."""
        leaves = pytree.tree_leaves(inputs)
        # `signature` leaves strides out, by which code that could not be read may decide.
        strides = tuple(x.stride() if isinstance(x, Tensor) else None for x in leaves)
        settings = casting(), torch.is_inference_mode_enabled()
        return signature(inputs), strides, repeats_of(inputs), *settings

    def _count_eager(self, note: str) -> None:
        self.counters["eager_calls"] += 1
        self._note(note)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _serves(captured: CallReads, now: CallReads) -> bool:
    """Whether a captured program is also that of arguments that lie otherwise in memory."""
    mine, other = captured.guards, now.guards
    return (
        mine.graph == other.graph
        and captured.settings == now.settings
        and mine.places == other.places
    )


def _kind(args: tuple[Any, ...]) -> Any:
    """Structure and dtypes: what a further captured program must share with the example."""
    leaves, structure = pytree.tree_flatten(args)
    return structure, [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def _check_devices(wanted: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    for index, (old, new) in enumerate(
        zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True)
    ):
        if isinstance(old, Tensor) and old.device != new.device:
            raise BatchError(
                f"wanted argument leaf {index} on {old.device}, as in the example, got it on {new.device}; "
                f"move it there with .to({str(old.device)!r})"
            )


def _requires_gradients(inputs: tuple[Any, ...]) -> bool:
    # The common call without a nest, which is in each eager call's way.
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        return inputs[0].requires_grad
    return any(x.requires_grad for x in tensors_in(inputs))


def _closed(*_: Any) -> Any:
    raise PlanError("wanted a call of an open Hybrid, got one after close(); make another one")
