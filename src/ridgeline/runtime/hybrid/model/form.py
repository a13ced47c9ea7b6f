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

from ridgeline.errors import ObstacleError
from ridgeline.runtime.hybrid.compiling import Form, LossFunction, many_variants
from ridgeline.runtime.model_guard import ModelGuard

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
OTHER_CALLS = (
    "calls of the model in another shape or setting than the captured one ran as they were written"
)

Captured = Callable[..., tuple[Tensor, ...]]
Capture = Callable[[nn.Module, Captured, Captured, list[Tensor]], Captured]


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
            same as it was written, and examples of those tensors.

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
        self._known: _Known | None = None
        self._num_calls = 0
        self._is_waiting = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; the first call captures."""
        self._num_calls, self._is_waiting = 0, False
        loss = super().__call__(model, batch)
        if not self._num_calls:
            raise ObstacleError(
                f"wanted a loss function that calls the model, got one that never calls "
                f"{type(self._model).__name__} itself (its parts, perhaps); call the model, or use another "
                "execution mode"
            )
        return loss

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of the model inside are replayed."""
        before = self._model._compiled_call_impl  # noqa: SLF001 - what `Module.compile` sets
        self._model._compiled_call_impl = self._replayed  # noqa: SLF001
        try:
            with many_variants():
                yield
        finally:
            self._model._compiled_call_impl = before  # noqa: SLF001

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
        leaves, structure = pytree.tree_flatten((args, kwargs))
        known = self._known
        if known is not None and known.guard.changed() is not None:
            self.close()
            known = None
        if known is None:
            known = self._known = self._captured(leaves, structure)
        if not known.fits(leaves, structure):
            if OTHER_CALLS not in self._notes:
                self._notes.append(OTHER_CALLS)
            return self._plain(*args, **kwargs)
        self._is_waiting = True
        return known.result(leaves)

    def _captured(self, leaves: list[Any], structure: pytree.TreeSpec) -> "_Known":
        known = _Known(self._model, leaves, structure)

        def of_tensors(call: Callable[..., Any]) -> Captured:
            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                args, kwargs = known.arguments(tensors)
                return known.tensors_of(call(*args, **kwargs))

            return run

        known.call = self._capture(
            self._model, of_tensors(self._call), of_tensors(self._plain), known.tensors(leaves)
        )
        return known


class _Known:
    """A captured call of a model: for which arguments it is, and how its result is put together."""

    call: Captured

    def __init__(self, model: nn.Module, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        self.guard = ModelGuard(model)
        self._name = type(model).__name__
        self._structure = structure
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._key = _key(leaves)
        self._setting = _setting()
        self._result: tuple[list[Any], list[int], pytree.TreeSpec] | None = None
        device = next(model.parameters()).device.type
        if any(leaf.device.type != device for leaf in self.tensors(leaves)):
            raise ObstacleError(
                f"wanted arguments of {self._name} on the device, got a tensor on the host, whose values a "
                "graph would keep; move it before the call"
            )

    def fits(self, leaves: list[Any], structure: pytree.TreeSpec) -> bool:
        """Whether arguments are like those of the capture."""
        return (
            structure == self._structure
            and _key(leaves) == self._key
            and _setting() == self._setting
        )

    def tensors(self, leaves: list[Any]) -> list[Tensor]:
        """The tensors among the leaves of arguments."""
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def arguments(self, tensors: tuple[Tensor, ...]) -> Any:
        """Positional arguments and keywords of the model's call."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._structure)

    def tensors_of(self, result: Any) -> tuple[Tensor, ...]:
        """The tensors of the model's result; the rest of it is kept.

        Raises:
            ObstacleError: something in it is neither a tensor nor a plain value.
        """
        leaves, structure = pytree.tree_flatten(result)
        strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_ATOMS))]
        if strange:
            raise ObstacleError(
                f"wanted results of {self._name} in tuples, lists, dicts or dataclasses that torch's pytree "
                f"knows, got {type(strange[0]).__name__}; register it, or use another execution mode"
            )
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._result = rest, places, structure
        return tuple(leaves[place] for place in places)

    def result(self, leaves: list[Any]) -> Any:
        """What a replay gives for arguments, as the model returns it."""
        outputs = self.call(*self.tensors(leaves))
        assert self._result is not None
        rest, places, structure = self._result
        filled = list(rest)
        for place, output in zip(places, outputs, strict=True):
            filled[place] = output
        return pytree.tree_unflatten(filled, structure)

    def close(self) -> None:
        """Drop the graphs."""
        close = getattr(self.call, "close", None)
        if close is not None:
            close()


def _key(leaves: list[Any]) -> list[Any]:
    """What must be the same for a replay: of tensors what they are like, of all else the value."""
    return [
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf)
        for leaf in leaves
    ]


def _setting() -> tuple[Any, ...]:
    """What torch's operators look at besides their arguments."""
    kinds = ("cuda", "cpu")
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (*casts, torch.are_deterministic_algorithms_enabled())


def capture_on_gpu(
    model: nn.Module, run: Captured, plain: Captured, tensors: list[Tensor]
) -> Captured:
    """The call as CUDA graphs, once nothing was found in it that they cannot hold.

    Raises:
        ObstacleError: names what they cannot hold, or what cannot be judged by looking.
        CaptureError: the capture failed.
    """
    from ridgeline.runtime.hybrid.capture.lint import check_capturable
    from ridgeline.runtime.hybrid.capture.lint_model import inspect_model, model_kept
    from ridgeline.runtime.hybrid.model.captured import CapturedModel

    casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # casts of weights outlive a capture and go stale
    torch.clear_autocast_cache()
    try:
        lint = inspect_model(model, plain, tensors, device="cuda")
        check_capturable(lint.findings)
        if lint.doubts:
            listed = "; ".join(str(doubt) for doubt in lint.doubts)
            raise ObstacleError(
                f"wanted a model of which all is known to fit a CUDA graph, got doubts: {listed}; use an "
                "execution mode without a graph"
            )
        # The backward pass is compiled by the first call as well: its own threads cannot be stopped.
        with model_kept(model), autograd_config.patch(force_non_lazy_backward_lowering=True):
            return CapturedModel(run, tensors, [*model.parameters()])
    finally:
        torch.set_autocast_cache_enabled(casts)
