"""Real tensors that a fake step meets: of other networks, of the loss, of the user's own bookkeeping.

Beside fake tensors they are taken as fake ones, but an operator that has none but them really runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ridgeline.errors import WorkloadError
from ridgeline.tracing.operators.operands import written_arguments


class ForeignWrites:
    """What operators of a fake step write into real tensors, to be taken back."""

    def __init__(self) -> None:
        # With the tensor itself, so that its `id` is given to no other one meanwhile.
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def expect(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the values of real tensors that this call is about to write.

        Cost: A copy of each, once.
        """
        for tensor in written_arguments(func, args, kwargs):
            if not isinstance(tensor, FakeTensor) and id(tensor) not in self._saved:
                # Under the modes of the trace the copy would be fake, and be recorded as an operator of the
                # step.
                with _disable_current_modes():
                    self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def take_back(self) -> None:
        """Write the values of before."""
        for tensor, values in self._saved.values():
            # By `.data`: tensors that require gradients refuse writes in place, and version counters stay.
            tensor.data.copy_(values)
        self._saved.clear()


def refuse_foreign(func: OpOverload, args: Iterable[Any], originals: Mapping[int, str]) -> None:
    """Stop before a gradient could reach a real tensor that is not the model's.

    `originals` are the names of the parameters that fake ones stand for, by their `id`.

    Raises:
        WorkloadError: names the parameter, or the shape of another tensor, and the operator.
    """
    for value in args:
        if isinstance(value, (list, tuple)):
            refuse_foreign(func, value, originals)
        elif (
            isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.requires_grad
        ):
            if id(value) in originals:
                raise WorkloadError(
                    "wanted a step that finds its parameters in the model that is passed to loss_fn, got "
                    f"{originals[id(value)]!r} in {func} by another way, where no copy of the model has "
                    "its own; use loss_fn's argument instead of the script's name for the model, and methods "
                    "instead of functions that keep a module (a lambda in __init__)"
                )
            raise WorkloadError(
                "wanted a step that trains only the model it is given, got a tensor of shape "
                f"{tuple(value.shape)} that requires grad and is not in that model, in {func}; "
                "use the model that is passed to loss_fn, make a trained loss its submodule, and freeze "
                "another network (a GAN's) with requires_grad_(False) while this step is called"
            )
