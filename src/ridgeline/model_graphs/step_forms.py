"""The form that a step's forward pass takes: as written, compiled whole or by region, or a replayed model."""

from torch import nn

from ridgeline.model_graphs.form import ModelGraphForm, capture_on_gpu
from ridgeline.programs import inductor
from ridgeline.programs.compiling import (
    CompiledForms,
    Form,
    LossFunction,
    RegionalForm,
    WholeForm,
    compiled_call,
)


def make_form(
    kind: str,
    loss_fn: LossFunction,
    model: nn.Module,
    *,
    notes: list[str],
    is_replayed: bool = False,
    replays_model: bool = False,
    announces: bool = False,
    combines: bool = False,
    owns_random: bool = False,
    bucket_bytes: tuple[int, ...] = (),
    forms: CompiledForms | None = None,
) -> Form:
    """The form `eager`, `compiled` or `regional` of a loss function.

    Args:
        kind: Its name.
        loss_fn: The user's loss function.
        model: The model that it is called with.
        notes: Receives what was done to the program, now or when it is compiled.
        is_replayed: A GPU replays the step as a CUDA graph.
        replays_model: A GPU replays the model alone.
        announces: Then gradients are sent to other workers as soon as they are ready.
        combines: Then small kernels become one, and weight gradients run beside the chain.
        owns_random: Compiled programs may draw random numbers of their own.
        bucket_bytes: Limits of the buckets by which `compiled` is cut in parts; none: it is one. See `parts`.
        forms: Those of other steps with the same loss function and model; None compiles again.

    Raises:
        CaptureError: `regional`, and the model repeats no block.

    Cost: Nothing is compiled before the first call.
    """
    arguments = inductor.plain_arguments(
        owns_random=owns_random, bucket_bytes=bucket_bytes, notes=notes
    )
    if replays_model:
        call = compiled_call(model, arguments) if kind == "compiled" else None
        return ModelGraphForm(loss_fn, model, call, notes=notes, capture=capture_on_gpu)
    is_special = is_replayed and (announces or combines)
    if is_special:
        arguments = inductor.replayed_arguments(notes, announces=announces, combines=combines)
    shared = CompiledForms() if forms is None else forms
    # All that the compiled program follows from, but for what `CompiledForms` is made for: loss and model.
    key = (kind, is_special, announces, combines, owns_random, bucket_bytes)
    if kind == "compiled":
        return shared.take(key, lambda: WholeForm(loss_fn, arguments, shared.limit_s))
    if kind == "regional":
        form = shared.take(
            (*key, is_replayed),
            lambda: RegionalForm(loss_fn, model, arguments, is_captured=is_replayed),
        )
        assert isinstance(form, RegionalForm)
        notes.append(form.regions.note)
        return form
    return Form(loss_fn)
