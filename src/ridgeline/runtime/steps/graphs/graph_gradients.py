"""The gradients that a captured step writes, and what parameters show of them to their user."""

import gc
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import CaptureError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.runtime.steps.body.capture_watch import never
from ridgeline.tensors.kept_gradients import KeptGradients, is_kept
from ridgeline.tensors.sameness import Sameness

COPIED = "parameters have copies of their gradients, since earlier ones were kept"


class GraphGradients:
    """Gradients of a graph: those that a step makes anew, and those that it adds to, as nobody clears them.

    A plain step makes others in the place of the former, and adds to the latter where they are.

    Args:
        parameters: All that the step may give a gradient; those that no step clears get one, to be added to.
        optimizer: Clears the gradients of its own.
        copies: Show copies of gradients, which the next replay leaves as they are.

    Attributes:
        copies: Whether parameters have copies.
        added_to: Parameters and the gradients that a step adds to.
        are_shown: Whether parameters have all of them, so that there is nothing to `show`.
        are_alone: Whether they are shown, and nobody else holds one, once `watch` was called; a replay then
            has nothing to leave or to show. See `KeptGradients.are_alone`.
        are_kept: Whether somebody holds one that the next replay would write over; see
            `KeptGradients.are_any`.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Optimizer, *, copies: bool) -> None:
        held = {*parameters_of(optimizer)}
        self._parameters = [*dict.fromkeys((*parameters, *held))]
        self._is_cleared = [parameter in held for parameter in self._parameters]
        self.copies = copies
        self._before = [parameter.grad for parameter in self._parameters]
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self.added_to: list[tuple[Tensor, Tensor]] = []
        self._elsewhere: set[int] = set()
        self._kept: KeptGradients | None = None
        self.are_alone: Callable[[], bool] = never
        self.are_kept: Callable[[], bool] = never
        self.are_shown: Callable[[], bool] = never
        for parameter, before in self._uncleared():
            # The graph adds to what is there, in memory of its own: the user may keep what he has.
            if before is not None:
                parameter.grad = before.clone()
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def take(self) -> None:
        """Take those that a capture has left; one to which nothing was added is none again."""
        for parameter, before in self._uncleared():
            found = parameter.grad
            if before is None and found is not None and not found._version:  # noqa: SLF001 - counts writes
                parameter.grad = None
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]
        self.added_to = [
            (parameter, gradient)
            for (parameter, gradient), is_cleared in zip(
                self._gradients, self._is_cleared, strict=True
            )
            if not is_cleared and gradient is not None
        ]
        shown = Sameness()
        for parameter in self._parameters:
            shown.attribute(parameter, "grad")
        if not self.copies:
            self.are_shown = shown.compiled()
        for parameter, before in self._uncleared():
            if before is not None:
                parameter.grad = before
        self._before.clear()

    def bring(self) -> None:
        """Before a replay: continue from the present gradients that nobody clears."""
        self._elsewhere.clear()
        for parameter, gradient in self.added_to:
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
                if self.copies or is_kept(parameter):
                    self._elsewhere.add(id(parameter))

    def show(self) -> None:
        """After a replay: make the parameters' gradients those that it has computed, or copies of them."""
        for parameter, gradient in self._gradients:
            if id(parameter) in self._elsewhere:
                assert gradient is not None
                parameter.grad.copy_(gradient)  # type: ignore[union-attr] - it was there before
            elif self.copies and gradient is not None:
                parameter.grad = gradient.clone()
            elif parameter.grad is not gradient:
                parameter.grad = gradient

    def watch(self) -> None:
        """Take what refers to the gradients now for all that may; see `are_kept`.

        Cost: Looks for circles of references, tens of milliseconds.
        """
        if self.copies:
            return
        gc.collect()
        added_to = {id(parameter) for parameter, _ in self.added_to}
        self._kept = KeptGradients(self._gradients, added_to)
        self.are_alone, self.are_kept = self._kept.are_alone, self._kept.are_any

    def leave(self) -> bool:
        """Let those who hold gradients keep them, and show copies from now on.

        False where they hold other tensors in the same memory (a view): that cannot be moved.
        """
        self.copies = True
        found = [] if self._kept is None else self._kept.found()
        if any(views for *_, views in found):
            return False
        self._gradients = [(p, None if g is None else g.detach()) for p, g in self._gradients]
        self.added_to = [(p, g.detach()) for p, g in self.added_to]
        for gradient, is_held, _ in found:
            if is_held:  # as an object, which gets memory of its own
                gradient.data = gradient.clone()
        self._kept = None
        self.are_alone = self.are_kept = self.are_shown = never
        return True

    def _uncleared(self) -> list[tuple[Tensor, Tensor | None]]:
        """Parameters whose gradients no step clears, and what these were before the capture."""
        found = zip(self._parameters, self._before, self._is_cleared, strict=True)
        return [(parameter, before) for parameter, before, is_cleared in found if not is_cleared]


def leave_kept(held: Sequence[GraphGradients], num_workers: int) -> str | None:
    """Show copies of gradients from now on, where somebody keeps one that the next replay would write over.

    Returns:
        Why the graphs must be given up; None where they may stay.

    Raises:
        CaptureError: they must, on one of several workers, where the others would go on.
    """
    kept = [gradients for gradients in held if gradients.are_kept()]
    stays = [gradients.leave() for gradients in kept]
    if all(stays):
        return None
    if num_workers > 1:
        raise CaptureError(
            "wanted steps of several workers after which nobody keeps a view of a gradient, got one in the "
            "memory of a graph; keep p.grad itself, or p.grad.clone(), or use execution='compiled'"
        )
    return "a view of a gradient was kept, whose memory replays write"
