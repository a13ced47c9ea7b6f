"""Where a call of a `Hybrid` goes: into a captured program that fits it, or to the program as written.

`front` is a chain of quick tests, one a captured program. What passes none of them is looked at in full: it
may fit after all (another memory layout), be worth a capture of its own, or run eagerly, counted and noted.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError, CaptureError, PackageError, PlanError
from ridgeline.plan import Execution
from ridgeline.runtime.batch import signature
from ridgeline.runtime.hybrid.calls.entry import Entry, guarded
from ridgeline.runtime.hybrid.calls.forms import capturing, without_gradients
from ridgeline.runtime.hybrid.calls.state import CallState

GRADIENTS = "calls whose arguments require gradients ran eagerly"
OTHER_KIND = "calls with arguments of another structure or dtype than the example ran eagerly"
SPECIAL = "calls with subclasses of Tensor ran eagerly"
REPLACED = "parameters, modules, hooks or objects were replaced after the capture: captured again"


class Captured(NamedTuple):
    """A captured program with the arguments and settings that it was made for."""

    entry: Entry
    args: tuple[Any, ...]
    is_unchanged: Callable[[], bool]
    is_casting: bool


class Dispatch:
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
        self.state = CallState(fn)
        self.device = _device_of(args, self.state)
        self.mode: Execution = "eager"
        self.eager = without_gradients(fn)
        self.notes: list[str] = []
        self.counters = {"eager_calls": 0, "shapes": 0, "rebuilds": 0}
        self.front: Callable[..., Any] = self._as_written
        self._max_shapes = max_shapes
        self._captured: dict[Any, Captured | None] = {}
        self._kind = _kind(args)
        self._references = self.state.references()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """With `static_io`: what the next call reads."""
        return next(c.entry.inputs for c in self._captured.values() if c is not None)

    def make(self, args: tuple[Any, ...]) -> Entry:
        """A captured program for such arguments; not yet used.

        Raises:
            CaptureError, PackageError: see `Entry`.
        """
        with self.running_code():
            return Entry(
                self.mode, self.fn, args, self.state, self.device, static_io=self.static_io
            )

    @contextlib.contextmanager
    def running_code(self) -> Iterator[None]:
        """What the function's own code changes in here, a cache say, is no reason to capture again."""
        before = self.state.contents()
        try:
            yield
        finally:
            if self.state.forget_written(before):
                self._drop()
                self._references = self.state.references()
                self._link()

    def use(self, entry: Entry | None, args: tuple[Any, ...]) -> None:
        """Send calls with such arguments to the program (None: only to the program as written)."""
        if entry is not None:
            self.counters["shapes"] += 1
            for note in (*entry.notes, *self.state.notes):
                self._note(note)
            self._references = self.state.references()
            self._captured[self._key(args)] = Captured(
                entry, args, self.state.watch(), torch.is_autocast_enabled(self.device.type)
            )
        self._link()

    def close(self) -> None:
        """Give up all captured programs; calls are errors from now on."""
        self._drop()
        self.front = _closed

    def _link(self) -> None:
        captured = [item for item in self._captured.values() if item is not None]
        if self.static_io and captured:
            self.front = captured[0].entry.call_static
            return
        self.front = self._as_written if self.mode == "eager" else self._look_closely
        for item in captured:
            self.front = guarded(*item, miss=self.front)

    def _as_written(self, *inputs: Any) -> Any:
        """Eager mode: without gradients, unless an argument asks for them."""
        if torch.is_grad_enabled() and _requires_gradients(inputs):
            return self.fn(*inputs)
        return self.eager(*inputs)

    def _look_closely(self, *inputs: Any) -> Any:
        """A call that passed no quick test."""
        if torch.is_grad_enabled() and _requires_gradients(inputs):
            self._count_eager(GRADIENTS)
            return self.fn(*inputs)
        if not self.state.refers_to(self._references):
            self._renew()
        item = self._captured_for(inputs)
        if item is None:
            with self.running_code():
                return self.eager(*inputs)
        _check_devices(item.args, inputs)
        return item.entry.run(*inputs)

    def _captured_for(self, inputs: tuple[Any, ...]) -> Captured | None:
        """The captured program for such arguments, made now if need be; None for an eager call."""
        if any(map(_is_special, pytree.tree_leaves(inputs))):
            self._count_eager(SPECIAL)
            return None
        key = self._key(inputs)
        if key not in self._captured and not self._capture(key, inputs):
            return None
        # A capture whose code changed what it reads stands under the key of what it left.
        item = self._captured.get(key) or self._captured.get(self._key(inputs))
        if item is None:
            self.counters["eager_calls"] += 1
        return item

    def _capture(self, key: Any, inputs: tuple[Any, ...]) -> bool:
        """Capture a further signature; False if this call has to run eagerly instead."""
        if _kind(inputs) != self._kind:
            self._count_eager(OTHER_KIND)
            return False
        if len(self._captured) >= self._max_shapes:
            self._count_eager(
                "calls with further shapes or settings ran eagerly: "
                f"max_shapes={self._max_shapes} are captured"
            )
            return False
        _check_devices(self.args, inputs)
        args = pytree.tree_map_only(Tensor, torch.detach, inputs)
        try:
            with capturing():
                entry = self.make(args)
        except (CaptureError, PackageError) as error:
            self._note(f"another shape or setting ran eagerly: {error}")
            self._captured[key] = None
            return True
        if not entry.comparison.is_equal:
            entry.close()
            self._note(
                f"another shape or setting ran eagerly: mode {self.mode!r} differs by "
                f"{entry.comparison.difference:.3g} in {entry.comparison.where}"
            )
            self._captured[key] = None
            return True
        self.use(entry, args)
        return True

    def _renew(self) -> None:
        """Forget what was captured around parameters, modules or hooks that are no longer the callable's."""
        self.counters["rebuilds"] += 1
        self._note(REPLACED)
        self._drop()
        self.state = CallState(self.fn)
        self._references = self.state.references()
        self._link()

    def _drop(self) -> None:
        for item in self._captured.values():
            if item is not None:
                item.entry.close()
        self._captured.clear()

    def _key(self, inputs: tuple[Any, ...]) -> Any:
        kind = self.device.type
        casting = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return signature(inputs), self.state.typed_values(), casting

    def _count_eager(self, note: str) -> None:
        self.counters["eager_calls"] += 1
        self._note(note)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


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


def _is_special(leaf: Any) -> bool:
    """Whether it is a tensor with operators of its own, which captured code would pass by."""
    return isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter)


def _requires_gradients(inputs: tuple[Any, ...]) -> bool:
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        return inputs[0].requires_grad
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(inputs))


def _device_of(args: tuple[Any, ...], state: CallState) -> torch.device:
    """The first GPU that an argument or a parameter lies on, or the CPU."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    devices = [tensor.device for tensor in (*tensors, *state.tensors())]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _closed(*_: Any) -> Any:
    raise PlanError("wanted a call of an open Hybrid, got one after close(); make another one")
