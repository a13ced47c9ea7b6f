"""Lifting: the state that a training step reads and writes, as a flat list of named tensors.

A step as one program takes everything that changes between steps as inputs: parameters, buffers, the
optimizer's state with its step counts, and learning rates. Here that state is listed, and substitutes are
put in its place while the step is traced. The tensors listed are the model's and the optimizer's own, so a
program that writes into them trains the very model, and checkpoints and schedulers go on working.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import PlanError
from ridgeline.runtime.hybrid.steps.substitution import OptimizerSubstitution

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


class LearningRateInputs:
    """One learning-rate tensor for each group, holding what the optimizer's groups say.

    A group's own tensor is used as it is where it lies on the device; for a float there is a tensor beside
    it, written when the float changes. The optimizer itself is left alone, so it also steps eagerly. On the
    CPU the tensor has 64 bits, as Python's numbers have.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._known: list[float | None] = []
        self.tensors: list[Tensor] = []
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.device == device:
                self.tensors.append(rate.detach())
                self._known.append(None)
            else:
                self.tensors.append(torch.tensor(float(rate), dtype=dtype, device=device))
                self._known.append(float(rate))

    def refresh(self) -> None:
        """Write learning rates that changed.

        Cost: A comparison for each group; where one changed, a fill on the device. A learning rate that is
        a tensor on another device than the model is read each time, which may wait for that device.
        """
        groups = self._optimizer.param_groups
        for index, (group, tensor) in enumerate(zip(groups, self.tensors, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                if rate.data_ptr() == tensor.data_ptr():
                    continue
                rate = float(rate)
            if rate != self._known[index]:
                tensor.fill_(rate)
                self._known[index] = rate


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
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rates = LearningRateInputs(optimizer, device)
        self._is_host = device.type == "cpu"
        self._names = {p: name for name, p in model.named_parameters()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._check_parameters()
        self._state_keys = [
            (p, key)
            for group in self._groups
            for p in group
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        ]
        self._state_dict = optimizer.state
        self._originals: list[Tensor] = []
        self.entries = tuple(self._list())

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

    def is_current(self) -> bool:
        """Whether the model's and the optimizer's tensors are still those listed, at their addresses.

        State that was loaded into an optimizer lies in new tensors; it is copied into those listed, which
        then take its place, so that it goes on from there.

        Cost: One comparison of addresses for each parameter and buffer.
        """
        groups = [group["params"] for group in self.optimizer.param_groups]
        if list(map(len, groups)) != list(map(len, self._groups)):
            return False
        if self.optimizer.state is not self._state_dict:
            if not self._adopt(self.optimizer.state):
                return False
            self._state_dict = self.optimizer.state
        for entry, original in zip(self.entries, self._originals, strict=False):
            if entry.tensor.data_ptr() != original.data_ptr():
                return False
        return True

    def _adopt(self, state: Any) -> bool:
        """Copy loaded optimizer state into the listed tensors; False where it does not fit them."""
        first = len(self._originals)
        found = {
            (p, key)
            for p, values in state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        if found != set(self._state_keys):
            return False
        listed = [entry.tensor for entry in self.entries[first : first + len(self._state_keys)]]
        loaded = [state[p][key] for p, key in self._state_keys]
        if any(a.shape != b.shape for a, b in zip(listed, loaded, strict=True)):
            return False
        with torch.no_grad():
            for (parameter, key), mine, theirs in zip(
                self._state_keys, listed, loaded, strict=True
            ):
                mine.copy_(theirs)
                state[parameter][key] = mine
        return True

    def run_substituted(self, tensors: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
        """Call `run` while `tensors` stand for the listed ones; what it replaced is written into them.

        Args:
            tensors: One for each entry, in order.
            run: One step of model and optimizer.

        Raises:
            CaptureError: the step keeps a count in a Python number, or makes optimizer state.
        """
        count = len(self._originals)
        of_model = dict(zip((entry.name for entry in self.entries), tensors[:count], strict=False))
        named = {f"model.{name}": tensor for name, tensor in of_model.items()}
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
            result = torch.func.functional_call(_Caller(self.model), named, (run,))
            with torch.no_grad():
                placed.write_back()
                for name, tensor in of_model.items():
                    if named[f"model.{name}"] is not tensor:  # a buffer that forward assigned anew
                        tensor.copy_(named[f"model.{name}"])
        finally:
            placed.remove()
        return result


class _Caller(nn.Module):
    """Runs any function while the tensors of the model inside are substituted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()
