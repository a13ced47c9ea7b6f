"""Lifting: the state that a training step reads and writes, as a flat list of named tensors.

A step as one program takes everything that changes between steps as inputs: parameters, buffers, the
optimizer's state with its step counts, and learning rates. Here that state is listed, and substitutes are
put in its place while the step is traced. The tensors listed are the model's and the optimizer's own, so a
program that writes into them trains the very model, and checkpoints and schedulers continue working.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import CaptureError, EquivalenceError, PlanError
from ridgeline.programs.module_call import Setter, call_with, places, setters_of, standing_in
from ridgeline.reach.reach import Reach
from ridgeline.runtime.steps.checks.allowed_gaps import few
from ridgeline.runtime.steps.whole_step.exchange import StateExchange, are_possible
from ridgeline.runtime.steps.whole_step.rates import LearningRateInputs
from ridgeline.runtime.steps.whole_step.substitution import OptimizerSubstitution
from ridgeline.tensors.entries import Entries

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
        loss_fn: Of its parameters those that the optimizer holds are lifted, too.

    Attributes:
        entries: The lifted tensors, in the order of the program's inputs.
        rates: The learning rates among them.

    Raises:
        PlanError: the optimizer has a parameter that neither the model nor the loss function has, or
            parameters under two names in two groups.
        CaptureError: a parameter or buffer is sparse.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rates = LearningRateInputs(optimizer, device)
        self._is_host = device.type == "cpu"
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._outside = self._found_in(loss_fn)
        self._state_keys, self._state_constants = self._state()
        self._optimizer_entries = Entries(optimizer.state.values())
        self._parameter_entries = Entries(module._parameters for module in model.modules())  # noqa: SLF001
        self._buffer_entries = Entries(module._buffers for module in model.modules())  # noqa: SLF001
        self._originals: list[Tensor] = []
        self._held_state = [optimizer.state[parameter][key] for parameter, key in self._state_keys]
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

    def _found_in(
        self, loss_fn: Callable[..., Any] | None
    ) -> dict[str, tuple[Tensor, list[Setter]]]:
        """The optimizer's parameters that the model has not, by name, and where the loss function does."""
        others = [p for p in chain(*self._groups) if p not in self._names]
        reach = Reach(*([loss_fn] if others and loss_fn is not None else []))
        found: dict[str, tuple[Tensor, list[Setter]]] = {}
        for number, parameter in enumerate(others):
            name = self._names[parameter] = f"loss/{number}"
            found[name] = parameter, setters_of(parameter, reach)
            if not found[name][1]:
                raise PlanError(
                    "wanted every parameter of the optimizer in the model, or where the loss function finds "
                    f"it (a module, an attribute, a variable), got one of shape {tuple(parameter.shape)} "
                    "that is in neither; make it a parameter of the model, or use execution='eager'"
                )
        return found

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that are listed, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def _list(self) -> list[StateTensor]:
        """All entries; remembers the tensors whose addresses they share."""
        entries: list[StateTensor] = []
        roles: list[tuple[Role, Any]] = [
            ("parameter", self.parameters().items()),
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
            _require_dense("optimizer", name, tensor)
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

    @contextlib.contextmanager
    def naming_untrained(self, state: Sequence[StateTensor]) -> Iterator[None]:
        """Inside, a comparison that fails names parameters that a program with this state does not train.

        Code may find them otherwise than by their modules. What stands in for them while the step is traced
        is not there, so that the program reads their values, and has no gradients of them.
        """
        try:
            yield
        except EquivalenceError as error:
            read = {entry.tensor.data_ptr() for entry in state if entry.role == "constant"}
            found = [n for p, n in self._names.items() if p.requires_grad and p.data_ptr() in read]
            if not found:
                raise
            raise EquivalenceError(
                "wanted trained parameters that the code reads as attributes of their modules, got "
                f"{few(found)}, which it also finds elsewhere (in a list, or an object that is no module), "
                "where one program has no gradients of them; read them by their names in the module "
                "(nn.ParameterList holds several), or use execution='compiled' or 'eager'"
            ) from error

    def is_current(self, *, is_check: bool = False) -> bool:
        """Whether the model's and the optimizer's tensors are still those listed, at their addresses.

        State that was loaded into an optimizer, and buffers that an eager step assigned again, lie in new
        tensors; they are moved to where those listed lie, see `StateExchange`. In a check, which puts back
        what it has found, their values are.

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
        if not self._buffer_entries.hold() and not self._adopt_buffers(is_check):
            return False
        state = self.optimizer.state
        is_same = self._optimizer_entries.same_stores(state.values())
        if not (is_same and self._optimizer_entries.hold()) and not self._adopt_state(is_check):
            return False
        # Last, since adopting buffers puts the listed tensors back first.
        return [*map(Tensor.data_ptr, self._originals)] == self._addresses

    def _adopt_buffers(self, is_check: bool) -> bool:
        """Move buffers that were replaced to where the listed ones lie; False where they do not fit these."""
        entries = self._buffer_entries
        changes = list(entries.changes())
        shared = Counter(map(id, entries.values))
        # One of its names only: no longer tied.
        if not entries.same_sizes() or any(shared[id(change.before)] > 1 for change in changes):
            return False
        numbers = {id(tensor): number for number, tensor in enumerate(self._originals)}
        found = [numbers.get(id(change.before), -1) for change in changes]
        if -1 in found or any(change.store[change.key] is None for change in changes):
            return False
        exchanges = [
            StateExchange(self.entries[number].tensor, change.before, change.store[change.key])
            for number, change in zip(found, changes, strict=True)
        ]
        if not are_possible(exchanges, is_check=is_check) or any(
            e.now.device != e.place.device for e in exchanges
        ):
            return False
        for number, change, exchange in zip(found, changes, exchanges, strict=True):
            stands = exchange.carry_out(is_check=is_check)
            change.store[change.key] = self._originals[number] = stands
        self._buffer_entries = Entries(module._buffers for module in self.model.modules())  # noqa: SLF001
        return True

    def _adopt_state(self, is_check: bool) -> bool:
        """Move other optimizer state to where the listed tensors lie; False where it does not fit them."""
        state = self.optimizer.state
        found, constants = self._state()
        if set(found) != set(self._state_keys) or constants != self._state_constants:
            return False
        first = len(self._originals)
        listed = self.entries[first : first + len(self._state_keys)]
        now = [state[parameter][key] for parameter, key in self._state_keys]
        threes = zip(listed, self._held_state, now, strict=True)
        exchanges = [StateExchange(entry.tensor, before, new) for entry, before, new in threes]
        needed = [one for one in exchanges if one.is_needed]
        if not are_possible(needed, is_check=is_check):
            return False
        for (parameter, key), exchange in zip(self._state_keys, exchanges, strict=True):
            if exchange.is_needed:
                state[parameter][key] = exchange.carry_out(is_check=is_check)
        # `load_state_dict` has made other dictionaries, too.
        self._optimizer_entries = Entries(state.values())
        self._held_state = [state[parameter][key] for parameter, key in self._state_keys]
        return True

    def run_substituted(self, tensors: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
        """Call `run` while `tensors` stand for the listed ones; what it replaced is written into them.

        Raises:
            CaptureError: the step keeps a count in a Python number, or makes optimizer state.
        """
        count = len(self._originals)
        listed = dict(zip((entry.name for entry in self.entries), tensors[:count], strict=False))
        of_model = {name: one for name, one in listed.items() if name not in self._outside}
        named = {f"model.{name}": tensor for name, tensor in places(self.model, of_model).items()}
        state = tensors[count : count + len(self._state_keys)]
        placed = OptimizerSubstitution(
            self.optimizer,
            {p: listed[name] for p, name in self._names.items()},
            [(p, key, tensor) for (p, key), tensor in zip(self._state_keys, state, strict=True)],
            tensors[count + len(state) :],
            # On the host the plain update computes with step counts as Python's numbers, of 64 bits.
            widens=self._is_host,
        )
        try:
            with contextlib.ExitStack() as beside:
                for name, (parameter, setters) in self._outside.items():
                    beside.enter_context(standing_in(setters, listed[name], parameter))
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
        what = "optimizer state" if role == "optimizer" else role
        raise CaptureError(
            "wanted dense parameters, buffers and optimizer state, which one program reads and writes where "
            f"they lie, got {what} {name!r} of layout {layout}; use execution='compiled' or 'eager'"
        )


class _Caller(nn.Module):
    """Runs any function while the tensors of the model inside are substituted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()
