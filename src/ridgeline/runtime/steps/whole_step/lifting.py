"""Lifting: the state that a training step reads and writes, as a flat list of named tensors.

A step as one program takes everything that changes between steps as inputs: parameters, buffers, the
optimizer's state with its step counts, and learning rates. Here that state is listed, and substitutes are
put in its place while the step is traced. The tensors listed are the model's and the optimizer's own, so a
program that writes into them trains the very model, and checkpoints and schedulers continue working.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import CaptureError, PlanError
from ridgeline.programs.module_call import call_with, places
from ridgeline.runtime.steps.whole_step.rates import LearningRateInputs
from ridgeline.runtime.steps.whole_step.substitution import OptimizerSubstitution
from ridgeline.tensors.copies import overlaps
from ridgeline.tensors.entries import Change, Entries

Role = Literal["parameter", "buffer", "optimizer", "rate", "constant"]


class StateTensor(NamedTuple):
    """One lifted tensor: its name, what it is to the step, and the tensor itself (without gradient)."""

    name: str
    role: Role
    tensor: Tensor


def place_state(optimizer: Optimizer, device: torch.device) -> tuple[str, ...]:
    """Move what an optimizer's state has elsewhere (step counts) to `device`; what was moved, in words."""
    moved: set[str] = set()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[key] = value.to(device)
                moved.add(key)
    if not moved:
        return ()
    return (f"optimizer state {', '.join(sorted(moved))} was moved to {device}",)


@contextlib.contextmanager
def state_on(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Inside, all of an optimizer's state is on `device`, for a program; afterwards it is where it was.

    Some optimizers count steps on the host, where they read the counts in each step without waiting.
    """
    before = [(state, dict(state)) for state in optimizer.state.values()]
    place_state(optimizer, device)
    try:
        yield
    finally:
        for state, entries in before:
            state.update(entries)


class LiftedState:
    """The state of a model and its optimizer, listed once and substituted while tracing.

    Args:
        model: Its parameters and buffers are lifted.
        optimizer: Its learning rates and the tensors of its state are lifted; state that it does not have
            yet (before its first step) cannot be.
        device: Where the step runs.

    Attributes:
        entries: The lifted tensors, in the order of the program's inputs.
        rates: The learning rates among them.

    Raises:
        PlanError: the optimizer has a parameter that the model has not, or parameters under two names in
            two groups.
        CaptureError: a parameter or buffer is sparse.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rates = LearningRateInputs(optimizer, device)
        self._is_host = device.type == "cpu"
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._check_parameters()
        self._state_keys, self._state_constants = self._state()
        self._optimizer_entries = Entries(optimizer.state.values())
        self._parameter_entries = Entries(module._parameters for module in model.modules())  # noqa: SLF001
        self._buffer_entries = Entries(module._buffers for module in model.modules())  # noqa: SLF001
        self._originals: list[Tensor] = []
        self.entries = tuple(self._list())
        # Besides the objects: `.data =` and `set_` move a tensor to other memory while it stays the same
        # object.
        self._addresses = [*map(Tensor.data_ptr, self._originals)]

    def _state(self) -> tuple[list[tuple[Tensor, str]], dict[tuple[Tensor, str], Any]]:
        """Where the parameters' optimizer state has tensors, and what else it has: constants of a program."""
        tensors: list[tuple[Tensor, str]] = []
        constants: dict[tuple[Tensor, str], Any] = {}
        for parameter in chain(*self._groups):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.append((parameter, key))
                else:
                    constants[parameter, key] = value
        return tensors, constants

    def _check_parameters(self) -> None:
        for group in self._groups:
            for parameter in group:
                if parameter not in self._names:
                    raise PlanError(
                        "wanted every parameter of the optimizer to belong to the model, got one of shape "
                        f"{tuple(parameter.shape)} that does not; make it a parameter of the model, or use "
                        "execution='eager'"
                    )

    def _list(self) -> list[StateTensor]:
        """All entries; remembers the tensors whose addresses they share."""
        entries: list[StateTensor] = []
        roles: list[tuple[Role, Any]] = [
            ("parameter", self.model.named_parameters()),
            ("buffer", self.model.named_buffers()),
        ]
        for role, named in roles:
            for name, tensor in named:
                _require_dense(role, name, tensor)
                # Without gradients: programs write in place, which torch refuses in leaves that require some.
                entries.append(StateTensor(name, role, tensor.detach()))
                self._originals.append(tensor)
        for parameter, key in self._state_keys:
            tensor = self.optimizer.state[parameter][key]
            name = f"{self._names[parameter]}/{key}"
            entries.append(StateTensor(name, "optimizer", tensor.detach()))
        for index, tensor in enumerate(self.rates.tensors):
            entries.append(StateTensor(f"group/{index}/lr", "rate", tensor))
        return entries

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and buffers, to the name under which each is listed."""
        first = {
            id(tensor): entry.name
            for entry, tensor in zip(self.entries, self._originals, strict=False)
        }
        everywhere = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        return {name: first[id(tensor)] for name, tensor in everywhere if first[id(tensor)] != name}

    def examples(self) -> list[Tensor]:
        """The lifted tensors as tracing wants them: parameters that require gradients do so."""
        count = len(self._originals)
        return [*self._originals, *(entry.tensor for entry in self.entries[count:])]

    def tensors(self) -> list[Tensor]:
        """The model's and the optimizer's tensors that are listed."""
        return list(self._originals)

    def is_current(self) -> bool:
        """Whether the model's and the optimizer's tensors are still those listed, at their addresses.

        State that was loaded into an optimizer, and buffers that an eager step assigned again, lie in new
        tensors; they are copied into those listed, which then take their place.

        Cost: 0.1 us for each parameter and buffer, and for each entry of the optimizer's state.
        """
        groups = [group["params"] for group in self.optimizer.param_groups]
        if [*map(len, groups)] != [*map(len, self._groups)]:
            return False
        if not all(map(is_, chain(*groups), chain(*self._groups))):
            return False
        # A replaced parameter is not adopted: the optimizer would go on to update the old one.
        if not self._parameter_entries.hold():
            return False
        if not self._buffer_entries.hold() and not self._adopt_buffers():
            return False
        state = self.optimizer.state
        is_same = self._optimizer_entries.same_stores(state.values())
        if not (is_same and self._optimizer_entries.hold()) and not self._adopt_state():
            return False
        # Last, since adopting buffers puts the listed tensors back first.
        return [*map(Tensor.data_ptr, self._originals)] == self._addresses

    def _adopt_buffers(self) -> bool:
        """Copy buffers that were replaced into the listed ones; False where they do not fit these.

        Nor where other code has them, too, and may write into them later.
        """
        entries = self._buffer_entries
        changes = list(entries.changes())
        if not all(map(_is_only_there, changes)):
            return False
        shared = Counter(map(id, entries.values))
        pairs = [(change.before, change.store.get(change.key)) for change in changes]
        # All of them are checked before the first is copied: a refusal leaves the model as it was.
        if not entries.same_sizes() or not all(_fits(mine, theirs) for mine, theirs in pairs):
            return False
        if any(shared[id(mine)] > 1 for mine, _ in pairs):  # one of its names only: no longer tied
            return False
        with torch.no_grad():
            for change, (mine, theirs) in zip(changes, pairs, strict=True):
                mine.copy_(theirs)
                change.store[change.key] = mine
        return True

    def _adopt_state(self) -> bool:
        """Copy other optimizer state into the listed tensors; False where it does not fit them."""
        state = self.optimizer.state
        first = len(self._originals)
        found, constants = self._state()
        if set(found) != set(self._state_keys) or constants != self._state_constants:
            return False
        listed = [entry.tensor for entry in self.entries[first : first + len(self._state_keys)]]
        loaded = [state[p][key] for p, key in self._state_keys]
        # Not the device: loaded step counts lie on the host, from where they are moved.
        pairs = zip(listed, loaded, strict=True)
        if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
            return False
        with torch.no_grad():
            for (parameter, key), mine, theirs in zip(
                self._state_keys, listed, loaded, strict=True
            ):
                mine.copy_(theirs)
                state[parameter][key] = mine
        # `load_state_dict` has made other dictionaries, too.
        self._optimizer_entries = Entries(state.values())
        return True

    def run_substituted(self, tensors: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
        """Call `run` while `tensors` stand for the listed ones; what it replaced is written into them.

        Raises:
            CaptureError: the step keeps a count in a Python number, or makes optimizer state.
        """
        count = len(self._originals)
        of_model = dict(zip((entry.name for entry in self.entries), tensors[:count], strict=False))
        named = {f"model.{name}": tensor for name, tensor in places(self.model, of_model).items()}
        state = tensors[count : count + len(self._state_keys)]
        placed = OptimizerSubstitution(
            self.optimizer,
            {p: of_model[name] for p, name in self._names.items()},
            [(p, key, tensor) for (p, key), tensor in zip(self._state_keys, state, strict=True)],
            tensors[count + len(state) :],
            # On the host the plain update computes with step counts as Python's numbers, of 64 bits.
            widens=self._is_host,
        )
        try:
            result = call_with(_Caller(self.model), named, (run,))
            with torch.no_grad():
                # Inside the trace, so that the copies become part of the program.
                placed.write_back()
                for name, tensor in of_model.items():
                    if named[f"model.{name}"] is not tensor:  # a buffer that forward assigned again
                        tensor.copy_(named[f"model.{name}"])
        finally:
            placed.remove()
        return result


def _require_dense(role: Role, name: str, tensor: Tensor) -> None:
    """Raise for what has no memory of its own that a program could read and write."""
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise CaptureError(
            "wanted dense parameters and buffers, which one program reads and writes where they lie, got "
            f"the {role} {name!r} of layout {layout}; use execution='compiled' or 'eager'"
        )


class _Caller(nn.Module):
    """Runs any function while the tensors of the model inside are substituted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def _is_only_there(change: Change) -> bool:
    """Whether only the model has what an entry holds now, by another name or as a view."""
    held = change.store.get(change.key)
    if type(held) is not Tensor:
        return False
    # By the dictionary, the name above, and the call that counts; the memory by the tensor and that call.
    memory = held.untyped_storage()._cdata  # noqa: SLF001 - as torch's own graph trees ask
    return sys.getrefcount(held) <= 3 and torch._C._storage_Use_Count(memory) <= 2  # noqa: SLF001


def _fits(mine: Any, theirs: Any) -> bool:
    """Whether the values of one buffer can stand in the other, and none sees another layout than theirs."""
    return (
        isinstance(mine, Tensor)
        and isinstance(theirs, Tensor)
        and (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        and mine.stride() == theirs.stride()
        and not overlaps(mine)
    )
