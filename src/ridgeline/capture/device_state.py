"""Whether this process can still use its GPU."""

import torch


def lost_device() -> RuntimeError | None:
    """What the GPU answers where it works for this process no more; None where it does.

    Cost: Waits for the device.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None
