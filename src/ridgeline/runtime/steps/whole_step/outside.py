"""Gradients of tensors that a step does not train, from which its trace is kept, and what no program holds.

While a step is traced, `backward()` runs on tensors without data. It would leave such a tensor as `.grad` of
every leaf that it reaches, the weights of another network too, and trace what already stands there.
"""

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ridgeline.errors import CaptureError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.programs.compiling import LossFunction
from ridgeline.reach.generators import HostGenerators
from ridgeline.reach.reach import Reach
from ridgeline.runtime.steps.body.capture_watch import of_accumulation, of_gradient


class OutsideGradients:
    """A loss function to be traced, after which gradients of leaves outside are as they were.

    Args:
        loss_fn: The user's loss function.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._inside: set[int] = set()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss; gradients of leaves outside that it depends on are set aside."""
        loss = self._loss_fn(model, batch)
        if isinstance(loss, Tensor):
            for leaf in _leaves(loss):
                if id(leaf) not in self._inside and id(leaf) not in self._saved:
                    self._saved[id(leaf)] = (leaf, leaf.grad)
                    leaf.grad = None
        return loss

    def start_from(self, tensors: Sequence[Tensor]) -> None:
        """Make these the tensors inside; they begin without gradients, as in a step."""
        self._inside = set(map(id, tensors))
        for tensor in tensors:
            tensor.grad = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put the gradients that were set aside inside back at the end."""
        try:
            yield
        finally:
            for leaf, gradient in self._saved.values():
                leaf.grad = gradient
            self._saved.clear()


def check_hooks(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Refuse hooks and methods that no program calls.

    Raises:
        CaptureError: the optimizer has hooks around its step or a method of its class was replaced in it, or
            a parameter has hooks on its gradient.
    """
    for method in replaced_methods(optimizer):
        raise CaptureError(
            f"wanted an optimizer with the {method}() of its class, since one program for the whole step "
            f"calls no other, got another one put on {type(optimizer).__name__}; do its work after each "
            "training step, or use execution='compiled' or 'eager'"
        )
    count = sum(map(len, step_hooks(optimizer)))
    if count:
        raise CaptureError(
            "wanted an optimizer without step hooks, since one program for the whole step cannot call them, "
            f"got {count} around {type(optimizer).__name__}.step(); clip gradients by clip_norm and do other "
            "work after each training step, or use execution='compiled' or 'eager'"
        )
    for name, parameter in parameters.items():
        if of_gradient(parameter) or of_accumulation(parameter):
            raise CaptureError(
                "wanted parameters without gradient hooks, since gradients stay inside the program of a "
                f"whole step, got a hook on {name!r}; remove it, or use execution='compiled' or 'eager'"
            )


def without_gradients(model: nn.Module, loss_fn: LossFunction, optimizer: Optimizer) -> list[str]:
    """What a step as written leaves gradients of for another optimizer, and a program does not: names."""
    names = {p: name for name, p in model.named_parameters()}
    read = (t for t in Reach(loss_fn).tensors if isinstance(t, nn.Parameter))
    trained = dict.fromkeys(p for p in (*names, *read) if p.requires_grad)
    held = {*parameters_of(optimizer)}
    return [
        names.get(p, f"one of shape {tuple(p.shape)} that the loss function reads")
        for p in trained
        if p not in held
    ]


def check_kept(*roots: Any, shown: Container[int] = ()) -> None:
    """Refuse a step that keeps tensors of its trace where the next step, or the script, would look for them.

    A program computes, and puts nothing into lists, closures and attributes: a hidden state that is carried
    on there would stay what it was, and so would a loss that is shown.

    Args:
        roots: Model, loss function and optimizer, after the trace.
        shown: Numbers of tensors that the program returns, to be put there.

    Raises:
        CaptureError: there is a tensor without data in what they can get at.
    """
    # Only a trace makes tensors without data, so any that can still be reached was left there by it.
    left = (tensor for tensor in Reach(*roots).tensors if isinstance(tensor, FakeTensor))
    kept = next((tensor for tensor in left if id(tensor) not in shown), None)
    if kept is not None:
        raise CaptureError(
            "wanted a step that leaves tensors in the model's buffers and the optimizer only, got one of "
            f"shape {tuple(kept.shape)} that its code keeps elsewhere (an attribute, a list, a closure), "
            "where one program would not renew it; use execution='compiled' or 'eager'"
        )


def check_drawn(before: HostGenerators) -> None:
    """Refuse a step that draws random numbers outside of torch: they would be constants of its program.

    Raises:
        CaptureError: names the generator.
    """
    whose = before.drawn()
    if whose:
        raise CaptureError(
            f"wanted a step that draws random numbers with torch only, got numbers from {whose}, which one "
            "program would never draw again; use torch.rand, or execution='compiled' or 'eager'"
        )


def check_constants(graph: fx.GraphModule) -> None:
    """Refuse a graph that holds tensors without data.

    Raises:
        CaptureError: the traced code kept a tensor of the trace and read it later.
    """
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target)), FakeTensor):
            reader = next(iter(node.users), None)
            raise CaptureError(
                "wanted a step whose tensors all have data, got one that reads a tensor kept from a trace, "
                f"in {getattr(reader, 'target', 'no operator')}; keep what a later step reads in buffers of "
                "the model, or use execution='eager'"
            )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors in whose `.grad` a backward pass from the loss would add."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only the class of AccumulateGrad, the node that writes into `.grad` of a leaf, has this attribute.
        leaf = getattr(node, "variable", None) if hasattr(type(node), "variable") else None
        if isinstance(leaf, Tensor):
            yield leaf
        pending.extend(following for following, _ in node.next_functions)
