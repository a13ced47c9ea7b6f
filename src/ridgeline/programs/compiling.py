"""The form of a training step's forward pass: as written, compiled whole, or compiled by region.

A *region* is a block that the model repeats (a residual block, a transformer layer). Compiled by itself
it is translated once for all its copies, and its backward hands out its gradients as soon as it is done,
so that synchronisation overlaps as in the eager step.

A form is switched on for the duration of a step only; evaluation, saving and the user's own calls see the
model as it was.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import config as autograd_config

from ridgeline.capture.capturing import told_of_capture
from ridgeline.capture.deadline import deadline
from ridgeline.errors import CaptureError
from ridgeline.optimizers.shared_memory import sharing
from ridgeline.programs import inductor
from ridgeline.programs.watches.class_watch import ClassWatch
from ridgeline.tensors.nests import tensors_in

_T = TypeVar("_T", bound="Form")
LossFunction = Callable[[nn.Module, Any], Tensor]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MOST_VARIANTS = 64
"""Variants of one block (shapes, precision, training flag) that are compiled before torch would silently
run it eagerly; its own default of 8 is below the number of shapes in a common residual network."""

_CALL = "_compiled_call_impl"
"""What `Module.compile` sets: it is called in place of a module, where it is there."""
_NOTHING = contextlib.nullcontext()


class Form:
    """How a step computes its loss: `loss = form(model, batch)` inside `with form.active():`.

    Args:
        loss_fn: The user's loss function; called as it is.

    Attributes:
        trains: What it computes trains: a step that began is then not given up.
        refusal: Why the next step must not begin in this form; None while it may.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self.trains = False
        self.refusal: CaptureError | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self._loss_fn(model, batch)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Switch the form on for the calls inside."""
        return _NOTHING  # a generator here would cost every step some microseconds

    def close(self) -> None:
        """Release what the form holds on the device; nothing here."""


class WholeForm(Form):
    """Loss function and model compiled together; all again where a class has another method."""

    def __init__(
        self, loss_fn: LossFunction, arguments: dict[str, Any], limit_s: float = math.inf
    ) -> None:
        super().__init__(loss_fn)
        inductor.ignore_advice()
        self._compiled = torch.compile(loss_fn, **arguments)
        self._limit_s: float | None = limit_s
        self._classes: ClassWatch | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch; the first call compiles.

        Raises:
            CaptureError: compiling took longer than it may, or it has written into a tensor of the batch of
                which another one shows a part.
        """
        # Only now, since a form is made without the model.
        if self._classes is None:
            self._classes = ClassWatch(model, self._loss_fn)
        self._classes.forget_stale_programs()
        tensors = {id(tensor): tensor for tensor in tensors_in(batch) if not tensor.is_inference()}
        counted = [(tensor, tensor._version) for tensor in tensors.values()]  # noqa: SLF001
        loss = self._loss(model, batch)
        written = [t for t, version in counted if t._version != version]  # noqa: SLF001 - no other way
        if written:
            _require_apart(written, [t for t, version in counted if t._version == version])  # noqa: SLF001
        return loss

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self._limit_s is None:
            return self._compiled(model, batch)
        # The backward pass is compiled by the first call as well: its own threads cannot be stopped.
        with (
            deadline(self._limit_s, "the step compiled"),
            autograd_config.patch(force_non_lazy_backward_lowering=True),
        ):
            loss = self._compiled(model, batch)
        # Only the first call compiles; the clock would cost each later one.
        self._limit_s = None
        return loss

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Switch the form on for the calls inside."""
        with many_variants():
            yield


def _require_apart(written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Refuse a batch that torch's compiler (2.11 to 2.13) takes for tensors with memory of their own."""
    if sharing(written, read) is not None:
        raise CaptureError(
            "wanted tensors of a batch that lie apart, since the step writes into one, which compiled code "
            "does not see in the others, got two that share elements; give it copies (.clone()), or use "
            "execution='eager'"
        )


class RegionalForm(Form):
    """The model's repeated blocks compiled one by one; everything between them as written.

    Code between them that asks whether it is captured (transformers make a mask there, and none elsewhere) is
    notified in every step where `is_captured`: else blocks would be compiled once more within the capture.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        model: nn.Module,
        arguments: dict[str, Any],
        *,
        is_captured: bool = False,
    ) -> None:
        super().__init__(loss_fn)
        self._told = told_of_capture if is_captured else contextlib.nullcontext
        self.regions = CompiledRegions(model, arguments)
        self._classes = ClassWatch(model, loss_fn)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch."""
        with self._told():
            return self._loss_fn(model, batch)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Switch the compiled blocks on for the calls inside."""
        self._classes.forget_stale_programs()
        with many_variants(), self.regions.active():
            yield


class CompiledRegions:
    """The repeated blocks of a model, each with a compiled call beside its plain one.

    Args:
        model: Left as it is, but for the time inside `active()`.
        arguments: Those of `Module.compile`.

    Attributes:
        names: Where the blocks are in the model.
        note: How many blocks of which kinds.

    Raises:
        CaptureError: the model repeats no block.
    """

    def __init__(self, model: nn.Module, arguments: dict[str, Any] | None = None) -> None:
        arguments = inductor.plain_arguments() if arguments is None else arguments
        found = find_regions(model)
        if not found:
            raise CaptureError(
                f"wanted a model with repeated blocks for execution by region, got {type(model).__name__} "
                "in which no composite module occurs twice; compile it whole ('compiled')"
            )
        self.names = tuple(name for name, _ in found)
        self._calls = [(block, compiled_call(block, arguments)) for _, block in found]
        kinds = Counter(type(block).__name__ for _, block in found)
        words = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        self.note = f"compiled by region: {words}"

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Calls of the blocks inside go to their compiled form."""
        return called_by(self._calls)


def compiled_call(module: nn.Module, arguments: dict[str, Any]) -> Callable[..., Any]:
    """The call of a module compiled with such arguments of `Module.compile`; the module stays as it is."""
    inductor.ignore_advice()
    before = vars(module).get(_CALL)
    module.compile(**arguments)
    call = vars(module)[_CALL]
    # Taken away again: evaluation and the user's own calls must see the module as it was.
    _set_call(module, before)
    return call


@contextlib.contextmanager
def called_by(calls: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Calls of modules inside go to what stands beside each of them."""
    before = [vars(module).get(_CALL) for module, _ in calls]
    for module, call in calls:
        _set_call(module, call)
    try:
        yield
    finally:
        for (module, _), own in zip(calls, before, strict=True):
            _set_call(module, own)


def _set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    # None is gone, so that a module is as it was, and without a module's slow way to assign.
    if call is None:
        vars(module).pop(_CALL, None)
    else:
        vars(module)[_CALL] = call


@dataclass
class StepFindings:
    """Shared by the steps of one model, loss function and optimizer; what was read holds a batch.

    Attributes:
        readings: Guards of model and loss function; see `StepReads`.
        cleared: Steps that were captured; see `runtime.cleared`.
        value_shapes: Operators whose shapes depend on values; see `runtime.checked`.
        digests: Of steps that were captured; see `runtime.cleared`.
        earlier_digests: Of those that an earlier process captured.
    """

    readings: list[Any] = field(default_factory=list)
    cleared: list[Any] = field(default_factory=list)
    value_shapes: list[str] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)
    earlier_digests: frozenset[str] = frozenset()


class CompiledForms:
    """Forms of one loss function and model that several steps share, so that each is compiled once.

    Attributes:
        limit_s: Seconds that compiling the next form may take.
        findings: What was found out of the steps with these forms.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self.findings = StepFindings()
        self._known: dict[Hashable, Form] = {}

    def take(self, key: Hashable, make: Callable[[], _T]) -> Form:
        """The form of that key, made if there is none."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def forget(self) -> None:
        """Drop all; steps that use a form keep it, with what was found out."""
        self._known.clear()
        self.findings = StepFindings()


def find_regions(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """(name, module) of the outermost repeated blocks of a model, in its own order.

    A block is a module with children, or of the user's own class, whose class occurs at least twice.
    Sequential containers count only where no other class repeats, and then by the classes inside them.
    """
    for key_of in (_class_key, _sequence_key):
        keys = Counter(key for module in model.modules() if (key := key_of(module)) is not None)
        repeated = {key for key, count in keys.items() if count > 1}
        found = tuple(_outermost(model, "", repeated, key_of, set()))
        # Blocks inside other repeated blocks are gone by now, so that one alone may be left of a class that
        # repeats.
        if len(found) > 1:
            return found
    return ()


def _outermost(
    module: nn.Module,
    prefix: str,
    repeated: set[Any],
    key_of: Callable[[nn.Module], Any],
    seen: set[int],
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        # `named_children` knows nothing of blocks that several parents hold; each is compiled once.
        if id(child) in seen:
            continue
        seen.add(id(child))
        if key_of(child) in repeated:
            yield path, child
        else:
            yield from _outermost(child, f"{path}.", repeated, key_of, seen)


def _class_key(module: nn.Module) -> Any:
    """The class of a module that may be a block, or None."""
    kind = type(module)
    if kind in _CONTAINERS:
        return None
    is_own = not kind.__module__.startswith("torch.nn.")
    has_children = next(module.children(), None) is not None
    has_parameters = next(iter(module.parameters()), None) is not None
    return kind if has_children or (is_own and has_parameters) else None


def _sequence_key(module: nn.Module) -> Any:
    """The classes inside a sequential container of at least two modules, or None."""
    if type(module) is not nn.Sequential or len(module) < 2:
        return None
    return tuple(type(child) for child in module)


_limits = torch._dynamo.config  # noqa: SLF001 - the documented home of the compiler's settings
_GUARDING = tuple(
    name
    for name in (
        "skip_nnmodule_hook_guards",
        "skip_no_tensor_aliasing_guards_on_parameters",
        "skip_guards_on_constant_func_defaults",
        "skip_tensor_guards_with_matching_dict_tags",
        "use_recursive_dict_tags_for_guards",
    )
    if hasattr(_limits, name)
)
"""What a version of torch trusts to stay as it is: hooks of modules, and that no two parameters become one;
torch 2.11 also defaults of functions and dtypes of parameters, which `model.double()` changes in place."""


_explaining: Any = torch._dynamo.guards  # noqa: SLF001 - has the function below, and no setting for it
_EXPLAIN_TIED = "recompilation_reason_for_no_tensor_aliasing_guard"


def _tied(_manager: Any, _scope: Any) -> list[str]:
    """Why a program does not serve. Torch's own looks up each tensor, and raises where one is gone (2.13)."""
    return ["tensors that were several are one"]


@contextlib.contextmanager
def many_variants() -> Iterator[None]:
    """Let torch compile up to `MOST_VARIANTS` variants of a function inside, and guard all that it reads.

    NumPy's random numbers are left to NumPy: in a program torch would draw others, of its own generator.
    """
    explain = getattr(_explaining, _EXPLAIN_TIED)
    limit, draws = _limits.recompile_limit, _limits.use_numpy_random_stream
    trusted = [name for name in _GUARDING if getattr(_limits, name)]
    _limits.recompile_limit = max(limit, MOST_VARIANTS)
    _limits.use_numpy_random_stream = True
    for name in trusted:
        setattr(_limits, name, False)
    setattr(_explaining, _EXPLAIN_TIED, _tied)
    try:
        yield
    finally:
        setattr(_explaining, _EXPLAIN_TIED, explain)
        _limits.recompile_limit, _limits.use_numpy_random_stream = limit, draws
        for name in trusted:
            setattr(_limits, name, True)


@contextlib.contextmanager
def failing_parts_as_written() -> Iterator[None]:
    """Inside, a part of a program that torch's compiler fails on runs as it was written.

    Parts before it have run by then (those before a graph break, other blocks), so that an error would leave
    a step half done, which nobody can take again. Backward passes are compiled with their forward passes.

    Cost: 5 us.
    """
    suppresses, lowers = _limits.suppress_errors, autograd_config.force_non_lazy_backward_lowering
    _limits.suppress_errors = autograd_config.force_non_lazy_backward_lowering = True
    try:
        yield
    finally:
        _limits.suppress_errors = suppresses
        autograd_config.force_non_lazy_backward_lowering = lowers


def num_failed() -> int:
    """Functions and parts of them in this process that torch's compiler left as they were written."""
    frames = torch._dynamo.utils.counters["frames"]  # noqa: SLF001 - its only tally
    return frames["total"] - frames["ok"]
