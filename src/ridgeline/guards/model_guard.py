"""What a captured or traced step takes for granted of its model: modules, parameters, and their flags."""

from operator import attrgetter

import torch
from torch import nn

from ridgeline.errors import ObstacleError
from ridgeline.tensors.entries import Entries
from ridgeline.tensors.sameness import Sameness

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


class ModelGuard:
    """Whether a model is still made of the same modules and parameters, with the same flags.

    Args:
        roots: The model, and other networks that the step uses.

    Attributes:
        modules: All modules, each once.
    """

    def __init__(self, *roots: nn.Module) -> None:
        # Each once, as several roots may share modules, and every entry costs each step.
        self.modules = list(dict.fromkeys(part for root in roots for part in root.modules()))
        self._parameters = [p for root in roots for p in root.parameters()]
        self._children = Entries(module._modules for module in self.modules)  # noqa: SLF001
        self._own = Entries(module._parameters for module in self.modules)  # noqa: SLF001
        self._training = [*map(_training, self.modules)]
        self._trainable = [*map(_requires_grad, self._parameters)]

    def changed(self) -> str | None:
        """What is another now, in words; None while nothing is.

        Cost: 0.1 us for each module and each parameter.
        """
        if not self._children.hold():
            return "a module was replaced"
        if not self._own.hold():
            return "a parameter was replaced"
        if [*map(_training, self.modules)] != self._training:
            return "a training flag changed"
        if [*map(_requires_grad, self._parameters)] != self._trainable:
            return "parameters were frozen or released"
        return None

    def require(self, same: Sameness) -> None:
        """Add all of that, as it is now, to what has to stay the same."""
        for module in self.modules:
            same.entries(module._modules)  # noqa: SLF001
            same.entries(module._parameters)  # noqa: SLF001
            same.entry(vars(module), "training")  # a module looks its attributes up slowly
        for parameter in self._parameters:
            same.attribute(parameter, "requires_grad")


def check_scripted(model: nn.Module) -> None:
    """Refuse modules of TorchScript: what they hold is out of Python's sight, and cannot be compared.

    Raises:
        ObstacleError: names the first.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            place = f"in {name!r}" if name else "as the model"
            raise ObstacleError(
                f"wanted modules of Python, got one of TorchScript {place}, whose parameters cannot be "
                "watched; give the module that it was made from, or use execution='compiled' or 'eager'"
            )
