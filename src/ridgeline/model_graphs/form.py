"""Training steps whose model is replayed as captured graphs, while the loss around it runs as it was written.

For steps that no single graph can hold, because their loss looks at values on the host: CTC, matching, a
metric. What compiles is the model alone, too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as autograd_config
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import watched
from ridgeline.capture.casts import fresh_casts
from ridgeline.capture.dropout_states import left_as_found
from ridgeline.capture.mask_looks import sparing
from ridgeline.capture.unloadable import OF_INFERENCE
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.guards.model_guard import check_scripted
from ridgeline.lint.lint import check_capturable
from ridgeline.model_graphs.captured import CapturedModel
from ridgeline.model_graphs.inspection import changed_by_loss, inspect_model
from ridgeline.model_graphs.known_call import Captured, KnownCall
from ridgeline.model_graphs.written_parameters import written_parameters
from ridgeline.programs.compiling import Form, LossFunction, called_by, many_variants
from ridgeline.programs.watches.class_watch import ClassWatch
from ridgeline.reach.undo import Undo
from ridgeline.state.saved_state import module_kept
from ridgeline.tensors.nests import tensors_in

OTHER_CALLS = (
    "calls of the model in another shape or setting than the captured one ran as they were written"
)

FIRST_CALLS = "calls in which the model first wrote into its parameters ran as they were written"

GRADIENTS_KEPT = (
    "the model was captured again, since gradients were kept that replays write over: now they are "
    "copies"
)

REFUSED = "a step in which the model could not be captured again ran as it was written"

Capture = Callable[[nn.Module, Captured, Captured, list[Tensor]], Captured | None]


class ModelGraphForm(Form):
    """The loss function as it was written, around a model whose calls are replayed.

    The first call of the model in a step is; calls before its backward pass, without gradients, or with
    tensors of other shapes run as they were written.

    Args:
        loss_fn: The user's loss function.
        model: It must be called by the loss function, once a step.
        call: Calls the model, compiled or not; None as it was written.
        notes: Receives what ran otherwise.
        capture: Makes the captured call from the model, the call to capture as a function of tensors, the
            same as it was written, and examples of those tensors; None for a call like no other, which is
            to run as it was written.

    Raises:
        ObstacleError: when called; the model cannot be captured, or is not called.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        model: nn.Module,
        call: Callable[..., Any] | None,
        *,
        notes: list[str],
        capture: Capture,
    ) -> None:
        super().__init__(loss_fn)
        self._model = model
        self._plain = model._call_impl  # noqa: SLF001 - `__call__` without what is set in `active`
        self._call = call or self._plain
        self._notes = notes
        self._capture = capture
        self._known: KnownCall | None = None
        self._classes: ClassWatch | None = None
        self._num_calls = 0
        self._is_waiting = False
        self._copies_gradients = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; the first call captures."""
        if self._known is None and self.refusal is None and not watched():
            with self._refusing_later():
                self._check_python(batch)
        # Reset in each step: a loss that raised may have left a call without its backward pass.
        self._num_calls, self._is_waiting = 0, False
        loss = super().__call__(model, batch)
        if not (self._num_calls or self.trains):
            raise ObstacleError(
                f"wanted a loss function that calls the model, got one that never calls "
                f"{type(self._model).__name__} itself (its parts, perhaps); call the model, or use another "
                "execution mode"
            )
        return loss

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of the model inside are replayed."""
        with called_by([(self._model, self._replayed)]), many_variants(), sparing():
            yield

    def close(self) -> None:
        """Drop the graphs."""
        if self._known is not None:
            self._known.close()
            self._known = None

    def _replayed(self, *args: Any, **kwargs: Any) -> Any:
        """What calls of the model become."""
        self._num_calls += 1
        if self._is_waiting or not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        if why := watched():
            return self._as_written(why, args, kwargs)
        if self.refusal is not None:
            return self._plain(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
            return self._as_written(OF_INFERENCE, args, kwargs)
        known = self._known
        if known is not None and known.has_kept_gradients():
            # They lie in the memory of these graphs, which are not replayed again.
            self._note(GRADIENTS_KEPT)
            self._copies_gradients = True
            self.close()
            known = None
        # First the common answer: `changed` looks at everything once more.
        fits = known is not None and known.fits(leaves, structure)
        if known is not None and not fits and known.changed() is not None:
            self.close()
            known = None
        if known is None:
            with self._refusing_later():
                known = self._known = self._captured(leaves, structure)
            if known is None:
                why = FIRST_CALLS if self.refusal is None else REFUSED
                return self._as_written(why, args, kwargs)
            fits = True
        if not fits:
            return self._as_written(OTHER_CALLS, args, kwargs)
        self._is_waiting = True
        return known.result(leaves)

    @contextlib.contextmanager
    def _refusing_later(self) -> Iterator[None]:
        """What is refused inside, in a step that trains, refuses the next one: this one has begun."""
        try:
            yield
        except CaptureError as error:
            if not self.trains:
                raise
            self.refusal = error

    def _as_written(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(why)
        return self._plain(*args, **kwargs)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _check_python(self, batch: Any) -> None:
        """Refuse a loss function that sets in Python what the model reads.

        Raises:
            ObstacleError: names it.
        """
        what = changed_by_loss(self._model, self._loss_fn, batch)
        if what:
            name = type(self._model).__name__
            raise ObstacleError(
                f"wanted a loss function that leaves alone what {name} names in Python, got a change of "
                f"{what}; hand it over as an argument, or use another execution mode"
            )

    def _captured(self, leaves: list[Any], structure: pytree.TreeSpec) -> KnownCall | None:
        check_scripted(self._model)
        known = KnownCall(self._model, leaves, structure)
        if self._classes is None:
            self._classes = ClassWatch(self._model)
        self._classes.forget_stale_programs()

        def of_tensors(call: Callable[..., Any]) -> Captured:
            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                args, kwargs = known.arguments(tensors)
                return known.tensors_of(call(*args, **kwargs))

            return run

        self._is_waiting = True  # a model that calls itself does so inside of the capture
        captured = self._capture(
            self._model, of_tensors(self._call), of_tensors(self._plain), tensors_in(leaves)
        )
        if captured is None:
            return None
        known.call = captured
        if self._copies_gradients:
            known.copy_gradients()
        return known


def capture_on_gpu(
    model: nn.Module, run: Captured, plain: Captured, tensors: list[Tensor]
) -> Captured | None:
    """The call as CUDA graphs, once nothing was found in it that they cannot hold.

    None for a call that sets parameters up, as the next one does not (a scale taken from the first batch).

    Raises:
        ObstacleError: names what they cannot hold, or what cannot be judged by looking.
        CaptureError: the capture failed.
    """
    with left_as_found(model), fresh_casts():
        with written_parameters(model) as writes:
            inspected = writes.watched(plain)
            device = next(iter(model.parameters())).device
            lint = inspect_model(model, inspected, tensors, device=device)
        check_capturable(lint.findings)
        if lint.doubts:
            listed = "; ".join(str(doubt) for doubt in lint.doubts)
            raise ObstacleError(
                f"wanted a model of which all is known to fit a CUDA graph, got doubts: {listed}; use an "
                "execution mode without a graph"
            )
        if writes.are_first():
            return None
        # The backward pass is compiled by the first call as well: its own threads cannot be stopped.
        before = Undo(model, spared=(*model.parameters(), *model.buffers()))
        with (
            module_kept(model, parameters=False),
            autograd_config.patch(force_non_lazy_backward_lowering=True),
        ):
            try:
                captured = CapturedModel(run, plain, tensors, before, model.modules())
            except BaseException:
                before.restore()
                raise
    captured.dropout.adopt()
    return captured
