"""What becomes of a sum that was pushed: it replaces the value, or an updater works it in.

An updater is a function of (key, sum, value) that changes the value in place, registered under a name:
names travel to servers and into files, code never does. An optimizer of torch is one, made by its name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ridgeline.errors import KVStoreError, first_line
from ridgeline.optimizer_forms import BY_ELEMENT
from ridgeline.runtime.kvstore.arguments import Key

UpdaterFunction = Callable[[Key, Tensor, Tensor], None]

_REGISTERED: dict[str, UpdaterFunction] = {}
_OPTIMIZERS = {
    name.lower(): made
    for name, made in vars(torch.optim).items()
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    if made is not torch.optim.Optimizer and name != "LBFGS"
}
"""Optimizers by lower-case name; LBFGS is none, for it evaluates the loss again."""
_SHOWN = (bool, int, float, str, tuple, Tensor, type(None))
_ANY = torch.zeros(1, 1, device="cpu")
"""A parameter for an optimizer that updates none yet."""


class FunctionUpdater:
    """A registered function; what it remembers is its own affair.

    Args:
        name: That it is registered under.

    Attributes:
        by_element: Whether a part of a value is updated as it is within the whole, so that values may be
            divided among workers or servers.

    Raises:
        KVStoreError: it is not registered in this process.
    """

    by_element = False

    def __init__(self, name: str) -> None:
        self.name = name
        if name not in _REGISTERED:
            raise KVStoreError(
                f"wanted a registered updater, got {name!r}; call "
                f"rl.kvstore.register_updater({name!r}, function) in every process first"
            )
        self._function = _REGISTERED[name]

    def __call__(self, key: Key, total: Tensor, value: Tensor) -> None:
        """As the function does it.

        Raises:
            KVStoreError: it fails.
        """
        try:
            with torch.no_grad():
                self._function(key, total, value)
        except Exception as error:
            raise KVStoreError(
                f"wanted updater {self.name!r} to update key {key!r}, got {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def description(self) -> str:
        """What updates, to be compared with that of other workers."""
        return f"by updater {self.name!r}"

    def state(self) -> dict[Key, dict[str, Tensor]]:
        """None that is known."""
        return {}

    def load_state(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """There is nothing to do, or to keep it in.

        Raises:
            KVStoreError: always.
        """
        raise KVStoreError(
            f"wanted an optimizer to take the state of key {key!r}, got an updater function, which keeps "
            "none; call set_optimizer first"
        )


class SetOptimizer(
    msgspec.Struct, frozen=True, array_like=True, tag="set_optimizer", forbid_unknown_fields=True
):
    """An optimizer of torch by name: what an updater is made of, and what servers are sent to make one.

    Attributes:
        name: Of the class in `torch.optim`, in letters of any case: `sgd`, `AdamW`.
        rescale: What sums are multiplied by first, such as one over the number of samples.
        settings: Arguments of the class, such as `lr`.
        by_key: Arguments of the class for keys that have others.
    """

    name: str
    rescale: float
    settings: dict[str, Any]
    by_key: dict[Key, dict[str, Any]] = {}

    def of(self, key: Key) -> Mapping[str, Any]:
        """The arguments of the class for a key."""
        return self.by_key.get(key, self.settings)


class OptimizerUpdater:
    """An optimizer of torch for each key, which takes the sum as the gradient.

    Attributes:
        wanted: Its name, in small letters, and its settings.
        by_element: As of `FunctionUpdater`.

    Raises:
        KVStoreError: torch has no such optimizer, or it refuses the settings.
    """

    def __init__(self, wanted: SetOptimizer) -> None:
        name, rescale = wanted.name, wanted.rescale
        made = _OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
        if made is None:
            raise KVStoreError(
                f"wanted the name of an optimizer in torch.optim, got {name!r}; for example 'sgd', 'adam'; "
                f"there are {', '.join(sorted(_OPTIMIZERS))}"
            )
        if not isinstance(rescale, int | float) or not math.isfinite(rescale):
            raise KVStoreError(f"wanted a finite rescale_grad, got {rescale!r}")
        self.wanted = msgspec.structs.replace(wanted, name=name.lower(), rescale=float(rescale))
        self._made = made
        self._optimizers: dict[Key, torch.optim.Optimizer] = {}
        self.by_element = made.__name__ in BY_ELEMENT
        # Settings are refused here, to who sets them, and not at the first push.
        for one in _distinct([wanted.settings, *wanted.by_key.values()]):
            # On a matrix, since some optimizers refuse parameters of one dimension.
            self._make(nn.Parameter(_ANY), one)

    def __call__(self, key: Key, total: Tensor, value: Tensor) -> None:
        """One step, with the sum as the gradient of the value.

        Raises:
            KVStoreError: the optimizer takes no sparse gradients, or fails.
        """
        try:
            self._step(self._of(key, value), total, value)
        # Whatever it raises, as of a function: workers who serve other keys wait for the outcome.
        except Exception as error:
            raise KVStoreError(
                f"wanted {self._made.__name__} to update key {key!r} by a "
                f"{'sparse' if total.is_sparse else 'dense'} gradient, got {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def description(self) -> str:
        """See `FunctionUpdater`; with the settings."""
        wanted = self.wanted
        groups = [wanted.settings, *wanted.by_key.values()]
        # Other objects show where they are in memory.
        shown = [{n: v if isinstance(v, _SHOWN) else type(v) for n, v in g.items()} for g in groups]
        return f"by {wanted.name} {', '.join(map(str, shown))}, rescale_grad={wanted.rescale}"

    def with_settings_of(self, other: "OptimizerUpdater") -> None:
        """Continue with the settings of another one of the same name; what is remembered stays."""
        self.wanted = other.wanted
        # Each kind of settings once: making an optimizer costs more than a small update, and keys are many.
        made: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
        for key, optimizer in self._optimizers.items():
            own = self.wanted.of(key)
            fresh = next((group for known, group in made if known == own), None)
            if fresh is None:
                fresh = self._make(nn.Parameter(_ANY), own).param_groups[0]
                made.append((own, fresh))
            optimizer.param_groups[0] = {**fresh, "params": optimizer.param_groups[0]["params"]}

    def another(self) -> "OptimizerUpdater":
        """One like this, which remembers nothing."""
        return OptimizerUpdater(self.wanted)

    def state(self) -> dict[Key, dict[str, Tensor]]:
        """Momenta and the like of each key that was updated; whole numbers as tensors, see `as_tensor`.

        Raises:
            KVStoreError: the optimizer keeps something that is no tensor.
        """
        found = {}
        for key, optimizer in self._optimizers.items():
            (parameter,) = optimizer.param_groups[0]["params"]
            known = optimizer.state[parameter].items()
            state = {n: as_tensor(v) for n, v in known if v is not None}
            other = next((n for n, v in state.items() if not isinstance(v, Tensor)), None)
            if other is not None:
                raise KVStoreError(
                    f"wanted state of tensors to save, got {type(state[other]).__name__} in {other!r} of "
                    f"{self._made.__name__}; use another optimizer"
                )
            found[key] = state
        return found

    def load_state(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """Remember this; the value itself is given with the next update."""
        like = next((t for t in state.values() if t.ndim), _ANY)
        optimizer = self._of(key, torch.empty_like(like))
        (parameter,) = optimizer.param_groups[0]["params"]
        kept = {name: as_number(tensor) for name, tensor in state.items()}
        optimizer.state[parameter] = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in kept.items()
        }

    def _step(self, optimizer: torch.optim.Optimizer, total: Tensor, value: Tensor) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        # The value may have moved to another device, or be a copy that was put back.
        if parameter.data_ptr() != value.data_ptr():
            parameter.data = value
        parameter.grad = total if self.wanted.rescale == 1.0 else total * self.wanted.rescale
        try:
            optimizer.step()
        finally:
            parameter.grad = None

    def _of(self, key: Key, value: Tensor) -> torch.optim.Optimizer:
        if key not in self._optimizers:
            parameter = nn.Parameter(value, requires_grad=True)
            self._optimizers[key] = self._make(parameter, self.wanted.of(key))
        return self._optimizers[key]

    def _make(self, parameter: nn.Parameter, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        try:
            return self._made([parameter], **settings)
        except (TypeError, ValueError, RuntimeError) as error:
            raise KVStoreError(
                f"wanted settings of torch.optim.{self._made.__name__}, got {first_line(error)}"
            ) from error


Updater = FunctionUpdater | OptimizerUpdater
"""Works sums into the parts of values that one place holds."""


def _distinct(settings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each once; they may hold what has no hash."""
    found: list[Mapping[str, Any]] = []
    for one in settings:
        if one not in found:
            found.append(one)
    return found


def as_tensor(value: Any) -> Any:
    """A whole number, such as a count of steps, as a tensor of int64: no optimizer of torch has one."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return torch.tensor(value, dtype=torch.int64, device="cpu") if is_number else value


def as_number(tensor: Tensor) -> Tensor | int:
    """What `as_tensor` was given."""
    is_number = tensor.dtype == torch.int64 and not tensor.ndim
    return int(tensor) if is_number else tensor


def register_updater(name: str, function: UpdaterFunction) -> None:
    """Make a function known as an updater.

    Args:
        name: What `KVStore.set_updater` is given. A name is registered once, unless by the same function.
        function: Of (key, sum, value); changes the value in place. It may be called in any thread, for
            different keys at a time.

    Raises:
        KVStoreError: the name is taken or no text, or the function cannot be called.

    Example:
        >>> register_updater("add", lambda key, total, value: value.add_(total))
    """
    if not isinstance(name, str) or not name or not callable(function):
        raise KVStoreError(f"wanted a name and a function to register, got {name!r}, {function!r}")
    if _REGISTERED.setdefault(name, function) is not function:
        raise KVStoreError(f"wanted a new name for an updater, got {name!r}, which is registered")
