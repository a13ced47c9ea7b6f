"""What asserts something: pytest writes assertions in files of tests anew, and not in this one."""

from typing import Any

from torch import Tensor, nn


class Net(nn.Module):
    """Refuses large inputs, and other widths than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Of a linear layer."""
        assert x.shape[1] == 4
        assert x.max() < 100, "too large"
        return self.linear(x)


def checked(x: Any) -> Any:
    """Asserts something about values."""
    assert x.max() < 100
    return x * 2


def sized(x: Any) -> Any:
    """Asserts something about a shape."""
    assert x.shape[1] == 4
    return x * 2
