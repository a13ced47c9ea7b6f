"""The sum that a store of several workers promises."""

from torch import Tensor, float32


def total(values: list[Tensor]) -> Tensor:
    """The sum in the order of ranks; of 16 bits in float32, rounded once."""
    wide = float32 if values[0].element_size() == 2 else values[0].dtype
    summed = values[0].to(wide)
    for value in values[1:]:
        summed = summed + value.to(wide)
    return summed.to(values[0].dtype)
