"""Undo: whatever a step does to what it can reach is afterwards as if it had not run.

Values are put back bitwise, objects by identity: the same tensors, in the same lists, under the same names.
"""

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from ridgeline import units
from ridgeline.reach.context_variables import ContextVariables, Environment
from ridgeline.reach.generators import Generators, accessors
from ridgeline.reach.host_arrays import MOST_COMPARED_BYTES, HostArrays
from ridgeline.reach.reach import Cell, Reach, contents_of, is_leaf, kind_of
from ridgeline.reach.sparse import is_sparse, parts

_MISSING = object()
GLOBAL_GENERATORS = tuple(
    getattr(draw, "__self__", None) for draw in (random.random, numpy.random.random_sample)
)
"""What modules draw from; whose random numbers those are is said by the module."""
_OF_ALL = re.compile(r"_global_\w*(forward|backward)_(pre_)?hooks")
_MOST_BYTES = 1 << 30
"""A tensor larger than this that is neither trained nor a buffer (a data set, say) is not copied: steps do
not write into such, and a note names one that does."""


class StateChange(NamedTuple):
    """Something that holds another object than before, or a tensor with other elements: what, and both.

    Of a list that grew or shrank these are what was in it, and is; of another container how much.

    `put` puts an object there; None where that cannot be said of one place.
    """

    what: str
    before: Any
    now: Any
    put: Callable[[Any], object] | None = None


class Undo:
    """The present state of everything that can be reached from some objects, and of random numbers.

    Args:
        roots: Model, loss function, optimizer, batch.
        values: Whether tensors are copied, too; without, only what holds them.
        arrays: Whether all arrays are, where that is another answer: a trace computes with tensors without
            elements, and with the very arrays of NumPy. Without either, small ones are.
        spared: Tensors whose values (and whose gradients' values) other code keeps.
        beside: Containers of libraries, which are put back without a look into what they hold.

    Attributes:
        notes: What could not be put back.
        reached: Everything that could be reached, by its number.

    Cost: With `values`, memory for all reachable tensors and gradients; 0.1 s for a thousand modules.
    """

    def __init__(
        self,
        *roots: Any,
        values: bool = True,
        arrays: bool = False,
        spared: Iterable[Tensor] = (),
        beside: Iterable[Any] = (),
    ) -> None:
        self.notes: list[str] = []
        others = [*spared]
        # Asking a tensor that was computed for its gradient is a warning.
        kept = {id(t) for t in (*others, *(t.grad for t in others if is_leaf(t)))}
        reach = Reach(*roots, _hooks_of_all())
        self._stores = [_Store(store) for store in reach.stores]
        self._beside = [_Store(store) for store in beside if id(store) not in reach.seen]
        self._cells = [(cell, load(cell)) for cell in reach.cells]
        self._lazy = [(tensor, type(tensor)) for tensor in reach.lazy]
        leaves = [t for t in reach.tensors if is_leaf(t)]
        self._grads = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
        copied = [t for t in reach.tensors if id(t) not in kept] if values else []
        self._places = [_Place(tensor) for tensor in reach.tensors if _has_place(tensor)]
        self._tensors = [_Values(tensor) for tensor in copied]
        is_whole = values or arrays
        self._arrays = HostArrays(reach, most_bytes=math.inf if is_whole else MOST_COMPARED_BYTES)
        found = [(g, *accessors(g)) for g in reach.generators]
        self._generators = [(put, ask()) for _, ask, put in found]
        self._host_generators = [
            (type(g).__name__, ask(), ask)
            for g, ask, _ in found
            if not isinstance(g, torch.Generator) and g not in GLOBAL_GENERATORS
        ]
        self._random = Generators()
        self._context = ContextVariables(reach.seen)
        self._environment = Environment(reach.seen)
        self.reached, self._reached_tensors = reach.seen, reach.tensors
        self._memory: set[int | None] | None = None

    def has(self, value: Any) -> bool:
        """Whether a tensor, or another object, could be reached."""
        return id(value) in self.reached

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of one that could be reached, where it stays up to date."""
        if self._memory is None:
            self._memory = {*map(_memory_of, self._reached_tensors)}
        place = _memory_of(tensor)
        return place is not None and place in self._memory

    def changes(self) -> "Iterator[StateChange]":
        """Variables, entries, containers and arrays that hold something else now, and used generators."""
        for cell, value in self._cells:
            now = load(cell)
            if now is not value:
                yield StateChange(repr(cell.label), value, now, partial(store_in, cell))
        for store in self._stores:
            yield from store.changes()
        for what, before, array in self._arrays.changes():
            yield StateChange(what, before, array)
        for variable, before, now in self._context.changes():
            yield StateChange(f"the context variable {variable.name}", before, now, variable.set)
        for name, before, now in self._environment.changes():
            yield StateChange(f"os.environ[{name!r}]", before, now)
        for kind, state, ask in self._host_generators:
            now = ask()
            # States hold arrays, which `==` would compare element by element.
            if repr(now) != repr(state):
                yield StateChange(f"a {kind}", state, now)

    def value_changes(self) -> "Iterator[StateChange]":
        """Tensors whose elements are kept here and are others now; sparse ones are not looked at.

        Cost: Waits for the device, once for each tensor.
        """
        for number, values in enumerate(self._tensors):
            if (change := values.change()) is not None:
                before, now = change
                shape = tuple(before.shape)
                yield StateChange(
                    f"tensor {number} of shape {shape} outside the model", before, now
                )

    def restore(self) -> None:
        """Put everything back; may be called again."""
        for store in (*self._stores, *self._beside):
            store.restore()
        for cell, value in self._cells:
            if load(cell) is not value:
                store_in(cell, value)
        for tensor, kind in self._lazy:
            # A lazy parameter got its shape in the first call; it becomes lazy again.
            if type(tensor) is not kind:
                tensor.grad = None
                tensor.data = tensor.data.new_empty(0)
                tensor.__class__ = kind
        for place in self._places:
            place.restore()
        self._make_leaves()
        for leaf, grad, requires_grad in self._grads:
            if not is_leaf(leaf):
                continue
            if leaf.grad is not grad:
                leaf.grad = grad
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
        self.restore_values()
        for put, state in self._generators:
            put(state)
        self._random.restore()
        self._context.restore()
        self._environment.restore()

    def _make_leaves(self) -> None:
        """Have leaves be such again to which code added what it trains: `positions += moved` of a batch.

        Not views, of which torch makes none.
        """
        for leaf, _, _ in self._grads:
            if not is_leaf(leaf) and not leaf._is_view():  # noqa: SLF001 - has no public name
                leaf.detach_()

    def restore_values(self) -> None:
        """Put the elements of tensors and arrays back, and nothing else."""
        self._make_leaves()
        for values in self._tensors:
            self.notes += values.restore()
        self._arrays.restore()
        # Where the caller is inside of autocast, it keeps casts of what the weights were meanwhile.
        torch.clear_autocast_cache()


@contextlib.contextmanager
def undone(*roots: Any) -> Iterator[Undo]:
    """Whatever happens inside, what can be reached from `roots` is afterwards as it was, see `Undo`."""
    before = Undo(*roots)
    try:
        yield before
    finally:
        before.restore()


def _hooks_of_all() -> list[Any]:
    """The hooks of all modules (`register_module_forward_hook`), which each step calls."""
    kept = (hooks for name, hooks in vars(nn.modules.module).items() if _OF_ALL.fullmatch(name))
    return [hook for hooks in kept for hook in hooks.values()]


class _Store:
    """A container and what it holds; it is touched only where that has changed."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._saved = self._content()

    def restore(self) -> None:
        now = self._content()
        # By identity: equality may be the user's own code, and of tensors it is elementwise.
        if len(now) == len(self._saved) and all(
            a is b for a, b in zip(now, self._saved, strict=True)
        ):
            return
        # In place: others hold the container, and it has to be the same one afterwards. By the methods of
        # Python's own classes: those of the user's may count what is put there, or keep it elsewhere.
        kind = kind_of(self._store)
        kind.clear(self._store)
        if isinstance(self._store, dict):
            half = len(self._saved) // 2
            for key, value in zip(self._saved[:half], self._saved[half:], strict=True):
                kind.__setitem__(self._store, key, value)
        elif isinstance(self._store, set):
            set.update(self._store, self._saved)
        else:
            kind.extend(self._store, self._saved)

    def changes(self) -> "Iterator[StateChange]":
        """What in it is another now; of a container that grew or shrank nothing else."""
        now, kind = self._content(), type(self._store).__name__
        if len(now) != len(self._saved):
            what = f"the length of a {kind}"
            if isinstance(self._store, list):
                yield StateChange(what, self._saved, now, partial(_refill, self._store))
            else:
                yield StateChange(what, len(self._saved), len(now))
            return
        for index, (a, b) in enumerate(zip(now, self._saved, strict=True)):
            if a is not b:
                is_value = isinstance(self._store, dict) and index >= len(now) // 2
                key = now[index - len(now) // 2] if is_value else index
                name = repr(key) if is_value else f"an element of a {kind}"
                is_place = is_value or not isinstance(self._store, (dict, set))
                yield StateChange(
                    name, b, a, partial(put_at, self._store, key) if is_place else None
                )

    def _content(self) -> list[Any]:
        """The elements; of a dictionary all keys, then all values."""
        return contents_of(self._store)


def put_at(store: Any, key: Any, value: Any) -> None:
    """Put a value into a container, where that has such a place."""
    if isinstance(store, dict) or key < len(store):
        kind_of(store).__setitem__(store, key, value)


def _refill(store: list[Any], elements: list[Any]) -> None:
    list.__setitem__(store, slice(None), elements)


class _Place:
    """A tensor and where its elements lie: `tensor.data = ...` moves it, in a trace to no memory at all."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data = tensor, tensor.data

    def restore(self) -> None:
        now, before = self._tensor, self._data
        if (
            now.device != before.device  # asked first: what is nowhere has no address
            or now.data_ptr() != before.data_ptr()
            or (now.dtype, now.shape, now.stride()) != (before.dtype, before.shape, before.stride())
        ):
            now.data = before


def _memory_of(tensor: Tensor) -> int | None:
    """Where the elements lie; None where no single address says so."""
    return tensor.untyped_storage().data_ptr() or None if _has_place(tensor) else None


def _has_place(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own kind, and no subclass decides what `.data` is."""
    kinds = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(tensor) not in kinds or tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return tensor.device.type in ("cpu", "cuda") and not (tensor.is_quantized or tensor.is_nested)


class _Values:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no other way
        self._saved: Tensor | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []
        if _is_spared(tensor):
            return
        if is_sparse(tensor):
            self._saved = tensor.detach()  # in the same memory, which a captured graph may read
            self._parts = [(part, part.clone()) for part in parts(self._saved)]
        else:
            self._saved = tensor.detach().clone()

    def change(self) -> tuple[Tensor, Tensor] | None:
        if self._saved is None or self._parts or not has_changed(self._saved, self._tensor):
            return None
        return self._saved, self._tensor

    def restore(self) -> list[str]:
        """Write the elements back; what to say where that is not possible."""
        tensor, saved = self._tensor, self._saved
        if saved is None:
            is_same = tensor.is_inference() or tensor._version == self._version  # noqa: SLF001
            if is_same or _overlaps(tensor):
                return []
            size = units.num_bytes(tensor.numel() * tensor.element_size())
            return [f"a tensor of {size} was written by the step, and is too large to be put back"]
        with torch.no_grad():
            # Not in the tensor's own name: graphs that hold it see the values that they saw before.
            data = tensor.data
            if self._parts:
                for part, elements in self._parts:
                    part.copy_(elements)
                now = [part.data_ptr() for part in parts(tensor)]
                if now != [part.data_ptr() for part, _ in self._parts]:
                    tensor.data = saved
            elif tensor.layout is not torch.strided or data.shape != saved.shape:
                tensor.data = saved.clone()
            else:
                data.copy_(saved)
        return []


def has_changed(before: Tensor, now: Tensor) -> bool:
    """Whether two dense tensors of values differ; NaN differs from itself."""
    if before.layout is not torch.strided or now.layout is not torch.strided:
        return False
    return before.shape != now.shape or before.dtype != now.dtype or not torch.equal(before, now)


def _is_spared(tensor: Tensor) -> bool:
    """Whether a tensor is not copied: it cannot be written, or is too large and not trained."""
    if tensor.is_inference() or tensor.device.type == "meta" or _overlaps(tensor):
        return True
    is_data = not (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))
    return is_data and tensor.numel() * tensor.element_size() > _MOST_BYTES


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor: these are not written."""
    if tensor.layout is not torch.strided:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def load(cell: Cell) -> Any:
    """What a variable holds; an object of its own where there is none."""
    if type(cell.owner) is dict:  # another dictionary may have variables in slots
        return cell.owner.get(cell.name, _MISSING)
    if isinstance(cell.owner, type):
        return vars(cell.owner).get(cell.name, _MISSING)
    try:
        return getattr(cell.owner, cell.name)
    except (ValueError, AttributeError):  # a variable that is not assigned yet
        return _MISSING


def store_in(cell: Cell, value: Any) -> None:
    """Have a variable hold something else; nothing where it held nothing."""
    if type(cell.owner) is dict:
        if value is _MISSING:
            del cell.owner[cell.name]
        else:
            cell.owner[cell.name] = value
    elif value is _MISSING:
        delattr(cell.owner, cell.name)
    else:
        setattr(cell.owner, cell.name, value)
