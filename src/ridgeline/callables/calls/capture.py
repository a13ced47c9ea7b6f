"""One capture of a function: its graph, given arguments wherever they are, its result handed out each time.

A result is an alias of the graph's memory. A caller that holds it, or a view of it, keeps the graph from
being replayed: the storage counts its holders.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.sources import can_redirect, redirections
from ridgeline.capture.capturing import capturing
from ridgeline.tensors.copies import copy_into, is_noted
from ridgeline.tensors.nests import builder, tensors_in

_num_holders = torch._C._storage_Use_Count  # noqa: SLF001 - what torch's own graph trees use


class CallCapture:
    """One captured graph with its own memory, and the tensors of its result.

    Args:
        fn: The function, without gradients.
        inputs: The arguments that the graph reads, at their addresses; their tensors are dense.
        stream: Captured on it.
        copies: The graph itself copies the arguments of a launch into `inputs`, where CUDA allows that.

    Attributes:
        graph: The captured graph.
        launch: Copies the tensors of arguments, of the shapes and dtypes of those of `inputs`, and replays.
        tensors: What it writes as its result.

    Raises:
        CaptureError: the capture failed.

    Cost: Waits for the device, and gives cached memory back to it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[Any, ...],
        stream: torch.cuda.Stream,
        *,
        copies: bool,
    ) -> None:
        targets = tensors_in(inputs)
        # Either the graph copies all inputs or torch does: a mixture would have both costs in each call.
        copied = targets if copies and can_redirect(targets) else []
        sources = [torch.empty_like(target) for target in copied]
        # Kept beside what is launched, since the nodes that copy inputs are looked up in it.
        self.graph = torch.cuda.CUDAGraph(keep_graph=bool(copied))
        captured = capturing(self.graph, "the function", stream=stream, instead="mode='eager'")
        with captured, torch.no_grad():
            # First in the graph: what the function writes into its inputs must come after what the caller
            # gives.
            for target, source in zip(copied, sources, strict=True):
                target.copy_(source)
            result = fn(*inputs)
        replay = self.graph.replay
        if copied:
            self.graph.instantiate()
            self.launch = _redirecting(redirections(self.graph, copied), copied, replay)
        else:
            self.launch = _copying(targets, replay)
        # Only `result` is kept of the call: tensors in between belong to the pool, which replays reuse.
        self._leaves, structure = pytree.tree_flatten(result)
        self._build = builder(structure)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._storages = list({t.untyped_storage()._cdata for t in self.tensors})  # noqa: SLF001
        # Counted now, while nobody but this object holds them.
        self._holders = [_num_holders(storage) for storage in self._storages]
        self._is_single = structure.is_leaf() and len(self.tensors) == 1
        self._result = result

    def replayer(self) -> Callable[[], Any]:
        """A function that replays, and returns the very tensors that the graph writes."""
        launch, result = self.graph.replay, self._result

        def replay() -> Any:
            launch()
            return result

        return replay

    def is_free(self) -> bool:
        """Whether nothing holds a result of an earlier replay, or a view of one."""
        return [*map(_num_holders, self._storages)] == self._holders

    def aliases(self) -> Any:
        """The result as new tensors on the graph's memory; of inference, where the code's would be."""
        if torch.is_inference_mode_enabled():
            return self._map(_of_inference)
        return self.tensors[0].detach() if self._is_single else self._map(Tensor.detach)

    def copies(self) -> Any:
        """The result in memory of its own."""
        return self.tensors[0].clone() if self._is_single else self._map(Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """A tensor that the result holds twice is one tensor there, too."""
        made = {id(tensor): change(tensor) for tensor in self.tensors}
        leaves = [made.get(id(leaf), leaf) for leaf in self._leaves]
        return self._build(leaves)


def _of_inference(tensor: Tensor) -> Tensor:
    """The memory of a tensor as a tensor that is made now; `detach` gives one of the mode of its making."""
    if is_noted(tensor):  # a note goes along with no memory alone
        return tensor.clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return made.set_(tensor.untyped_storage(), *place)


def _redirecting(
    redirects: list[Callable[[int], None]], targets: list[Tensor], replay: Callable[[], None]
) -> Callable[..., None]:
    """Launches that let the graph copy its inputs from where they are."""
    strides = [target.stride() for target in targets]
    last = [0] * len(targets)

    def launch(*given: Tensor) -> None:
        given = tuple(map(_dense, given, targets, strides))  # held until the launch
        for index, x in enumerate(given):
            address = x.data_ptr()
            # A change takes 3 us of the host, and arguments mostly come from the same place.
            if address != last[index]:
                redirects[index](address)
                last[index] = address
        replay()

    if len(targets) > 1:
        return launch
    (redirect,), (target,), (stride,), before = redirects, targets, strides, 0

    def launch_one(x: Tensor) -> None:
        """The same for one input; its time is part of each call's."""
        nonlocal before
        x = _dense(x, target, stride)
        address = x.data_ptr()
        if address != before:
            redirect(address)
            before = address
        replay()

    return launch_one


def _dense(x: Tensor, target: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor in the layout of the one that it is copied to byte by byte, with its own sign."""
    if x.stride() == stride and not is_noted(x):
        return x
    return torch.empty_like(target).copy_(x)


def _copying(targets: list[Tensor], replay: Callable[[], None]) -> Callable[..., None]:

    def launch(*given: Tensor) -> None:
        copy_into(targets, given)
        replay()

    return launch
