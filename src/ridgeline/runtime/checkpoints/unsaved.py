"""What training changes and checkpoints do not hold: state that no `state_dict()` has.

A resumed run begins with it as the task makes it, and goes on otherwise than one that was not stopped. What
can be named exactly is: numbers and texts in attributes of modules and of the optimizer, buffers that are not
persistent, and generators of the code's own. What else code remembers (a list, a variable of a closure) is
not looked at.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.reach.generators import accessors
from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import GLOBAL_GENERATORS

_PLAIN = (bool, int, float, str)
_MOST_NAMED = 4


class Unsaved:
    """The present state that checkpoints leave out, to be compared with a later one.

    Args:
        model: The task's.
        loss_fn: Whose own generators are looked at, as the model's are.
        optimizer: The task's.

    Cost: Follows all references of model and loss function, 0.1 s for a thousand modules; copies nothing.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._before = dict(self._facts())
        drawn = [g for g in Reach(model, loss_fn).generators if g not in _shared()]
        self._generators = [(generator, _state(generator)) for generator in drawn]

    def changed(self) -> str:
        """What has changed, by name, in words; an empty text where nothing has.

        Cost: Looks at every module and buffer; waits for no device.
        """
        now = dict(self._facts())
        names = [name for name in now if self._before.get(name) != now[name]]
        for generator, state in self._generators:
            if _state(generator) != state:
                home = type(generator).__module__.partition(".")[0]
                names.append(f"a {type(generator).__name__} of {home}")
        rest = len(names) - _MOST_NAMED
        return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")

    def _facts(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):  # noqa: SLF001 - torch has no other list
                buffer = module._buffers.get(name)  # noqa: SLF001 - which may be None
                if buffer is not None:
                    where = f"{path}.{name}" if path else name
                    yield f"the buffer {where} (persistent=False)", (id(buffer), _writes(buffer))
            if _is_users(module) and type(module).get_extra_state is nn.Module.get_extra_state:
                yield from _attributes(path or type(module).__name__, module)
        optimizer = self._optimizer
        if _is_users(optimizer) and type(optimizer).state_dict is Optimizer.state_dict:
            yield from _attributes(type(optimizer).__name__, optimizer)


def unsaved_note(names: str) -> str:
    """A line for the user."""
    return (
        f"checkpoints do not hold what training changes here: {names}; a resumed run begins with these as "
        "the task makes them: keep them in buffers, a module's get_extra_state() or the optimizer's state"
    )


def _attributes(name: str, owner: object) -> Iterator[tuple[str, Any]]:
    for key, value in vars(owner).items():
        # What torch's own base classes keep has no name that code would choose.
        if isinstance(value, _PLAIN) and key != "training" and not key.startswith("_"):
            yield f"{name}.{key}", repr(value)


def _is_users(owner: object) -> bool:
    return type(owner).__module__.partition(".")[0] != "torch"


def _writes(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # noqa: SLF001 - no other way


def _shared() -> tuple[Any, ...]:
    """Generators whose state checkpoints hold."""
    return (*GLOBAL_GENERATORS, torch.default_generator, *torch.cuda.default_generators)


def _state(generator: Any) -> str:
    state = accessors(generator)[0]()
    # States hold arrays, which `==` would compare element by element.
    return str(state.tolist() if isinstance(state, Tensor) else state)
