"""Which parameters are clipped, in the order in which a script of one's own clips them."""

from torch import nn
from torch.optim import Optimizer

from ridgeline.optimizers.groups import parameters_of


class ClippedParameters:
    """Those of an optimizer, in the order of the model.

    A total norm is summed up in the order of its parameters, and an optimizer may have them in groups (with
    decay and without, by depth): scripts call `clip_grad_norm_(model.parameters(), ...)`, and other sums
    round otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._grouped: list[int] = []
        self._ordered: list[nn.Parameter] = []

    def of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of all groups: the model's in its order, then others in that of the groups.

        Cost: Under 0.1 us a parameter; the model is only walked where the groups hold others than before.
        """
        held = parameters_of(optimizer)
        grouped = [id(parameter) for parameter in held]
        if grouped != self._grouped:
            # Not by a method of that name that a model may have written anew.
            ordered = nn.Module.parameters(self._model)
            places = {id(parameter): place for place, parameter in enumerate(ordered)}
            held.sort(key=lambda parameter: places.get(id(parameter), len(places)))
            self._grouped, self._ordered = grouped, held
        return self._ordered
