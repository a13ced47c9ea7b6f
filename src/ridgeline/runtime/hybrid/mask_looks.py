"""Torch's transformers look at the values of a mask, to see if it is causal: not where no host can look.

`nn.TransformerEncoder`, `nn.TransformerDecoder` and `nn.Transformer` do so in every step, unless the caller
says `is_causal`. What they find is a hint only, which saves attention half of its work: with the mask itself,
whatever is in it, the results are the same but for rounding. A step with a look in it cannot be captured, and
torch's compiler parts it in two.
"""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import transformer

_LOOK = transformer._detect_is_causal_mask  # noqa: SLF001 - there is no public name


def spare_looks() -> None:
    """Have torch's transformers of this process look at masks only in steps that run as they are written.

    Done again, it changes nothing. It is never taken back: guards of what is compiled name the function.
    """
    transformer._detect_is_causal_mask = _detect_is_causal_mask  # noqa: SLF001


def _detect_is_causal_mask(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript reads nothing in this form of it
        if is_causal is None and _is_held():
            return False
    return _LOOK(mask, is_causal, size)


def _is_held() -> bool:
    """Whether a program is made of what runs."""
    if torch.compiler.is_compiling() or get_proxy_mode() is not None:
        return True
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a build of torch without CUDA cannot say
        return False
