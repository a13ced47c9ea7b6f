"""A whole training step as one symbolic program.

Forward, loss, backward, clipping and the optimizer's own `step()` are traced into one FX graph of aten
operators. Its inputs are the lifted state and the batch; it writes new state into its inputs and returns
the loss. The graph can be run as it is, compiled, replayed as a CUDA graph, or packaged.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ridgeline.capture.lifted_constants import lift_constants
from ridgeline.capture.unchecked import unchecked
from ridgeline.optimizers.shared_memory import sharing
from ridgeline.plan import Plan, Precision
from ridgeline.reach.generators import HostGenerators
from ridgeline.reach.undo import Undo
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import LossFunction, StepBody
from ridgeline.runtime.steps.whole_step.draws.decided_draws import take_host_draws
from ridgeline.runtime.steps.whole_step.draws.forked_draws import is_draw, refusing_forked_draws
from ridgeline.runtime.steps.whole_step.draws.random_order import draw_in_memory_order
from ridgeline.runtime.steps.whole_step.lifting import LiftedState, StateTensor
from ridgeline.runtime.steps.whole_step.names.left import LeftTensors
from ridgeline.runtime.steps.whole_step.names.shown import Carried, Shown
from ridgeline.runtime.steps.whole_step.outside import (
    OutsideGradients,
    check_constants,
    check_drawn,
    check_hooks,
    check_kept,
)
from ridgeline.runtime.steps.whole_step.scalar_gathering import gather_scalars
from ridgeline.runtime.steps.whole_step.shared_state import written_state
from ridgeline.runtime.steps.whole_step.trace import TracedOptimizer, trace_graph
from ridgeline.tensors import batch as batches
from ridgeline.tensors.copies import num_writes
from ridgeline.tensors.nests import tensors_in


class StepProgram:
    """One training step for batches of one shape: `loss, = program.graph(*state, *batch tensors)`.

    Made by `trace_step`. The graph updates the state tensors in place.

    Attributes:
        graph: FX graph of aten operators; forward, backward and optimizer.
        state: The lifted tensors in the order of the graph's first inputs.
        inputs: Copies of the example batch's tensors, in the order of the last inputs.
        batch: The batch made of `inputs`.
        signature: Structure, shapes and dtypes of the batch that it is for.
        lifted: Where the state comes from.
        clip_norm: Total norm that gradients are clipped to, or None; a constant of the program.
        accumulate: Micro-batches per step.
        written: Places among `inputs` that the step writes in place.
        shown: What it returns behind the loss, to be put under names.
        carried: What of its state is found under those names before each run.
        host_draws: Random numbers that a step as written draws on the host of a GPU, and that decide nothing.
        device: Where the step runs.

    Raises:
        CaptureError: see `written_state`.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        state: tuple[StateTensor, ...],
        batch: Any,
        lifted: LiftedState,
        *,
        clip_norm: float | None,
        accumulate: int,
        written: Sequence[int] = (),
        shown: Shown | None = None,
        carried: Sequence[Carried] = (),
    ) -> None:
        self.graph = graph
        self.shown = shown or Shown()
        self.carried = tuple(carried)
        self.written = tuple(written)
        self.state = state
        self._written_state = written_state(graph.graph, state)
        self.batch = batch
        self.inputs = tensors_in(batch)
        self.signature = batches.signature(batch)
        self.lifted = lifted
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.device = (*(entry.tensor for entry in state), *self.inputs)[0].device
        self.host_draws = take_host_draws(graph) if self.device.type != "cpu" else ()

    @property
    def loss(self) -> Tensor:
        """The loss as tracing saw it: shape and dtype without a value."""
        output = next(node for node in self.graph.graph.nodes if node.op == "output")
        return output.args[0][0].meta["val"]

    def arguments(self) -> list[Tensor]:
        """All inputs of the graph: the state, then the example batch's tensors."""
        return [*(entry.tensor for entry in self.state), *self.inputs]

    def meets(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a batch's tensors may share elements with what the step writes.

        Cost: 0.5 us a tensor; 1.5 us and that for all state where the step writes into its batch.
        """
        if self._written_state.meets(inputs):
            return True
        if not self.written:
            return False
        read = [tensor for place, tensor in enumerate(inputs) if place not in self.written]
        read += [entry.tensor for entry in self.state]
        return sharing([inputs[place] for place in self.written], read) is not None

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """One step, operator by operator; the loss."""
        with torch.no_grad():
            return self.graph(*(entry.tensor for entry in self.state), *inputs)[0]

    @property
    def num_random_ops(self) -> int:
        """Operators that draw random numbers."""
        return sum(map(is_draw, self.graph.graph.nodes))

    def __repr__(self) -> str:
        nodes = sum(node.op == "call_function" for node in self.graph.graph.nodes)
        return f"StepProgram({nodes} operators, {len(self.state)} state tensors)"


def trace_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: Optimizer,
    batch: Any,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    precision: Precision = "as-is",
    lifted: LiftedState | None = None,
    beside: Sequence[Any] = (),
) -> StepProgram:
    """The training step as one program; nothing is executed and nothing changed.

    Traces `StepBody`. Python's numbers (weight decay) become constants, rates and all other state inputs.

    Args:
        model: Its training flags are those of the program.
        loss_fn: `loss_fn(model, batch)` gives the mean loss as a scalar tensor.
        optimizer: Its `step()` reads no values; it has its state, which an eager step makes.
        batch: An example on the model's device; its tensors are copied.
        clip_norm: Total norm that gradients are clipped to, or None.
        accumulate: Micro-batches per step.
        precision: As in plans.
        lifted: State lifted before from the same model and optimizer; None to lift it now.
        beside: Containers of libraries, some of which would remember the class of a trace's tensors.

    Raises:
        CaptureError: the step reads a value; the optimizer has no state yet; or see `check_hooks`,
            `check_drawn`, `LeftTensors`, `refusing_forked_draws` and `written_state`.
        PlanError: the optimizer has parameters that neither model nor loss function have.
        WorkloadError: the loss is not a scalar that depends on the parameters.

    Cost: About as long as ten eager steps; no computation, no random numbers.
    """
    example = batches.apart(batch)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    lifted = lifted or LiftedState(model, optimizer, device, loss_fn)
    check_hooks(lifted.parameters(), optimizer)
    plan, outside = Plan(accumulate=accumulate, precision=precision), OutsideGradients(loss_fn)

    def body() -> StepBody:
        traced: Any = TracedOptimizer(optimizer)
        return StepBody(model, outside, traced, plan, None, clip_norm=clip_norm, device=device)

    written = list[int]()
    # Operators on tensors outside that need nothing of the trace are executed while it is made.
    before = Undo(model, loss_fn, optimizer, spared=lifted.tensors(), beside=beside)
    left, host = LeftTensors(before), HostGenerators.now()
    step = _stepping(lifted, outside, body, pytree.tree_flatten(example), written, left)
    try:
        with outside.kept(), unchecked(), refusing_forked_draws():
            graph = trace_graph(step, [*lifted.examples(), *tensors_in(example)])
        check_drawn(host)
        constants, carried, shown = _outside_tensors(graph, len(lifted.entries), left)
        check_kept(model, loss_fn, optimizer, shown=left.held())
    finally:
        before.restore()
    named = [*_constants(constants, carried)]
    return StepProgram(
        graph,
        (*lifted.entries, *named),
        example,
        lifted,
        clip_norm=clip_norm,
        accumulate=accumulate,
        written=written,
        shown=shown,
        carried=[Carried(named[n].tensor, weakref.ref(constants[n])) for n in carried],
    )


def _constants(found: Sequence[Tensor], carried: Sequence[int]) -> Iterator[StateTensor]:
    """Tensors of the outside as state of a program; those that make way for others are read from copies."""
    for number, tensor in enumerate(found):
        own = tensor.detach().clone() if number in carried else tensor.detach()
        yield StateTensor(f"constant/{number}", "constant", own)


def _stepping(
    lifted: LiftedState,
    outside: OutsideGradients,
    body: Callable[[], StepBody],
    example: tuple[list[Any], pytree.TreeSpec],
    written: list[int],
    left: LeftTensors,
) -> Callable[..., list[Tensor]]:
    """What is traced: gives the loss of a step on tensors that stand in for state and batch.

    `written` receives the places of the batch's tensors that it writes.
    """
    flat, structure = example

    def step(*tensors: Tensor) -> list[Tensor]:
        """Runs on tensors without data, and is what becomes the graph."""
        state, brought = tensors[: len(lifted.entries)], tensors[len(lifted.entries) :]
        before, leaves = num_writes(brought), iter(brought)
        outside.start_from(tensors)
        inner = [next(leaves) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        batch = pytree.tree_unflatten(inner, structure)
        loss = lifted.run_substituted(state, lambda: body()(batch, Recorder(HostClock())))
        # Asked of the trace: compiled code writes without counting.
        counts = zip(num_writes(brought), before, strict=True)
        written[:] = [place for place, (now, then) in enumerate(counts) if now != then]
        return [loss, *left.found(brought, state, lifted.tensors())]

    return step


def _outside_tensors(
    graph: fx.GraphModule, position: int, left: LeftTensors
) -> tuple[list[Tensor], list[int], Shown]:
    """Make inputs of the tensors that the trace found outside, and tidy the graph up.

    Returns:
        These tensors, the places of those for which the step puts others, and all that it puts under names.
    """
    check_constants(graph)
    constants = lift_constants(graph, position)
    gather_scalars(graph.graph)
    draw_in_memory_order(graph.graph)
    carried = left.carried(constants)
    shown = left.shown(graph.graph, position + len(constants), [position + n for n in carried])
    graph.recompile()
    return constants, carried, shown


def trace_body(
    body: StepBody, batch: Any, lifted: LiftedState | None = None, beside: Sequence[Any] = ()
) -> StepProgram:
    """`trace_step` of a step body.

    Raises:
        CaptureError: see `trace_step`.
    """
    return trace_step(
        body.model,
        body.loss_fn,
        body.optimizer,
        batch,
        clip_norm=body.clip_norm,
        accumulate=body.plan.accumulate,
        precision=body.plan.precision,
        lifted=lifted,
        beside=beside,
    )
