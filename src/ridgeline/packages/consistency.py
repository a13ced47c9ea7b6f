"""Whether what a package says of its tensors can be so, and is what it holds of them.

Checksums tell damage. These tell a description that was written by something else, or edited: laid out as it
says, elements would lie on each other, or in more memory than there is.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ridgeline.packages.metadata import Metadata, TensorMetadata
from ridgeline.tensors.copies import lie_on_each_other


def objection(metadata: Metadata) -> str | None:
    """What cannot be so in a description; None if it can."""
    described = {
        **{f"input {index}": spec for index, spec in enumerate(metadata.inputs)},
        **{f"output {index}": spec for index, spec in enumerate(metadata.outputs)},
        **metadata.state,
    }
    found = ((name, _impossible(spec)) for name, spec in described.items())
    return next((f"{what} of {name}" for name, what in found if what), None)


def difference(metadata: Metadata, saved: Mapping[str, Tensor]) -> str | None:
    """In what the saved tensors are others than those that are described; None if they are the same."""
    if odd := sorted(metadata.state.keys() ^ saved.keys()):
        which = (
            "described, but not saved" if odd[0] in metadata.state else "saved, but not described"
        )
        return f"{odd[0]} is {which}"
    for name, spec in metadata.state.items():
        held = TensorMetadata.of(saved[name])
        if (held.shape, held.dtype) != (spec.shape, spec.dtype):
            return f"{name} is described as {spec}, and saved as {held}"
    return None


def _impossible(spec: TensorMetadata) -> str | None:
    if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
        return f"dtype {spec.dtype!r}"
    if any(size < 0 for size in spec.shape):
        return f"shape {spec.shape}"
    if spec.stride is None:
        return None
    is_laid_out = len(spec.stride) == len(spec.shape) and all(step >= 0 for step in spec.stride)
    # In dimensions of stride 0 one element is repeated.
    shape = [n if step else 1 for n, step in zip(spec.shape, spec.stride, strict=False)]
    if not is_laid_out or (math.prod(spec.shape) and lie_on_each_other(shape, spec.stride)):
        return f"stride {spec.stride} for shape {spec.shape}"
    return None
