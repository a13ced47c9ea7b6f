"""What may happen to any program between calls, what a call is given, and where it is made."""

CHANGES: dict[str, str] = {
    "evaluate": "w.model.eval()",
    "seed": "torch.manual_seed(7)",
}
"""Name to lines over `w`, which has `model`, `loss_fn` and `optimizer`."""

STEP_CHANGES = frozenset[str]()
"""Those that need an optimizer."""

INPUTS: dict[str, str] = {"plain": "x_of($i)", "more rows": "x_of($i).repeat(2, 1)"}
"""Name to an expression; `$i` is the number of the call."""

CONTEXTS: dict[str, str] = {"plain": "", "no_grad": "torch.no_grad()"}
"""Name to a context manager around the call."""

OPTIMIZERS: dict[str, str] = {"sgd": "torch.optim.SGD(params, lr=0.05)"}
"""Name to an expression over `params`."""
