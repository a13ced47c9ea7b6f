"""Control flow on everything that code can ask: numbers, shapes, strides, flags, modes of torch, data."""

from adversary.grammar.feature import Feature


def _asks(name: str, question: str, **more: object) -> Feature:
    """A feature that doubles where the answer is yes, and adds where it is no."""
    text = f"y = y * 2.0 if {question} else y + 1.0"
    return Feature(name=name, forward=text, **more)  # type: ignore[arg-type]


BRANCHES = (
    _asks(
        "branch on a number",
        "self.depth$n > 2",
        init="self.depth$n = 3",
        changes={"set": "$owner.depth$n = 1"},
    ),
    _asks("branch on training", "self.training"),
    _asks("branch on shape", "y.shape[0] > 3"),
    _asks("branch on layout", "y.is_contiguous()"),
    _asks("branch on requires_grad", "y.requires_grad"),
    _asks("branch on grad mode", "torch.is_grad_enabled()"),
    _asks("branch on inference mode", "torch.is_inference_mode_enabled()"),
    _asks("branch on autocast", "torch.is_autocast_enabled('cpu')"),
    _asks("branch on dtype", "y.dtype == torch.float32"),
    _asks("branch on default dtype", "torch.get_default_dtype() == torch.float32"),
    _asks("branch on a weight's flag", "next(self.parameters()).requires_grad"),
    _asks("branch on a weight's layout", "next(self.parameters()).is_contiguous()"),
    _asks("branch on the number of parameters", "len(list(self.parameters())) > 6"),
    _asks("branch on deterministic", "torch.are_deterministic_algorithms_enabled()"),
    _asks("branch on threads", "torch.get_num_threads() > 1"),
    _asks("branch on data", "float(y.detach().sum()) > 0"),
    Feature(name="select by data", forward="y = torch.where(y > 0, y * 2.0, y - 1.0)"),
    Feature(name="new tensor of default dtype", forward="y = y + torch.ones(4).to(y.dtype) / 3"),
    Feature(name="size as a number", forward="y = y / y.shape[0]"),
    Feature(
        name="loop of a length",
        init="self.rounds$n = 2",
        forward="for _ in range(self.rounds$n):\n    y = torch.tanh(y) * 1.5",
        changes={"more": "$owner.rounds$n = 4", "none": "$owner.rounds$n = 0"},
    ),
    Feature(
        name="expects an exception",
        forward="try:\n    y = y * self.missing$n\nexcept AttributeError:\n    y = y + 1.0",
        changes={"added": "$owner.missing$n = 2.0"},
    ),
)
