"""An optimizer's `state` that is told of who looks into it between two steps.

Some synchronizers keep elsewhere what an optimizer remembers (a store, the parts of other workers), or
update it later. A script that looks into `optimizer.state` would find nothing there, or what is old, and
would write into nothing: `state.clear()`, `state[parameter]["exp_avg"].zero_()`. Another step with the same
optimizer would begin anew beside it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import WorkloadError


class Look(Protocol):
    """Hears of a look into a state, before it; may refuse."""

    def __call__(self, key: Any, *, writes: bool = False) -> None:
        """An entry is looked at.

        Args:
            key: Of the entry; None: all are.
            writes: It is set, whatever it was.
        """


class WatchedState(defaultdict[Tensor, Any]):
    """Calls `look` before an entry is missed, asked for, set or removed, and before all are.

    An entry that is there is read by its key at no cost, as optimizers do in their steps.

    Args:
        state: Its entries are taken.
        look: Told of each look.
    """

    def __init__(self, state: Mapping[Tensor, Any], look: Look) -> None:
        super().__init__(dict, state)
        self.look = look

    def __missing__(self, key: Any) -> Any:
        """See `defaultdict`; `look` may have put it there."""
        self.look(key)
        return self[key] if dict.__contains__(self, key) else super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """See `dict`."""
        self.look(key, writes=True)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        """Copies are plain."""
        return defaultdict, (dict, dict(self.items()))

    def copy(self) -> Any:
        """See `dict`; plain."""
        return defaultdict(dict, self.items())

    __copy__ = copy


def _heard(name: str, *, of_all: bool) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def heard(state: WatchedState, *arguments: Any, **named: Any) -> Any:
        state.look(None if of_all else arguments[0])
        return plain(state, *arguments, **named)

    heard.__name__, heard.__doc__ = name, "See `dict`."
    return heard


for _name in ("__contains__", "__delitem__", "get", "pop", "setdefault"):
    setattr(WatchedState, _name, _heard(_name, of_all=False))
for _name in ("__iter__", "__len__", "clear", "items", "keys", "popitem", "update", "values"):
    setattr(WatchedState, _name, _heard(_name, of_all=True))


def watch_state(optimizer: Optimizer, look: Look) -> None:
    """Have `look` told of who looks into an optimizer's state from here on, whatever was loaded meanwhile."""
    state = optimizer.state
    if not isinstance(state, WatchedState) or state.look != look:
        # As they are: another step's watch may be here, and is not to hear of this.
        optimizer.state = WatchedState(dict(dict.items(state)), look)


def unwatch_state(optimizer: Optimizer, look: Look) -> None:
    """Nobody is told any more, unless another watches by now."""
    state = optimizer.state
    if isinstance(state, WatchedState) and state.look == look:
        optimizer.state = defaultdict(dict, dict.items(state))


def state_elsewhere(optimizer: Optimizer, where: str) -> WorkloadError:
    """What is raised where somebody looks for what an optimizer remembers, and it is elsewhere."""
    return WorkloadError(
        f"wanted what {type(optimizer).__name__} remembers of its parameters, got an optimizer whose state "
        f"is {where}: read it by step.optimizer_state(), write it by load_state_dict() on all workers, and "
        "train by one step with this optimizer, which may add up losses"
    )
