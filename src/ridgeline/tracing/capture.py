"""`trace`: one training step as a `Workload`, found without running it wherever that is possible.

The step is taken on fake tensors: forward, loss, backward and optimizer issue the operators that eager
execution would issue, in the same order, but nothing is computed and nothing large is allocated. A step that
looks at values goes another way: if it may, it is recorded while it runs, and taken back.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.capture.casts import AUTOCAST, outside_cached_weights
from ridgeline.capture.mask_looks import spare_looks
from ridgeline.errors import OutOfTimeError, SideEffectError, WorkloadError
from ridgeline.given import checked
from ridgeline.optimizer_forms import calls_model
from ridgeline.optimizers.given import check_clip_norm, check_parts
from ridgeline.plan import MemoryFormat, Precision
from ridgeline.reach.reach import Reach
from ridgeline.reach.side_effects import refusing_writes
from ridgeline.tracing.fakes.faking import fake_workload
from ridgeline.tracing.recorded_step import LossFn, Step
from ridgeline.tracing.refusal import obstacle, takes_functions
from ridgeline.tracing.running import real_workload
from ridgeline.workload import Workload


@checked(WorkloadError, but=("model", "loss_fn", "optimizer", "clip_norm"))
def trace(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    batch: Any,
    *,
    name: str = "model",
    precisions: Collection[str] = (),
    memory_formats: Collection[str] = (),
    may_run: bool = False,
    check: Callable[[bool], None] = lambda is_variant: None,
    clip_norm: float | None = None,
) -> Workload:
    """One training step as a `Workload`: every operator, its cost, its order; nothing is executed.

    Unless it may run: then a step that cannot be traced without (it looks at values, has shapes that
    depend on them, or uses what has no fake implementation) runs twice, the second time recorded, and is
    taken back; a note says so, and why. Where not even that shows the operators, each phase becomes one.

    The step is that of the second and all later calls: gradients start as None, the optimizer's state
    exists. Model, optimizer, batch and random state are left as they are; `model.training` decides on
    dropout and batch statistics as usual.

    Args:
        model: On one device; its first parameter's device is the workload's.
        loss_fn: `loss_fn(model, batch)` returns a scalar tensor.
        optimizer: Over parameters of `model`.
        batch: Nested tuples, lists or dicts with tensors; the leading dimension of the first one that
            has any is the number of samples. Tensors on another device count as already copied.
        name: For reports.
        precisions: Those of a plan. In each that changes the operators (`bf16`) the step is traced as well,
            as a variant; a step that may run and fails in it has a note instead.
        memory_formats: Those of a plan. `channels_last` adds a variant, in the last of the precisions, where
            images are convolved and the step can be traced without running.
        may_run: Whether the step may really run. Taken back is what can be reached from model, loss,
            optimizer and batch, and random state; what was printed stays.
        check: Called at every operator, with whether it is that of a variant. What it raises ends the trace;
            an `OutOfTimeError` of a variant costs only that one, and the others after it.
        clip_norm: The total norm that gradients are clipped to before the optimizer; None leaves them.

    Raises:
        PlanError: the model is no module, the optimizer none of torch's, the loss cannot be called so, or
            `clip_norm` is no finite number above 0.
        WorkloadError: the loss is no scalar or needs no gradient, the step depends on values and may not
            run, or model or batch are not what it needs. What `loss_fn` raises itself passes through.
        SideEffectError: the user's code opens a file to write, a socket or a process; nothing was written.
        OutOfTimeError: of `check`, before the step itself was traced.

    Cost: `loss_fn` is called once on fake tensors: host time of a few eager steps, no device work; once more
        for each variant. Where the step runs: two steps, and a copy of all that they may change.
    """
    _check_names("precisions", precisions, get_args(Precision))
    _check_names("memory_formats", memory_formats, get_args(MemoryFormat))
    check_clip_norm(clip_norm)
    _check(model, loss_fn, optimizer, batch, may_run=may_run)
    step = Step(model, loss_fn, optimizer, batch, check=partial(check, False), clip_norm=clip_norm)
    with refusing_writes(), _as_trained(), torch.compiler.set_stance("force_eager"):
        workload = _traced(step, name, may_run=may_run)
        step = step._replace(check=partial(check, True))
        variants: list[Workload] = []
        notes = [*workload.notes]
        try:
            _add_variants(
                variants, notes, step, workload, precisions, memory_formats, may_run=may_run
            )
        except OutOfTimeError as error:
            notes.append(f"not traced in every precision and memory format: {error}")
    return msgspec.structs.replace(workload, variants=tuple(variants), notes=tuple(notes))


@contextlib.contextmanager
def _as_trained() -> Iterator[None]:
    """A step trains inside, whatever mode it is described in, and computes its weights."""
    with torch.inference_mode(mode=False), torch.enable_grad(), outside_cached_weights():
        yield


def _add_variants(
    variants: list[Workload],
    notes: list[str],
    step: Step,
    workload: Workload,
    precisions: Collection[str],
    memory_formats: Collection[str],
    *,
    may_run: bool,
) -> None:
    """The step in other precisions and memory formats, one after the other, and what to say of them."""
    for precision in AUTOCAST:
        if precision not in precisions:
            continue
        try:
            narrow = step._replace(precision=precision)
            variants.append(_traced(narrow, workload.name, may_run=may_run))
        # These end the trace whatever precision it is in; any other error concerns this variant alone.
        except (OutOfTimeError, SideEffectError):
            raise
        except Exception as error:
            if not may_run:
                raise
            notes.append(f"the step does not run in {precision}: {obstacle(error)}")
    if "channels_last" in memory_formats and workload.has_images:
        # Only in one precision, as each variant costs another trace.
        precision = variants[-1].precision if variants else step.precision
        last = step._replace(precision=precision, memory_format="channels_last")
        laid_out = fake_workload(last, workload.name, may_fail=True).workload
        variants += [laid_out] if laid_out is not None else []


def _traced(step: Step, name: str, *, may_run: bool) -> Workload:
    spare_looks()
    workload, doubt, error = fake_workload(step, name, may_fail=may_run)
    # An optimizer that calls the model (L-BFGS) is estimated in a real step as well, so that running it shows
    # no more.
    if workload is not None and not (doubt and may_run and not calls_model(step.optimizer)):
        return workload
    if not may_run:
        assert error is not None
        raise error
    try:
        return real_workload(step, name, doubt)
    except (TypeError, RuntimeError) as failed:
        # Torch compiles what takes functions, and fails where nothing is compiled.
        if error is not None and takes_functions(error):
            raise error from failed
        raise


def _check_names(asked: str, given: Collection[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise WorkloadError(
            f"wanted {asked} out of {', '.join(known)}, got {', '.join(unknown)}; correct the name"
        )


def _check(
    model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, batch: Any, *, may_run: bool
) -> None:
    """Raise unless there is something to train and something to train on."""
    check_parts(model, loss_fn, optimizer)
    # First, since the device of the workload is that of the first parameter.
    if next(iter(model.parameters()), None) is None:
        raise WorkloadError(
            f"wanted a model with parameters, got none in {type(model).__name__}; "
            "register what is trained as nn.Parameter"
        )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter) and not may_run:
            raise WorkloadError(
                f"wanted parameters with shapes, got {name} of a lazy module that has none yet; "
                "call the model once on a batch before tracing"
            )
        if parameter.device.type not in ("cpu", "cuda"):
            raise WorkloadError(
                f"wanted parameters on cpu or cuda, got {name} on {parameter.device}; move the model"
            )
    if may_run:
        return
    # Objects of libraries hold tensors, too: a graph, a dataclass.
    if not any(tensor.dim() for tensor in Reach(batch).tensors):
        raise WorkloadError(
            "wanted a batch of nested tuples, lists, dicts or objects with at least one tensor that has "
            f"dimensions, got {type(batch).__name__} with none; pass what a data loader yields"
        )
