"""Random numbers that another script draws for what this one's modules compute.

A generator fills memory from front to back. Where one step puts the weights that it trains into channels-last
memory, their images come out with the channels innermost wherever they are computed, and numbers that are
drawn for such an image (noise, a dropout mask) land in other pixels of it. A step's own draws are seen in its
trace; those of another step with the same modules (a penalty beside a generator's loss) only in its code.
"""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ridgeline.reach.reach import Reach, names_in
from ridgeline.reach.step_code import place_of, step_code

_DRAWS = frozenset({
    "randn_like", "rand_like", "randint_like", "bernoulli", "bernoulli_", "normal", "normal_", "uniform_",
    "exponential_", "cauchy_", "geometric_", "log_normal_", "random_", "poisson", "dropout", "dropout_",
    "alpha_dropout", "rrelu", "rrelu_", "gumbel_softmax",
})  # fmt: skip
"""Names of what draws in the memory order of a tensor that it is given. `randn(shape)` and dropout of whole
channels draw in an order of their own."""
_DRAWING = (nn.Dropout, nn.AlphaDropout, nn.RReLU)


def moved_draws(model: nn.Module, other_model: nn.Module, other_loss: Any) -> str:
    """Where another step draws so, `penalty (train.py:12)`; empty where it shares no weights of images.

    Args:
        model: Of the step whose memory may get another order.
        other_model: Trained by the other step.
        other_loss: Its loss function, which may name modules of `model`.

    Cost: See `step_code`.
    """
    movable = {id(module) for module in model.modules() if _has_images(module)}
    if not movable:
        return ""
    reach = Reach(other_model, other_loss)
    if not any(id(module) in movable for module in reach.modules):
        return ""
    for code, _ in step_code(other_model, other_loss, reach):
        if not _DRAWS.isdisjoint(names_in(code)):
            return place_of(code)
    drawing = (type(m).__name__ for m in reach.modules if isinstance(m, _DRAWING))
    return next(drawing, "")


def _has_images(module: nn.Module) -> bool:
    # Not by its method, which a model may have written anew.
    own = module._parameters.values()  # noqa: SLF001 - what the method of torch reads
    return any(
        parameter is not None and not is_lazy(parameter) and parameter.dim() == 4
        for parameter in own
    )
