"""Transformers look at values of a mask or of a text, to give or save something: not where no host can look.

`nn.TransformerEncoder`, `nn.TransformerDecoder` and `nn.Transformer` do so in every step, unless the caller
says `is_causal`, and so do those of the library `transformers` (before its release 5) that are given an
`attention_mask`. What they find is a hint only, which saves attention half of its work: with the mask itself,
whatever is in it, the results are the same but for rounding. Models of that library whose texts are padded
(`pad_token_id`) and come without a mask look whether to warn of that. A step with a look in it cannot be
captured, and torch's compiler parts it in two.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.modules import transformer

_LOOK = transformer._detect_is_causal_mask  # noqa: SLF001 - there is no public name
_LIBRARY = (
    "transformers.masking_utils",
    "transformers.modeling_attn_mask_utils",
    "transformers.modeling_utils",
)
_QUESTION = "is_torchdynamo_compiling"
"""What these modules ask before a look."""
_LOOKERS = {
    "_ignore_causal_mask_sdpa",
    "_prepare_4d_attention_mask_for_sdpa",
    "warn_if_padding_and_no_attention_mask",
}
"""Their functions that look if they are told no; others that ask compute otherwise if they are told yes."""
_LOOKED_AT = ("attention_mask", "padding_mask", "mask", "input_ids")
"""What these functions call the tensor that they look at."""
_is_spared = False
_is_read = False


def spare_looks() -> None:
    """Have transformers of this process, as far as they are imported, look at masks only where a host can.

    Not in captures, traces and what is compiled inside of `sparing` or `reading`; all else is as it was.

    Done again, it changes nothing. It is never taken back: guards of what is compiled name the function.
    """
    transformer._detect_is_causal_mask = _detect_is_causal_mask  # noqa: SLF001
    for module in filter(None, map(sys.modules.get, _LIBRARY)):
        asked = getattr(module, _QUESTION, None)
        if asked is not None and not hasattr(asked, "asks_of_masks"):
            setattr(module, _QUESTION, _asking(asked))


@contextlib.contextmanager
def sparing() -> Iterator[None]:
    """What torch compiles inside does not look, and is not what it compiles outside."""
    global _is_spared  # noqa: PLW0603 - compiled code asks for it
    spare_looks()
    before, _is_spared = _is_spared, True
    try:
        yield
    finally:
        _is_spared = before


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Code that torch's compiler reads inside does not look; guards of it hold outside as well."""
    global _is_read  # noqa: PLW0603 - see `_is_only_read`
    spare_looks()
    before, _is_read = _is_read, True
    try:
        yield
    finally:
        _is_read = before


def _detect_is_causal_mask(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript reads nothing in this form of it
        if is_causal is None and mask is not None and _is_held(mask):
            return False
    return _LOOK(mask, is_causal, size)


def _asking(is_compiling: Callable[[], bool]) -> Callable[[], bool]:
    """The library's question, which is answered with yes also where what is looked at is held."""

    @functools.wraps(is_compiling)
    def is_torchdynamo_compiling() -> bool:
        if torch.compiler.is_compiling() or is_compiling():
            return True
        # The question is the same everywhere in the library: who asks is seen in its frame alone.
        asker = sys._getframe(1)  # noqa: SLF001
        if asker.f_code.co_name not in _LOOKERS:
            return False
        found = map(asker.f_locals.get, _LOOKED_AT)
        return any(isinstance(tensor, Tensor) and _is_held(tensor) for tensor in found)

    is_torchdynamo_compiling.asks_of_masks = True  # type: ignore[attr-defined]
    return is_torchdynamo_compiling


def _is_held(mask: Tensor) -> bool:
    """Whether a program that does not look is made of what runs."""
    if torch.compiler.is_dynamo_compiling():
        return _is_only_read() or _is_spared
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return detect_fake_mode((mask,)) is not None or _is_captured(mask)


def _is_captured(mask: Tensor) -> bool:
    # Asked of a mask on the host, CUDA would be started where nothing else uses it.
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result
def _is_only_read() -> bool:
    # Torch's compiler calls this, and does not compare what it reads.
    return _is_read
