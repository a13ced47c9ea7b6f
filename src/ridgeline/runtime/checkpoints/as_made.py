"""What a run trains with, as its task made it: saved with the run, and compared when it is continued.

`Optimizer.load_state_dict` takes the state and the settings of any other optimizer with as many parameters.
Of another class it fails steps later, by a missing key, or goes on with what the new one does not read;
another learning rate is replaced by the old one; and state of parameters in another order belongs to others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError

_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Settings that choose a form of the same update."""
_ADVICE = "continue with the task as it was, or train into another run directory"


class AsMade(Value, frozen=True, kw_only=True):
    """An optimizer before its first step.

    Attributes:
        optimizer: Its class.
        settings: What its constructor was given for all groups, as text; those that change no value left out.
        parameters: Names of its parameters in the model, in its order; empty for one that is elsewhere.
    """

    optimizer: str
    settings: dict[str, str]
    parameters: tuple[str, ...]


def as_made(model: nn.Module, optimizer: Optimizer) -> AsMade:
    """What is to be equal where the run continues."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return AsMade(
        optimizer=type(optimizer).__name__,
        settings={
            name: _text(value)
            for name, value in optimizer.defaults.items()
            if name not in _HOW and _is_plain(value)
        },
        parameters=tuple(
            names.get(id(parameter), "")
            for group in optimizer.param_groups
            for parameter in group["params"]
        ),
    )


def check_same(mine: AsMade, saved: AsMade, path: Path) -> None:
    """Refuse to continue with another optimizer.

    Raises:
        CheckpointError: its class is another one, or a setting, or the order of its parameters.
    """
    if mine.optimizer != saved.optimizer:
        raise _other("optimizer", mine.optimizer, saved.optimizer, path)
    for name in sorted(mine.settings.keys() & saved.settings.keys()):
        if mine.settings[name] != saved.settings[name]:
            raise _other(
                f"{name} of the optimizer", mine.settings[name], saved.settings[name], path
            )
    for number, (one, other) in enumerate(zip(mine.parameters, saved.parameters, strict=False)):
        if one != other:
            what = f"parameter {number} of the optimizer"
            raise _other(what, one or "none of the model", other or "none of the model", path)


def in_form_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A saved state whose groups choose the form of the update that the optimizer has now.

    Those of the checkpoint would stay in force: the form of another plan, or of the task before it changed.
    """
    groups = state.get("param_groups", ())
    if len(groups) != len(optimizer.param_groups):
        return state  # which torch refuses, or a form of the optimizer's own
    formed = [
        {key: mine[key] if key in _HOW and key in mine else value for key, value in saved.items()}
        for saved, mine in zip(groups, optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": formed}


def check_dtypes(model: nn.Module, saved: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue in another precision: loading would round every value, or widen what was rounded.

    Raises:
        CheckpointError: a parameter or buffer is of another dtype.
    """
    for name, tensor in model.state_dict().items():
        other = saved.get(name)
        if isinstance(tensor, Tensor) and isinstance(other, Tensor) and tensor.dtype != other.dtype:
            raise _other(f"dtype of {name}", _dtype(tensor), _dtype(other), path)


def _other(what: str, mine: str, saved: str, path: Path) -> CheckpointError:
    return CheckpointError(
        f"wanted to continue with {mine} as {what}, got a checkpoint with {saved} in {path}; {_ADVICE}"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str)


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(item) for item in value)})"
    return str(value.item() if isinstance(value, Tensor) else value)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
