"""How a sum over workers becomes their mean without leaving its range.

Values are multiplied by a power of two before they are added up, which is exact; what that is too much is
taken back by one division of each sum. So over a power of two of workers the mean is the sum with another
exponent, and over others it is rounded once more.
"""

from typing import NamedTuple

from torch import Tensor


class Scaling(NamedTuple):
    """What is done to values before and after they are added up.

    Attributes:
        factor: What values are multiplied by before.
        excess: What the sum of scaled values must be divided by to be the mean.
    """

    factor: float
    excess: float

    @staticmethod
    def over(size: int) -> "Scaling":
        """By the power of two no less than the number of workers; over powers of two the excess is 1."""
        factor = 0.5 ** (size - 1).bit_length()
        return Scaling(factor, size * factor)

    def take_back(self, sums: Tensor) -> None:
        """Make sums of scaled values the mean, in place."""
        if self.excess != 1.0:
            sums.div_(self.excess)


UNSCALED = Scaling(1.0, 1.0)
"""For sums that are to stay sums, and where who adds up scales by itself."""
