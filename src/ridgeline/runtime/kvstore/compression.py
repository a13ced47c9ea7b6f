"""Gradients pushed in fewer bits, with what that left out added to the next push.

`bf16` and `int8` are the codecs of gradient synchronisation; `1bit` and `2bit` are those of MXNet, whose
values are +-1, and +-threshold or zero.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014 (1bit, and error feedback);
MXNet, docs/faq/gradient_compression.md (2bit).
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.sync.codecs.bfloat16 import BFloat16
from ridgeline.runtime.sync.codecs.blocks import Int8
from ridgeline.runtime.sync.codecs.exchanges import Parts, RowCodec

INT8_BLOCK = 256


class OneBit(RowCodec):
    """+1 where an element is above the threshold, else -1; eight of them a byte."""

    def encode(self, rows: Tensor) -> Parts:
        """Bytes [rows, elements / 8]."""
        return (_packed((rows > float(self.options["threshold"])).to(torch.uint8), 1),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """+1 or -1."""
        return _unpacked(parts[0], 1, num_elements).float() * 2.0 - 1.0


class TwoBit(RowCodec):
    """The threshold with its sign where an element reaches it, else zero; four of them a byte."""

    def encode(self, rows: Tensor) -> Parts:
        """Bytes [rows, elements / 4]: 0 for zero, 1 for above, 2 for below."""
        threshold = float(self.options["threshold"])
        above, below = (rows >= threshold).to(torch.uint8), (rows <= -threshold).to(torch.uint8)
        return (_packed(above + 2 * below, 2),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """+-threshold or zero."""
        signs = _unpacked(parts[0], 2, num_elements)
        return ((signs == 1).float() - (signs == 2).float()) * float(self.options["threshold"])


def _packed(codes: Tensor, bits: int) -> Tensor:
    """[rows, elements] of small numbers, several a byte, the first in the lowest bits."""
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded.view(len(codes), -1, each) << shifts).sum(2, dtype=torch.uint8)


def _unpacked(coded: Tensor, bits: int, num_elements: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=coded.device)
    codes = (coded[:, :, None] >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :num_elements]


_CODECS: dict[str, tuple[Callable[[Mapping[str, Any]], RowCodec], dict[str, float]]] = {
    "1bit": (OneBit, {"threshold": 0.0}),
    "2bit": (TwoBit, {"threshold": 0.5}),
    "bf16": (BFloat16, {}),
    "int8": (Int8, {}),
}
"""Name to the codec and the options that it may be given, with their defaults."""


class KeyedCompression:
    """A codec with what it left out so far, by key and place.

    Args:
        params: `type` and its options, as MXNet has them: `{"type": "2bit", "threshold": 0.5}`.

    Raises:
        KVStoreError: an unknown type or option, or a threshold that makes no sense.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.name = params.get("type", "") if isinstance(params, Mapping) else ""
        if not isinstance(self.name, str) or self.name not in _CODECS:
            raise KVStoreError(
                f"wanted {{'type': ...}} of {', '.join(_CODECS)} to compress gradients, got {params!r}"
            )
        made, defaults = _CODECS[self.name]
        given = {name: value for name, value in params.items() if name != "type"}
        if not given.keys() <= defaults.keys():
            raise KVStoreError(
                f"wanted the options of {self.name!r} ({', '.join(defaults) or 'none'}), got "
                f"{', '.join(map(repr, given))}"
            )
        self.options = {**defaults, **given}
        # 2bit sends the threshold itself: with zero nothing would ever be sent.
        least = 0.0 if self.name == "1bit" else 1e-30
        threshold = self.options.get("threshold", 1.0)
        if not isinstance(threshold, int | float) or not least <= threshold < math.inf:
            raise KVStoreError(f"wanted a positive, finite threshold, got {threshold!r}")
        self._codec = made({**self.options, "block": INT8_BLOCK})
        self._residuals: dict[Hashable, Tensor] = {}

    def encode(self, place: Hashable, values: Tensor) -> Tensor:
        """The bytes to send for flat values, what was left out before included.

        Args:
            place: What is left out is kept under this: a key, and which part or device of it.
            values: Float of any width, flat.
        """
        if not len(values):
            return values.new_empty(0, dtype=torch.uint8)
        rows = values.float()
        # In float32, whatever the values are: what is left out is often below what 16 bits can show.
        if place in self._residuals:
            rows = rows + self._residuals[place]
        (coded,) = self._codec.encode(self._whole(rows)[None])
        # By decoding what is sent, so that also what rounding loses is part of the next push.
        sent = self._codec.decode((coded,), self._padded(len(rows)))[0, : len(rows)]
        # One overflow would stay for ever otherwise.
        self._residuals[place] = (rows - sent).nan_to_num_(0.0, 0.0, 0.0)
        return coded.view(torch.uint8).view(-1)

    def decode(self, coded: Tensor, num_elements: int) -> Tensor:
        """float32 [elements] of what `encode` gave."""
        if not num_elements:
            return coded.new_empty(0, dtype=torch.float32)
        dtype = torch.bfloat16 if self.name == "bf16" else torch.uint8
        # In memory of its own: a part of a message need not be aligned.
        row = coded.clone().view(dtype)[None]
        return self._codec.decode((row,), self._padded(num_elements))[0, :num_elements]

    def num_bytes(self, num_elements: int) -> int:
        """What `encode` gives for so many elements."""
        padded = self._padded(num_elements)
        blocks = 4 * -(-padded // INT8_BLOCK)
        of = {"1bit": -(-padded // 8), "2bit": -(-padded // 4), "bf16": 2 * padded}
        return of.get(self.name, padded + blocks)

    def passed(self, place: Hashable, values: Tensor) -> Tensor:
        """What arrives of values of any shape that are sent."""
        coded = self.encode(place, values.reshape(-1))
        return self.decode(coded, values.numel()).view(values.shape).to(values.dtype)

    def _padded(self, num_elements: int) -> int:
        """Elements up to whole blocks."""
        return num_elements + (-num_elements % INT8_BLOCK if self.name == "int8" else 0)

    def _whole(self, values: Tensor) -> Tensor:
        missing = self._padded(len(values)) - len(values)
        return torch.nn.functional.pad(values, (0, missing)) if missing else values
