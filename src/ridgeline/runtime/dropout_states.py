"""The memory in which cuDNN's recurrent layers draw what they drop out.

torch has one tensor for it on each GPU, which Python does not see. Whenever the GPU's generator is seeded or
its state is set, the next recurrent layer that drops something out makes another one and frees the first. A
CUDA graph goes on to write there, into what is somebody else's memory by then; so whoever captures holds it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def dropout_states(modules: Iterable[nn.Module]) -> list[Tensor]:
    """What a capture of steps through these modules is to hold as long as its graph.

    To be called right before the capture; after it nothing sets a generator until that has ended.

    Args:
        modules: All that the step may call, those inside others included.

    Returns:
        One tensor of about 2 MB for each GPU with a recurrent layer that drops something out; none without.

    Cost: Where there are such layers, one of width 1 runs on each of their GPUs. It draws from cuDNN's state,
        and from torch's generator where that was seeded since the last such layer, as the step would have.
    """
    devices = {
        parameter.device
        for module in modules
        if isinstance(module, nn.RNNBase) and module.training and module.dropout > 0.0
        for parameter in module.parameters()
        if parameter.is_cuda
    }
    return [state for device in devices if (state := _dropout_state(device)) is not None]


def _dropout_state(device: torch.device) -> Tensor | None:
    """That of one GPU; None where its recurrent layers do without cuDNN."""
    begin = torch.zeros(1, 1, 1, device=device, dtype=torch.float32)
    # The layer's weights lie in one piece of memory, without which torch warns; they need no values.
    layer = nn.LSTM(1, 1, bias=False, device="meta", dtype=torch.float32).to_empty(device=device)
    weights: list[Tensor] = [*layer.parameters()]
    with (
        DropoutStateSeen() as seen,
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        torch.lstm(begin, (begin, begin), weights, False, 1, 0.5, True, False, False)
    return seen.state


class DropoutStateSeen(TorchDispatchMode):
    """Keeps the state that the last recurrent layer of cuDNN under it was called with, in `state`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._cudnn_rnn.default:  # noqa: SLF001 - it has no public name
            self.state = args[-1]
        return func(*args, **(kwargs or {}))
