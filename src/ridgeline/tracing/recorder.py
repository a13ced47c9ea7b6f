"""Records every operator that a step issues, fake or real, in the order of eager execution."""
# ruff: noqa: SLF001 - dispatch state and operators that torch keeps under underscores

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ridgeline.optimizers.groups import parameters_of
from ridgeline.tensors.nests import tensors_in
from ridgeline.tensors.operator_text import dtype_name, encode
from ridgeline.tracing.module_path import ModulePath
from ridgeline.tracing.operators.accumulation import (
    lone_references,
    may_add_in_place,
    runs_python_backward,
)
from ridgeline.tracing.operators.family import family, is_uncounted
from ridgeline.tracing.operators.flops import flops
from ridgeline.tracing.operators.foreign import ForeignWrites, refuse_foreign
from ridgeline.tracing.operators.operands import Operands, operands
from ridgeline.tracing.operators.sparse_fakes import with_entries
from ridgeline.tracing.operators.traffic import traffic
from ridgeline.tracing.storages import Storages
from ridgeline.tracing.subject import Subject
from ridgeline.workload import Family, Phase

aten = torch.ops.aten

_NOT_OPERATORS = frozenset({"prim", "profiler"})
"""Namespaces of calls that ask a tensor something or mark a range: they compute nothing."""

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of what is sent between workers: a plan's own affair, and no operator of the step."""

_WITH_WORKSPACE = frozenset(
    {aten.mkldnn_rnn_layer, aten._cudnn_rnn, aten.cudnn_batch_norm, aten._batch_norm_with_update}
)
"""Operators that also return bytes for their backward, as many as their library likes. They are recorded as
none, as a fake operator makes none: only the operator itself can fill them."""


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


class StepRecorder(TorchDispatchMode):
    """Dispatch mode that records operators while it is active; goes on top of the fake mode.

    It knows the tensors of the step, and the order in which gradients become ready.

    Args:
        subject: What is followed, by hooks, until the recorder is closed. Gradients of fake tensors may reach
            no others.
        check: Called before every operator; what it raises ends the recording.

    Attributes:
        records: What was issued so far.
        storages: The storages seen so far.
        ready: Parameters with the index of the operator that completed their gradient, in that order.
        phase: Entered in the records; set by the caller.
        is_paused: Operators pass by unrecorded.
        scalar_of: Called for `.item()`; returns the number to continue with, or None to ask the tensor. A
            fake one has no value and refuses, so only numbers that do not matter can be made up.
        uncounted: Names of operators that compute but have no FLOP formula.
        collectives: Names of collectives that passed by unrecorded.
    """

    def __init__(self, subject: Subject, check: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._check = check
        self._path = ModulePath(subject.model)
        self._alone = lone_references(subject.mode, subject.device)
        self._is_fake = subject.is_fake
        self._originals = subject.originals
        self._foreign = ForeignWrites()
        self._makers: dict[int, int] = {}
        self._workspaces: set[int] = set()
        self.records: list[Record] = []
        self.storages = Storages()
        self.phase: Phase = "forward"
        self.is_paused = False
        self.scalar_of: Callable[[Tensor], float | None] | None = None
        self.uncounted: dict[str, None] = {}
        self.collectives: dict[str, None] = {}
        # Before the first operator: what is not known by then counts as made by the step.
        for parameter in (*parameters_of(subject.optimizer), *subject.model.parameters()):
            self.storages.assign(parameter, "parameter")
        for buffer in subject.model.buffers():
            self.storages.assign(buffer, "buffer")
        for tensor in tensors_in(subject.batch):
            self.storages.assign(tensor, "batch")
        self.ready: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []
        with ExitStack() as undoing:
            undoing.callback(self.close)
            for name, parameter in subject.parameters.items():
                if parameter.requires_grad:
                    hook = partial(self._completed, name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            undoing.pop_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Issue the operator below and record it."""
        kwargs = kwargs or {}
        if func.namespace in _NOT_OPERATORS or _is_bookkeeping(func):
            return func(*args, **kwargs)
        self._check()  # not before: an error in what autograd does for itself ends the process
        if func.namespace in _COLLECTIVES:
            self.collectives[str(func)] = None
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and self.scalar_of is not None:
            number = self.scalar_of(args[0])
            # Recorded though it is not asked: in a real step the host waits for the device here.
            if number is not None:
                self.storages.now = len(self.records)
                self._record(func, args, kwargs, None)
                return number
        if self._is_fake:
            refuse_foreign(func, args, self._originals)
            # Before it runs: an operator on real tensors alone does compute.
            self._foreign.expect(func, args, kwargs)
        self.storages.now = len(self.records)
        # Issued as what the engine would issue, so that memory and bytes are those of a step without a
        # recorder.
        if self._adds_in_place(func, args, kwargs):
            func = aten.add_.Tensor
        result = func(*args, **kwargs)
        if self._is_fake:
            result = with_entries(func, args, result)
        self._record(func, args, kwargs, result)
        return result

    @property
    def module(self) -> str:
        """The path of the module that is running; empty outside of modules."""
        return self._path.current()

    def close(self) -> None:
        """Take all hooks off and what was written elsewhere back, and stop following storages."""
        for handle in self._handles:
            handle.remove()
        self._foreign.take_back()
        self._path.close()
        self.storages.close()

    def _completed(self, name: str, tensor: Tensor) -> None:
        self.ready.pop(name, None)  # accumulated again: what counts is the last time
        self.ready[name] = len(self.records) - 1
        assert tensor.grad is not None
        self.storages.assign(tensor.grad, "gradient")

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        # Only here: what is not recorded has to run all the same.
        if self.is_paused:
            return
        tensors = operands(func, args, kwargs, result)
        for tensor in tensors.inputs:  # what no op made was there before: constants of the model
            self.storages.number(tensor, "activation" if tensors.is_view else "buffer")
        # By `id`, as tensors compare element by element.
        positions = {id(tensor): index for index, tensor in enumerate(tensors.inputs)}
        read, written = traffic(func, args, kwargs, tensors)
        if func.overloadpacket in _WITH_WORKSPACE:
            # Libraries hand out workspaces as bytes; real results are of other types.
            spare = [tensor for tensor in tensors.made if tensor.dtype is torch.uint8]
            self._workspaces |= {self.storages.number(tensor) for tensor in spare}
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
                    args,
                    kwargs,
                    lambda tensor: positions[id(tensor)],
                    where=str(func),
                    opaque=not self._is_fake,
                ),
                flops=flops(func, args, kwargs, result),
                bytes_read=read,
                bytes_written=written,
            )
        )
        node = torch._C._current_autograd_node()
        if node is not None:
            for use in self.records[-1].outputs:
                # Which node of autograd made it, to distinguish its intermediates from gradients that wait.
                self._makers[use.storage] = node._sequence_nr()

    def _adds_in_place(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether autograd, adding up gradients, would do this addition in place."""
        if self.phase != "backward" or func is not aten.add.Tensor:
            return False
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
        use = use_of(tensor, self.storages)
        is_workspace = use.storage in self._workspaces
        return replace(use, shape=(0,), stride=(1,)) if is_workspace else use


def use_of(tensor: Tensor, storages: Storages) -> Use:
    """What an op uses of a tensor whose storage is numbered by `storages`."""
    is_strided = tensor.layout is torch.strided
    return Use(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if is_strided else (),
        offset=int(tensor.storage_offset()) if is_strided else 0,
        dtype=dtype_name(tensor.dtype),
        storage=storages.number(tensor),
        on_cpu=tensor.device.type == "cpu",
    )


def _is_bookkeeping(func: OpOverload) -> bool:
    """Whether this `detach` is autograd's own and no operator.

    Autograd saves the outputs of operators as detached copies. Real eager execution makes them without
    the dispatcher; under a dispatch mode they show up here, above the key that keeps track of views.
    A `detach` that a model asks for has gone through that key.
    """
    if func is not aten.detach.default:
        return False
    # A key excludes itself when it hands on, so it is excluded here only for what has come through it.
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return not excluded.has(torch._C.DispatchKey.ADInplaceOrView)


def _hands_two_to_one(node: torch.autograd.graph.Node) -> bool:
    """Whether two gradients of an autograd node go to the same place, as those of `x * x` do."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _computing_dtype(tensors: Operands) -> str:
    """The first floating dtype of the inputs, else of the results, else the first of any."""
    both = (*tensors.inputs, *tensors.results)
    for tensor in both:
        if tensor.is_floating_point() or tensor.is_complex():
            return dtype_name(tensor.dtype)
    return dtype_name(both[0].dtype) if both else "none"
