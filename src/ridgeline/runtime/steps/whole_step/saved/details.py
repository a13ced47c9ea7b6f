"""What a saved training step has to say besides its tensors."""

import base64

import torch
from torch import Tensor

from ridgeline.codec import Value
from ridgeline.runtime.steps.whole_step.lifting import Role

Constant = None | bool | int | float | str
"""What may stand in a batch besides tensors; it is the same for every step."""


class SavedRandomState(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States of torch's generators, in base64; `cuda` is None where the step runs on the CPU."""

    cpu: str
    cuda: str | None = None

    @classmethod
    def now(cls, device: torch.device) -> "SavedRandomState":
        """The present states.

        Cost: On CUDA, waits for the device.
        """
        cuda = _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
        return cls(cpu=_text(torch.get_rng_state()), cuda=cuda)

    def __repr__(self) -> str:
        return f"SavedRandomState({len(self.cpu)} characters)"

    def apply(self, device: torch.device) -> None:
        """Put torch's generators into these states.

        Raises:
            ValueError: the texts are not base64.
            RuntimeError: they are not states of torch's generators.
        """
        torch.set_rng_state(_bytes(self.cpu))
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(_bytes(self.cuda), device)


class StepDetails(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a saved step has to say besides its tensors.

    Args:
        roles: What each tensor of the state is, in order.
        aliases: Further names of tied parameters and buffers, to the name that the state has.
        constants: Index of a leaf of the batch to its value, for leaves that are no tensors.
        random: The generators when it was saved.
        baked: Settings of the optimizer that are part of the program, one text for each group; to be read.
        clip_norm: As in the step that was saved; to be read.
        accumulate: Micro-batches per step; to be read.
        written: Places among the batch's tensors that the step writes.
    """

    roles: tuple[Role, ...]
    aliases: dict[str, str] = {}
    constants: dict[str, Constant] = {}
    random: SavedRandomState
    baked: tuple[str, ...] = ()
    clip_norm: float | None = None
    accumulate: int = 1
    written: tuple[int, ...] = ()


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    # A `bytearray`, since torch warns of memory that cannot be written.
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
