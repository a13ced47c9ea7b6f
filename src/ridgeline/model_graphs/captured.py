"""One call of a model as two CUDA graphs: its forward pass, and its backward pass.

Around them everything runs as it was written: the loss may read its results on the host, match boxes there,
or wait for the device, as a step that is one graph cannot.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.capture.capturing import capturing, on_stream, release
from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.errors import CaptureError
from ridgeline.optimizers.step_hooks import emptied
from ridgeline.reach.renewals import renewals
from ridgeline.reach.undo import Undo
from ridgeline.tensors.copies import copy_into, own_copy
from ridgeline.tensors.kept_gradients import KeptMemory

Run = Callable[..., tuple[Tensor, ...]]
WARM_UP_CALLS = 3
"""Forward and backward passes before the capture: libraries make their workspaces, compilers compile."""


class CapturedModel:
    """A function of tensors with its backward pass, captured; called with tensors like the examples.

    Its results are copies, so keeping one keeps its values. Gradients of parameters are not: they are
    what `p.grad` refers to until the next call overwrites them, unless `copies_gradients` is set.

    Args:
        run: The function. Parameters that it reaches, wherever they are kept, get gradients beside the
            arguments that require them.
        written: The same as it is written, which says what is behind each result: of compiled code all
            parameters are.
        tensors: Example arguments; copied.
        before: The state before the calls, put back before the capture.
        modules: All that the function may call.

    Attributes:
        copies_gradients: Gradients of parameters are copies, too.

    Raises:
        CaptureError: the capture failed.

    Cost: Three calls with their backward passes and one as it is written, and the memory of one; waits for
        the device.
    """

    def __init__(
        self,
        run: Run,
        written: Run,
        tensors: Sequence[Tensor],
        before: Undo,
        modules: Iterable[nn.Module],
    ) -> None:
        # Copies of our own, which replays read and callers never see.
        self._inputs = [own_copy(tensor) for tensor in tensors]
        self._targets = [tensor.detach() for tensor in self._inputs]
        self.copies_gradients = False
        self._serial = 0
        self._spent = 0
        # Warm-up and capture on one stream: libraries keep a workspace for each.
        stream = torch.cuda.Stream()
        self._parameters: list[Tensor] = []
        with on_stream(stream):
            for _ in range(WARM_UP_CALLS):
                outputs = run(*self._inputs)
                inputs = {*map(id, self._inputs)}
                # In each call, as lazy modules and compilers may put others in their place in the first one.
                self._parameters = [p for p in _leaves_behind(outputs) if id(p) not in inputs]
                self._backward_of(outputs)
            # What gets gradients by each result that has some: a loss may use another one in each step.
            trained = [out for out in written(*self._inputs) if out.requires_grad]
            self._behind = [{*map(id, _leaves_behind([out]))} for out in trained]
        before.restore()
        self.dropout = DropoutStates(modules)
        self._graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        self._finalizer = weakref.finalize(self, release, self._graphs)
        with capturing(self._graphs[0], "the model", stream=stream):
            self._outputs = run(*self._inputs)
        self._trained = [out.requires_grad for out in self._outputs]
        # Where the loss's gradients arrive; only their places matter, so they need no values yet.
        self._seeds = [torch.empty_like(out) for out in self._outputs if out.requires_grad]
        # One pool, since the second graph reads what the first has saved.
        pool = self._graphs[0].pool()
        with capturing(self._graphs[1], "the model", stream=stream, pool=pool):
            self._gradients = self._backward_of(self._outputs, self._seeds)
        # Their graph would hold every tensor between, which the pool keeps without that.
        self._outputs = tuple(out.detach() for out in self._outputs)
        self._renewals = renewals(before)
        given = self._gradients[len(self._gradients) - len(self._parameters) :]
        self._kept = KeptMemory(zip(self._parameters, given, strict=True))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One call; the results are connected with arguments and parameters for a backward pass.

        Raises:
            CaptureError: later, in a backward pass that comes twice, after another call, or with
                `create_graph=True`.

        Cost: Two launches, and a copy of each argument and result.
        """
        # Parameters as arguments, so that autograd adds their gradients itself, with hooks and all.
        outputs = _Replayed.apply(self, *tensors, *self._parameters)
        pairs = zip(outputs, self._trained, strict=True)
        return tuple(out if is_trained else out.detach() for out, is_trained in pairs)

    def has_kept_gradients(self) -> bool:
        """Whether somebody keeps a gradient of the last call, which the next one would write over.

        One that is still its parameter's is moved elsewhere by that, whoever keeps it, too.
        """
        return not self.copies_gradients and self._kept.is_used()

    def forward(self, tensors: Sequence[Tensor]) -> tuple[int, tuple[Tensor, ...]]:
        """Replay the forward pass; the number of this call, and its results."""
        self._serial += 1
        self._give_away()
        copy_into(self._targets, tensors)
        self.dropout.bring()
        self._graphs[0].replay()
        self.dropout.leave()
        for renew in self._renewals:
            renew()
        return self._serial, tuple(out.clone() for out in self._outputs)

    def backward(self, serial: int, seeds: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Replay the backward pass of the call with that number; a seed is None for a result not used."""
        if serial != self._serial or serial == self._spent:
            raise CaptureError(
                "wanted one backward pass for each call of the captured model, before the next call, got "
                "another; use execution='eager'"
            )
        self._spent = serial
        pairs = zip(seeds, self._trained, strict=True)
        given = [seed for seed, is_trained in pairs if is_trained]
        reached: set[int] = set()
        filled: list[Tensor] = []
        for seed, place, behind in zip(given, self._seeds, self._behind, strict=True):
            reached |= set() if seed is None else behind
            filled.append(torch.zeros_like(place) if seed is None else seed)
        copy_into(self._seeds, filled)
        self._graphs[1].replay()
        found = iter(self._gradients)
        give = _copied if self.copies_gradients else _shared

        # No zeros for what is behind unused results alone: momentum and weight decay would follow them.
        def given_to(x: Tensor, give: Callable[[Tensor | None], Tensor | None]) -> Tensor | None:
            gradient = next(found)
            return give(gradient) if id(x) in reached else None

        # The caller keeps the gradient of an argument, which no step clears.
        of_inputs = [given_to(x, _copied) if x.requires_grad else None for x in self._inputs]
        return (*of_inputs, *(given_to(x, give) for x in self._parameters))

    def close(self) -> None:
        """Drop the graphs.

        Cost: Waits for the device.
        """
        if self._finalizer.alive:
            torch.cuda.synchronize()
            self._finalizer()

    def _give_away(self) -> None:
        """Move the gradients that were not cleared, before both replays: autograd will add to them.

        They may lie where the forward pass writes: the graphs share memory.
        """
        for gradient in self._kept.shown():
            gradient.data = gradient.clone()  # the same object, as where autograd adds in place

    def _backward_of(
        self, outputs: Sequence[Tensor], seeds: Sequence[Tensor] | None = None
    ) -> tuple[Tensor | None, ...]:
        trained = [out for out in outputs if out.requires_grad]
        if seeds is None:
            # Warm-up only: zeros add nothing, whatever follows.
            seeds = [torch.zeros_like(out) for out in trained]
        return gradients_of(trained, (*self._inputs, *self._parameters), seeds)


def _leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in which a backward pass from results would add gradients."""
    found: dict[int, Tensor] = {}
    for node in nodes_behind(outputs):
        if type(node).__name__ == "AccumulateGrad":
            # Found from the results, since parameters may be kept where no module lists them.
            found[id(node.variable)] = node.variable
    return [*found.values()]


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph from which tensors were made, each once."""
    nodes: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class _Replayed(torch.autograd.Function):
    """A replay as a node of autograd's graph; it hands the gradients to whatever waits for them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, captured: CapturedModel, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured = captured
        ctx.set_materialize_grads(False)
        num_inputs = len(captured._inputs)  # noqa: SLF001 - the node is part of it
        ctx.serial, outputs = captured.forward(tensors[:num_inputs])
        return outputs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        # `once_differentiable` looks at the seeds alone: the parameters' part would be missing, unsaid.
        if torch.is_grad_enabled():
            raise CaptureError(
                "wanted one backward pass through the captured model, got one to be differentiated again, "
                "create_graph=True, and the graph that is replayed has none for that; use execution='graph' "
                "or 'eager'"
            )
        return (None, *ctx.captured.backward(ctx.serial, grad_outputs))


def gradients_of(
    outputs: Sequence[Tensor], sources: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the sources that require them, computed outside of autocast, as a step does.

    Before the hooks on the sources: those are called by the backward pass in which a replay stands.
    """
    wanted = [x for x in sources if x.requires_grad]
    # Autograd knows the dictionary of hooks, not what is in it.
    hooks = [found for x in wanted if (found := x._backward_hooks)]  # noqa: SLF001 - nothing public
    off = torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False)
    with off[0], off[1], emptied(hooks):
        return torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _shared(gradient: Tensor | None) -> Tensor | None:
    """A new tensor on the same memory: autograd keeps it as it is, and adds to nothing of ours."""
    return None if gradient is None else gradient.detach()
