"""Which forms of a step have gradients of gradients, where its code asks for some."""

from typing import Any

from torch import nn

from ridgeline.errors import CaptureError
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.reach.second_gradients import retained_graphs, second_gradients


def check_differentiable(model: nn.Module, loss_fn: Any, plan: Plan) -> None:
    """Refuse a form whose backward pass cannot be differentiated, before any step has begun.

    A step may ask for it now and then only: its failure would leave one half done. Graphs of eager operators
    and whole steps as one program contain the second pass.

    A second backward pass through the same call finds what the first one has used up, likewise: what was
    compiled gives its memory away ("donated buffers"), and a graph is replayed once.

    Source: torch 2.11 and 2.13 (`_functorch/_aot_autograd/runtime_wrappers.py`) raise in each backward pass
    through a compiled function that is to be differentiated, with donated buffers or without.

    Raises:
        CaptureError: names the place in the code, and the forms to use.

    Cost: See `second_gradients`; nothing for other forms.
    """
    mode = MODES[plan.execution]
    if not (mode.form in ("compiled", "regional") or mode.replays_model):
        return
    place = second_gradients(model, loss_fn)
    if place:
        raise CaptureError(
            f"wanted a step without gradients of gradients for execution={plan.execution!r}, got "
            f"create_graph=True or torch.autograd.functional in {place}; use execution='step-graph', 'graph' "
            "or 'eager'"
        )
    place = retained_graphs(model, loss_fn)
    if place:
        raise CaptureError(
            f"wanted a step with one backward pass through each call for execution={plan.execution!r}, got "
            f"retain_graph=True in {place}; use execution='step-graph', 'graph' or 'eager'"
        )
