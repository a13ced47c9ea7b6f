"""Records every operator that a fake step issues, in the order of eager execution."""
# ruff: noqa: SLF001 - dispatch state and operators that torch keeps under underscores

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import WorkloadError
from ridgeline.tracing.accumulation import (
    References,
    may_add_in_place,
    runs_python_backward,
)
from ridgeline.tracing.arguments import dtype_name, encode
from ridgeline.tracing.family import family, is_uncounted
from ridgeline.tracing.flops import flops
from ridgeline.tracing.module_path import ModulePath
from ridgeline.tracing.operands import Operands, operands
from ridgeline.tracing.storages import Storages
from ridgeline.tracing.traffic import traffic
from ridgeline.workload import Family, Phase

aten = torch.ops.aten

_NOT_OPERATORS = frozenset({"prim", "profiler"})
"""Namespaces of calls that ask a tensor something or mark a range: they compute nothing."""


@dataclass(frozen=True)
class Use:
    """One tensor of a recorded op: its geometry, the number of its storage, and whether it is on the CPU."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    storage: int
    on_cpu: bool = False


@dataclass(frozen=True)
class Record:
    """One operator as it was issued; becomes an `Op` when roles and dependencies are known.

    `written` numbers the storages that were changed in place.
    """

    name: str
    phase: Phase
    module: str
    family: Family
    dtype: str
    inputs: tuple[Use, ...]
    outputs: tuple[Use, ...]
    written: tuple[int, ...]
    is_view: bool
    arguments: str
    flops: int
    bytes_read: int
    bytes_written: int


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operators while it is active; goes on top of the fake mode.

    Attributes:
        records: What was issued so far.
        storages: The storages seen so far.
        phase: Entered in the records; set by the caller.
        is_paused: Operators pass by unrecorded.
        scalar_of: Called for `.item()` on a fake tensor; returns the number to go on with, or None to
            refuse. The tensor has no value, so only numbers that do not matter can be made up.
        issued: For each record, the nodes that it added to the functional graph, where one is traced:
            (first, last + 1) position.
        uncounted: Names of operators that compute but have no FLOP formula.
        in_place: Indices of the records that are gradients added in place.
    """

    def __init__(
        self,
        path: ModulePath,
        storages: Storages,
        *,
        alone: References,
        in_place: AbstractSet[int] | None = None,
    ) -> None:
        """A recorder with no records.

        Args:
            path: Knows the running module.
            storages: Knows the tensors of the model and the batch.
            alone: References to a gradient that only autograd holds, see `lone_references`.
            in_place: Where given, exactly these records are gradients added in place.
        """
        super().__init__()
        self.in_place: set[int] = set()
        self._given_in_place = in_place
        self._alone = alone
        self._makers: dict[int, int] = {}
        self.records: list[Record] = []
        self.storages = storages
        self.phase: Phase = "forward"
        self.is_paused = False
        self.scalar_of: Callable[[Tensor], float | None] | None = None
        self.issued: list[tuple[int, int]] = []
        self.uncounted: dict[str, None] = {}
        self._path = path

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Issue the operator below and record it."""
        kwargs = kwargs or {}
        if func.namespace in _NOT_OPERATORS or _is_bookkeeping(func):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and self.scalar_of is not None:
            number = self.scalar_of(args[0])
            if number is not None:
                self._record(func, args, kwargs, None, self._now())
                return number
        self._refuse_foreign(func, args)
        start = self._now()
        if self._adds_in_place(func, args, kwargs):
            self.in_place.add(len(self.records))
            func = aten.add_.Tensor
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result, start)
        return result

    @property
    def module(self) -> str:
        """The path of the module that is running; empty outside of modules."""
        return self._path.current()

    def _now(self) -> int:
        self.storages.now = len(self.records)
        return _graph_length()

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        start: int,
    ) -> None:
        if self.is_paused:
            return
        tensors = operands(func, args, kwargs, result)
        for tensor in tensors.inputs:  # what no op made was there before: constants of the model
            self.storages.number(tensor, "activation" if tensors.is_view else "buffer")
        positions = {id(tensor): index for index, tensor in enumerate(tensors.inputs)}
        read, written = traffic(func, args, kwargs, tensors)
        if is_uncounted(func):
            self.uncounted[str(func)] = None
        self.records.append(
            Record(
                name=str(func),
                phase=self.phase,
                module=self.module,
                family=family(func, is_view=tensors.is_view),
                dtype=_computing_dtype(tensors),
                inputs=tuple(self._use(tensor) for tensor in tensors.inputs),
                outputs=tuple(self._use(tensor) for tensor in tensors.results),
                written=tuple(self.storages.number(tensor) for tensor in tensors.written),
                is_view=tensors.is_view,
                arguments=encode(
                    args, kwargs, lambda tensor: positions[id(tensor)], where=str(func)
                ),
                flops=flops(func, args, kwargs, result),
                bytes_read=read,
                bytes_written=written,
            )
        )
        self.issued.append((start, _graph_length()))

        node = torch._C._current_autograd_node()
        if node is not None:
            for use in self.records[-1].outputs:
                self._makers[use.storage] = node._sequence_nr()

    def _adds_in_place(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether autograd, adding up gradients, would do this addition in place."""
        if self.phase != "backward" or func is not aten.add.Tensor:
            return False
        if self._given_in_place is not None:
            return len(self.records) in self._given_in_place
        node = torch._C._current_autograd_node()
        if node is None or not may_add_in_place(func, args, kwargs, self._alone):
            return False
        if isinstance(node, BackwardCFunction) and runs_python_backward():
            return False
        # What the running node has made is an intermediate of its formula, not a gradient that waits,
        # unless the node hands two gradients to one tensor.
        is_waiting = self._makers.get(self.storages.number(args[0])) != node._sequence_nr()
        return is_waiting or _hands_two_to_one(node)

    def _use(self, tensor: Tensor) -> Use:
        is_strided = tensor.layout is torch.strided
        return Use(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if is_strided else (),
            offset=int(tensor.storage_offset()) if is_strided else 0,
            dtype=dtype_name(tensor.dtype),
            storage=self.storages.number(tensor),
            on_cpu=tensor.device.type == "cpu",
        )

    def _refuse_foreign(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """Stop before a gradient could reach a real tensor that is not the model's."""
        for value in args:
            if isinstance(value, (list, tuple)):
                self._refuse_foreign(func, tuple(value))
            elif (
                isinstance(value, Tensor)
                and not isinstance(value, FakeTensor)
                and value.requires_grad
            ):
                raise WorkloadError(
                    "wanted a step that trains only the model it is given, got a tensor of shape "
                    f"{tuple(value.shape)} that requires grad and is not in that model, in {func}; "
                    "use the model that is passed to loss_fn, make a trained loss its submodule, and freeze "
                    "another network (a GAN's) with requires_grad_(False) while this step is called"
                )


def _is_bookkeeping(func: OpOverload) -> bool:
    """Whether this `detach` is autograd's own and no operator.

    Autograd saves the outputs of operators as detached copies. Real eager execution makes them without
    the dispatcher; under a dispatch mode they show up here, above the key that keeps track of views.
    A `detach` that a model asks for has gone through that key.
    """
    if func is not aten.detach.default:
        return False
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return not excluded.has(torch._C.DispatchKey.ADInplaceOrView)


def _hands_two_to_one(node: torch.autograd.graph.Node) -> bool:
    """Whether two gradients of an autograd node go to the same place, as those of `x * x` do."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _graph_length() -> int:
    """Nodes of the functional graph that is being traced; 0 when none is."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


def _computing_dtype(tensors: Operands) -> str:
    """The first floating dtype of the inputs, else of the results, else the first of any."""
    both = (*tensors.inputs, *tensors.results)
    for tensor in both:
        if tensor.is_floating_point() or tensor.is_complex():
            return dtype_name(tensor.dtype)
    return dtype_name(both[0].dtype) if both else "none"
