"""What is known of a saved program without running it."""

from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ridgeline.codec import Noun, Value
from ridgeline.packages.host import NativeHost


class TensorMetadata(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a compiled program knows of a tensor.

    Args:
        shape: Sizes of its dimensions.
        dtype: Name of its type, such as `float32`.
        stride: Steps in elements; None for contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The spec of a tensor."""
        return cls(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            stride=None if tensor.is_contiguous() else tuple(tensor.stride()),
        )

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type itself."""
        return getattr(torch, self.dtype)

    def restore(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the same values on `device`, laid out in memory as the program expects it."""
        if self.stride is None:
            return tensor.to(device).contiguous()
        # Dimensions of stride 0 repeat one element; memory is written once, then repeated again.
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in self.stride)
        values = tensor[once]
        laid_out = torch.empty_strided(values.shape, self.stride, dtype=tensor.dtype, device=device)
        return laid_out.copy_(values).expand(self.shape)


class Metadata(Noun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is known of a saved program without running it.

    `write_package` fills in `host`, `state` and `checksums`.

    Args:
        purpose: `callable` for a function or module, `step` for a whole training step.
        device: `cpu` or `cuda`.
        inputs: Tensors that a call gives, in the order of `input_tree`.
        outputs: Tensors that the program returns, in order.
        input_tree: Structure of the arguments of a call (`torch.utils._pytree.treespec_dumps`).
        output_tree: Structure of what a call returns.
        details: Whatever else the purpose needs, as JSON values.
        host: The machine that made the program.
        state: Name to spec of the tensors that the program was saved with.
        checksums: Member of the archive to its SHA-256 in hexadecimal.
    """

    kind: ClassVar[str] = "package"

    purpose: Literal["callable", "step"]
    device: Literal["cpu", "cuda"]
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    input_tree: str
    output_tree: str
    details: dict[str, Any] = {}
    host: NativeHost | None = None
    state: dict[str, TensorMetadata] = {}
    checksums: dict[str, str] = {}

    @property
    def capability(self) -> str:
        """Instruction set of the processor, or generation of the GPU, that the program was made for."""
        return self.host.capability if self.host else ""
