"""Which parameters are synchronised: those that require gradients when a step is made."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ridgeline.errors import WorkloadError


class Coverage:
    """The parameters of a model as they were when its step was made.

    Args:
        parameters: (name, parameter) of every parameter.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._frozen = tuple((n, p) for n, p in parameters if not p.requires_grad)
        self._known = {id(parameter) for _, parameter in parameters}

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See that all parameters of an optimizer (its `param_groups`) are among them.

        Raises:
            WorkloadError: one is not, so that every worker would train it on its own.
        """
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) not in self._known:
                    raise WorkloadError(
                        "wanted an optimizer of the model's parameters as they were when the step was made, "
                        f"got another one of shape {tuple(parameter.shape)} in group {number}, which the "
                        "workers would not exchange; make it part of the model, and the step again"
                    )

    def check_frozen(self) -> None:
        """See that those which required no gradient still do not.

        Raises:
            WorkloadError: one does.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise WorkloadError(
                    f"wanted the parameters to require gradients as when the step was made, got {name} that "
                    "does now; make the step again after unfreezing"
                )


def check_shape(name: str, now: Tensor, place: Tensor) -> None:
    """See that a parameter, or its gradient, has the shape of its place in what is exchanged.

    Raises:
        WorkloadError: it has another.
    """
    if now.shape != place.shape:
        raise WorkloadError(
            f"wanted {name} of shape {tuple(place.shape)}, as when the step was made, got "
            f"{tuple(now.shape)}; make the step again after changing shapes"
        )
