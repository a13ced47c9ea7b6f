"""Which optimizers a CUDA graph can hold, and which of them it runs in their fused form.

A fused form is one kernel that reads and writes each value once. The runtime switches to it, and the tracer
informs the simulator what it moves, or that the optimizer stays outside of a captured step.

Source: torch/optim, releases 2.11 to 2.13. Capturable: Adadelta, Adam, AdamW, Adamax, ASGD, NAdam, RAdam,
RMSprop, Rprop. Fused only: SGD, Adagrad. Neither: Adafactor, LBFGS, Muon, SparseAdam.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

NOT_FUSED_ON_GPU = ("Adagrad",)
"""Optimizers with a fused form for CPUs alone. Source: torch/optim/adagrad.py, releases 2.11 to 2.13."""

READ_RATE_ON_HOST = ("Adadelta", "RMSprop")
"""Their form for one tensor at a time passes `alpha=-lr`, which reads the learning rate on the host."""


BY_ELEMENT = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)
"""Optimizers that update each element by its own gradient, its own state, and the number of the step.

Source: torch/optim, releases 2.11 to 2.13. Not so: Adafactor, LBFGS, Muon; SparseAdam has no dense gradients.
"""


def fits_graph(optimizer: Any, model: Any) -> bool:
    """Whether a CUDA graph can hold the step of an optimizer; else it steps outside of a captured step."""
    # By name and not by class: this module is imported without torch.
    name = type(optimizer).__name__
    if sparse_modules(model):
        return False
    return has_step_of_torch(optimizer) and all(
        has_device_form(name, group) and not reads_rate(name, group) and not cycled_setting(group)
        for group in optimizer.param_groups
    )


def cycled_setting(group: Mapping[str, Any]) -> str:
    """The setting of a group that a scheduler changes in each step beside the rate; nothing if none does.

    What holds a step as it was would be made again for every step.

    Source: torch/optim/lr_scheduler.py, releases 2.11 to 2.13: `OneCycleLR` and `CyclicLR` leave the bounds
    between which they cycle momentum or the first beta in the groups.
    """
    if group.get("base_momentum") == group.get("max_momentum"):
        return ""
    return next((name for name in ("betas", "momentum") if name in group), "")


def sparse_modules(model: Any) -> tuple[str, ...]:
    """Names of the modules that were asked for sparse gradients, which no fused or captured step takes."""
    kinds = ("Embedding", "EmbeddingBag")
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True
        # By the names of base classes, so that subclasses of torch's embeddings count as well.
        and any(kind.__name__ in kinds for kind in type(module).__mro__)
    )


def calls_model(optimizer: Any) -> bool:
    """Whether the optimizer calls the loss itself, as often as it wants: its `step` needs a closure."""
    step = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    return is_required or (closure is not None and _needs_closure(step))


def begins_with_gradients(optimizer: Any) -> bool:
    """Whether an optimizer that `calls_model` finds gradients when its `step` begins, as SAM does.

    `step(closure)` is for one that computes them first (LBFGS). One with `step(closure=None)` is called
    behind `loss.backward()`, by torch's convention, also where its code then needs one.
    """
    closure = inspect.signature(type(optimizer).step).parameters["closure"]
    return closure.default is not inspect.Parameter.empty


def differentiates_gradients(optimizer: Any) -> bool:
    """Whether the optimizer needs gradients with a graph of their own (`backward(create_graph=True)`).

    By its attribute `is_second_order`, as timm's training script asks for it; without one, by code of its
    class that calls `torch.autograd.grad`, as AdaHessian's does to see how gradients change.

    Cost: Reads code of the class: microseconds.
    """
    told = getattr(optimizer, "is_second_order", None)
    if told is not None:
        return bool(told)
    if calls_model(optimizer):
        return False  # its closure has gradients computed
    kinds = (kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("torch."))
    functions = (value for kind in kinds for value in vars(kind).values())
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f))
    return any(code is not None and {"autograd", "grad"} <= {*code.co_names} for code in codes)


def _needs_closure(step: Any) -> bool:
    """Whether the code of a method refuses None for its argument `closure`, or calls it whatever it is.

    No, where it has no code to read.
    """
    # Read and not called: a call without a closure, to find out, could update the parameters.
    try:
        # Unwrapped, since profilers and schedulers put wrappers around `step` whose code says nothing.
        written = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step))))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = [*ast.walk(written)]
    refuses = any(
        (
            isinstance(node, ast.Assert)
            and ast.unparse(node.test) in ("closure is not None", "closure")
        )
        or (
            isinstance(node, ast.If)
            and ast.unparse(node.test) in ("closure is None", "not closure")
            and any(isinstance(done, ast.Raise) for done in node.body)
        )
        for node in nodes
    )
    # Most ask first, in an `if`, an expression of that kind, or `closure and closure()`.
    tests = (
        node if isinstance(node, ast.BoolOp) else getattr(node, "test", None) for node in nodes
    )
    asks = any("closure" in ast.unparse(test) for test in tests if test is not None)
    calls = any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "closure" for node in nodes
    )
    return refuses or (calls and not asks)


def has_step_of_torch(optimizer: Any) -> bool:
    """Whether an optimizer's step is torch's; what another one reads or counts in Python is unknown."""
    return type(optimizer).step.__module__.startswith("torch.optim")


def updates_by_element(optimizer: Any) -> bool:
    """Whether an optimizer's step is that of one in `BY_ELEMENT`: the same for any part of a parameter."""
    # Wrapped in what torch and profilers put around it, a method keeps its qualified name.
    owner = type(optimizer).step.__qualname__.partition(".")[0]
    return has_step_of_torch(optimizer) and owner in BY_ELEMENT


def has_device_form(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether a group of the optimizer class of that name has a step that runs on the device alone."""
    if "capturable" in group:
        return True
    parameters = group["params"]
    if "fused" not in group or group.get("differentiable"):
        return False
    is_on_gpu = any(parameter.device.type == "cuda" for parameter in parameters)
    if is_on_gpu and optimizer in NOT_FUSED_ON_GPU:
        return False
    return all(parameter.is_floating_point() for parameter in parameters)


def reads_rate(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether the step of a group reads the learning rate on the host."""
    takes_one_by_one = group.get("foreach") is False or group.get("differentiable", False)
    return optimizer in READ_RATE_ON_HOST and takes_one_by_one


def takes_fused_form(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether a parameter group is switched to its fused form when its step is captured.

    Where there is another form that can be captured, doubles take that (fused kernels would round their
    learning rate), and so does a user who asked for `foreach`.
    """
    if "fused" not in group or group.get("differentiable"):
        return False
    parameters = group["params"]
    if optimizer in NOT_FUSED_ON_GPU and any(p.device.type == "cuda" for p in parameters):
        return False
    if not all(p.is_floating_point() and is_dense(p) for p in parameters):
        return False
    return not ("capturable" in group and (group.get("foreach") or has_double(group)))


def is_dense(parameter: Any) -> bool:
    """Whether the elements of a parameter fill its memory without gaps, in any order: kernels may walk it."""
    if parameter.is_contiguous():
        return True
    extent = 1
    # By stride, since any order of dimensions may fill memory, such as channels last.
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def has_double(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group has parameters of float64."""
    return any(p.is_floating_point() and p.itemsize == 8 for p in group["params"])
