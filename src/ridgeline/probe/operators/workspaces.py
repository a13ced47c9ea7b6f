"""Workspaces: the memory that operators take for themselves, measured in one more pass over the step.

A trace knows what operators are given and what they make. Copies of a convolution's operands, partial sums,
what a recurrent layer keeps for its backward pass and cuBLAS's buffers are known to the kernels alone, so
each distinct operator is issued once while the allocator is watched.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler

from ridgeline.errors import first_line
from ridgeline.machine import Setting, Workspace
from ridgeline.probe.operators.clock import ReplayClock
from ridgeline.probe.operators.places import is_only_issued
from ridgeline.probe.operators.replay import WorkloadReplay, tensors_in
from ridgeline.workload import TensorSpec, Workload

MARK = "ridgeline workspace "
"""Names the profiler's range of a call, before the operator's number."""
_MEMORY = "[memory]"
"""What torch's profiler calls the event of an allocation, or of freeing one. Source: torch/csrc/autograd/
profiler_kineto.cpp, releases 2.11 to 2.13."""
_UNREADABLE = (RuntimeError, AttributeError, KeyError, ValueError)
"""What a profiler raises that somebody else uses, and an allocator that does not count."""


class HeldMemory(NamedTuple):
    """Bytes over those before a call: the most at any moment of it, and those when it was done."""

    most: int
    left: int


class _Event(Protocol):
    """What is read of an event of the profiler."""

    def name(self) -> str: ...
    def start_ns(self) -> int: ...
    def end_ns(self) -> int: ...
    def nbytes(self) -> int: ...


def measured_workspaces(
    replay: WorkloadReplay, workload: Workload, setting: Setting, clock: ReplayClock
) -> tuple[dict[str, Workspace], tuple[str, ...]]:
    """The workspace of each distinct operator that can be issued, by its key, and what went wrong.

    The step was issued before: what first calls prepare must not count. Threads must be set already.

    Raises:
        DeviceLostError: an operator left the GPU unusable.

    Cost: One call of each distinct operator, about 0.05 ms more for each, and 5 ms for the CPU's profiler.
        On a GPU cuBLAS lets go of its buffers: not for processes with CUDA graphs that somebody replays.
    """
    keys = [op.key for op in workload.ops]
    seen: set[str] = set()

    def is_wanted(index: int) -> bool:
        is_known = keys[index] in seen
        seen.add(keys[index])
        # What only this call can make, an operator may need that was not seen yet.
        return not is_known or any(is_only_issued(spec) for spec in workload.ops[index].outputs)

    meter = _Meter(workload, setting.device)
    try:
        with torch.no_grad(), meter.watching():
            clock.watch(replay, is_wanted, meter.around)
        found = meter.found()
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {first_line(error, type(error).__name__)}"
        return {}, (f"workspaces of {workload.name} were not measured at {setting}: {reason}",)
    # Reversed, so that the first call of a key is the one that stays.
    return {keys[index]: each for index, each in reversed(found.items())}, ()


class _Meter:
    """Notes what each call made, and what it held meanwhile.

    On a CPU torch's profiler reports each allocation of the calling thread, in order. On a GPU torch's
    allocator counts what is asked of it, on the host: nothing waits for the device.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._ops = workload.ops
        self._device = device
        self._made: dict[int, tuple[int, int]] = {}
        self._held: dict[int, HeldMemory] = {}
        self._profile = profiler.profile(device == "cpu", use_cpu=True, profile_memory=True)

    def watching(self) -> AbstractContextManager[Any]:
        """What is to be entered before the first call."""
        # There is one a process: a second one would end the first.
        if self._device == "cpu" and profiler._is_profiler_enabled:  # noqa: SLF001 - as torch asks it
            raise RuntimeError("torch's profiler is in use; measure where nobody profiles")
        return self._profile

    def around(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call, which is watched."""
        if self._device == "cpu":
            with profiler.record_function(f"{MARK}{index}"):
                result = call(*args, **kwargs)
        else:
            # cuBLAS then asks for its buffers again, in every call that needs them.
            torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - it has no other name
            # The peak is of the whole process, so it begins anew for each call.
            torch.cuda.reset_peak_memory_stats()
            before, _ = _requested()
            result = call(*args, **kwargs)
            left, most = _requested()
            self._held[index] = HeldMemory(most - before, left - before)
        specs = self._ops[index].outputs
        self._made[index] = made_bytes((args, kwargs), tensors_in(result), specs, self._device)
        return result

    def found(self) -> dict[int, Workspace]:
        """The workspace of each operator that was called, by its index."""
        results = self._profile.kineto_results if self._device == "cpu" else None
        events: Any = () if results is None else results.events()
        held = held_in(events) if self._device == "cpu" else self._held
        if missing := [self._ops[i].name for i in self._made if i not in held]:
            raise ValueError(f"wanted what {missing[0]} held, got nothing from the profiler")
        return {i: self._workspace(held[i], *made) for i, made in sorted(self._made.items())}

    def _workspace(self, held: HeldMemory, made: int, kept: int) -> Workspace:
        # On a CPU no library keeps what torch allocated: what is left over was counted with another name.
        library = max(0, held.left - made) if self._device == "cuda" else 0
        return Workspace(
            passing_bytes=max(0, held.most - made - library),
            kept_bytes=kept,
            library_bytes=library,
        )


def held_in(events: Iterable[_Event]) -> dict[int, HeldMemory]:
    """What the calls of a profile held, by the number in the name of their range.

    Events are those of a profile with `profile_memory`, in any order.
    """
    spans: list[tuple[int, int, int]] = []
    changes: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name == _MEMORY:
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(MARK):
            spans.append((event.start_ns(), event.end_ns(), int(name.removeprefix(MARK))))
    changes.sort(key=lambda change: change[0])  # equal times stay in the order in which they came
    found: dict[int, HeldMemory] = {}
    position = 0
    for start, end, index in sorted(spans):
        now = most = 0
        while position < len(changes) and changes[position][0] <= end:
            at, num_bytes = changes[position]
            position += 1
            if at >= start:
                now += num_bytes
                most = max(most, now)
        found[index] = HeldMemory(most, now)
    return found


def made_bytes(
    given: Any, made: Sequence[Tensor], specs: Sequence[TensorSpec], device: str
) -> tuple[int, int]:
    """Bytes of all memory that a call made, and of that part whose size no trace knows.

    `specs` are what was traced of the tensors that it `made`; memory of another device does not count.
    """
    # What was handed in and comes back, changed in place or viewed, is no new memory.
    known = {address for tensor in _given(given) for address, _ in _parts(tensor, device)}
    everything = kept = 0
    for position, tensor in enumerate(made):
        is_unknown = position < len(specs) and is_only_issued(specs[position])
        for address, num_bytes in _parts(tensor, device):
            if address not in known:
                known.add(address)
                everything += num_bytes
                kept += num_bytes if is_unknown else 0
    return everything, kept


def _given(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _given(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _given(each)


def _parts(tensor: Tensor, device: str) -> Iterator[tuple[int, int]]:
    """Address and bytes of the memory of a tensor; a sparse one has two."""
    if tensor.device.type != device:
        return
    if tensor.layout is torch.sparse_coo:
        yield from _parts(tensor._indices(), device)  # noqa: SLF001 - the others ask for sorted rows
        yield from _parts(tensor._values(), device)  # noqa: SLF001
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


def _requested() -> tuple[int, int]:
    """Bytes that torch's allocator was asked for on this GPU: now, and the most since they were reset."""
    stats = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"]
    return int(stats["current"]), int(stats["peak"])
