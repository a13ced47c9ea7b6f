"""Work of a thread on tensors that the present stream of a GPU may still be computing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def after_present(tensors: Sequence[Tensor], fn: Callable[[], object]) -> Callable[[], object]:
    """A function that runs `fn` behind what is enqueued for the GPUs of these tensors, and waits for it.

    Args:
        tensors: On any devices; on CPUs there is nothing to order.
        fn: Enqueues its work on the current streams.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if not devices:
        return fn
    # Recorded here, in the caller's thread: each thread has a current stream of its own.
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def ordered() -> None:
        for event, device in zip(events, devices, strict=True):
            torch.cuda.current_stream(device).wait_event(event)
        fn()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    return ordered
