"""Issue a workload's ops in their order, on tensors that live as long as they do in the real step.

An operator timed in a loop by itself finds its inputs in cache and its output's memory just freed
and mapped. In a step it finds neither: activations written long ago come from memory, and fresh
outputs cost page faults. Replaying the step keeps all of that: each input is the output of the op
that made it, outputs die after their last reader, parameters and optimizer state persist. Only
what must be in range (indices, probabilities) is made up for each op that insists on it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import DeviceLostError, WorkloadError, first_line
from ridgeline.probe.operators import rebuild, values
from ridgeline.probe.operators.places import (
    InputSource,
    Output,
    Place,
    Places,
    is_only_issued,
    valid,
)
from ridgeline.probe.operators.valid_inputs import valid_inputs
from ridgeline.workload import Op, TensorSpec

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

_WITH_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators that make the workspace of their backward only where gradients are on, as in a real step."""

_LASTING = ("parameter", "state", "buffer")


@dataclass(frozen=True)
class Instruction:
    """One op, ready to be issued; `only_issued` are the sources that only their own op makes."""

    op: Op
    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    sources: tuple[InputSource, ...]
    only_issued: tuple[InputSource, ...]


@dataclass(frozen=True)
class ReplayWatch:
    """What to do around every op that is issued, outside of its time.

    Attributes:
        before: Called with the index of the op.
        pace: Called last before the op.
        settle: Called after it; what it raises is the op's failure.
        around: Called with the index of the op, its call and the arguments in place of the call itself; it
            returns what the call returns.
    """

    before: Callable[[int], None] | None = None
    pace: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    around: Callable[..., Any] | None = None


class WorkloadReplay:
    """A workload's ops with their tensors, ready to run again and again.

    Args:
        ops: All ops of the step, in order.
        device: Where to run them.
        has_host: The step was traced on a GPU, so some of its tensors may be the host's.
        skip: Keys of ops that are not to be issued.

    Attributes:
        failures: Keys of ops that could not be rebuilt or issued, with the reason.
        makes_for: Keys of ops that need what only one can make, by its index, and of those that need these.
        ended_at: The op at which memory ran out in the last pass, so that the pass ended there; or None.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        device: torch.device,
        *,
        has_host: bool = False,
        skip: Collection[str] = (),
    ) -> None:
        self.failures: dict[str, str] = {}
        self.ended_at: int | None = None
        self._skip = frozenset(skip)
        self._ops = tuple(ops)
        self._device = device
        self._has_host = has_host
        self._pool: dict[Place, Tensor] = {}
        self._values: dict[Output, Tensor] = {}
        self._not_real: set[Output] = set()
        self._read: dict[int, list[int]] = defaultdict(list)
        self._dead: dict[int, list[Output]] = defaultdict(list)
        self._program = self._compile()
        self.makes_for = self._needed()

    def run(
        self,
        wanted: Callable[[int], bool],
        mark: Callable[[], Any] = time.perf_counter_ns,
        watch: ReplayWatch = ReplayWatch(),
    ) -> dict[int, tuple[Any, Any]]:
        """One pass over the step: the marks before and after each op that was issued, by its index.

        Args:
            wanted: Whether to issue op `index`; otherwise its outputs are made without it.
            mark: The clock in ns, or on GPUs a recorded event.
            watch: What to do around every op.

        Raises:
            DeviceLostError: an op left the GPU unusable.
        """
        taken: dict[int, tuple[Any, Any]] = {}
        self.ended_at = None
        index = 0
        try:
            for index, step in enumerate(self._program):
                if step is None or not self._can_issue(step) or not wanted(index):
                    self._stand_in(index)
                    continue
                marks = self._issue(index, step, mark, watch)
                if marks is not None:
                    taken[index] = marks
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            self.failures.setdefault(
                self._ops[index].key, f"memory ran out: {first_line(error, type(error).__name__)}"
            )
            self.ended_at = index
        finally:
            self._values.clear()
            self._not_real.clear()
        # So that the next pass finds in one piece what this one left in many.
        if self.ended_at is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return taken

    def refresh(self) -> None:
        """Give parameters and states new values where they are not finite any more.

        Many passes train on made-up data, which may diverge, and some operators take another time for NaN.

        Cost: Waits for the device.
        """
        lasting = {
            place: tensor
            for place, tensor in self._pool.items()
            if place[0] in _LASTING and tensor.is_floating_point() and tensor.numel()
        }
        # One element each: what diverges soon fills a tensor with NaN.
        ends = [
            tensor.as_strided((1,), (1,), 0).to(self._device, torch.float64)
            for tensor in lasting.values()
        ]
        if ends and not bool(torch.cat(ends).isfinite().all()):
            for place, tensor in lasting.items():
                values.refill(tensor, place[1], place[3])

    def _issue(
        self, index: int, step: Instruction, mark: Callable[[], Any], watch: ReplayWatch
    ) -> tuple[Any, Any] | None:
        """The marks of one op; None, with the reason among the failures, where it cannot be issued."""
        alive = self._values
        try:
            # Before the first mark, as a step has its arguments at hand.
            args, kwargs = self._arguments(step)
            if watch.before is not None:
                watch.before(index)
            if watch.pace is not None:
                watch.pace()
            call = step.call
            if watch.around is not None:
                call = partial(watch.around, index, call)
            begin = mark()
            result = call(*args, **kwargs)
            # What only the call still held is freed within the timing, as in a step.
            args.clear()
            kwargs.clear()
            # Freeing is part of a step's time, so it is part of the op after which it happens.
            for dead in self._dead[index]:
                alive.pop(dead, None)
            end = mark()
            if watch.settle is not None:
                watch.settle()
            made = tensors_in(result)
            # Fewer would shift which output a later operator is given.
            if index in self._read and len(made) < len(step.op.outputs):
                raise ValueError(f"{len(step.op.outputs)} tensors were traced, {len(made)} made")
        except FAILURES as error:
            if _is_out_of_memory(error):
                raise
            kind = type(error).__name__
            self.failures[step.op.key] = f"{kind}: {first_line(error, kind)}"
            self._check_device(index)
            self._stand_in(index)
            return None
        for output in self._read.get(index, ()):
            alive[index, output] = made[output]
        return begin, end

    def _check_device(self, index: int) -> None:
        """Raise if the GPU does not answer: then no op after this one can be issued."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLostError(
                f"wanted a GPU that continues after {self._ops[index].name}, got "
                f"{first_line(error, type(error).__name__)}; measure again without that operator",
                self.failures[self._ops[index].key],
            ) from error

    def _can_issue(self, step: Instruction) -> bool:
        """Whether the op did not fail before, and what only other ops make for it is there."""
        if step.op.key in self.failures or step.op.key in self._skip:
            return False
        for source in step.only_issued:
            filler = self._ops[source.op].key if source.op >= 0 else ""
            if source.op < 0 or filler in self.failures or filler in self._skip:
                reason = "the op that makes its workspace or sparse tensor cannot be issued"
                self.failures[step.op.key] = reason
                return False
        # Also what was passed over this time: its output is not there.
        return all((source.op, source.output) in self._values for source in step.only_issued)

    def _stand_in(self, index: int) -> None:
        """Outputs of an op that is not issued, but for those that only it can make."""
        for output in self._read.get(index, ()):
            spec = self._ops[index].outputs[output]
            if not is_only_issued(spec):
                self._values[index, output] = values.stand_in(spec, self._device)
                self._not_real.add((index, output))
        for dead in self._dead[index]:
            self._values.pop(dead, None)

    def _arguments(self, step: Instruction) -> tuple[list[Any], dict[str, Any]]:
        tensors = [
            self._tensor(source, spec)
            for source, spec in zip(step.sources, step.op.inputs, strict=True)
        ]

        def fill(value: Any) -> Any:
            return rebuild.fill(value, tensors, self._device, has_host=self._has_host)

        return [fill(value) for value in step.args], {k: fill(v) for k, v in step.kwargs.items()}

    def _tensor(self, source: InputSource, spec: TensorSpec) -> Tensor:
        place = source.place
        if place is None and (source.op, source.output) in self._not_real:
            place = source.else_place
        if place is not None:
            tensor = self._pool.get(place)
            if tensor is None:
                tensor = values.made_up(spec, self._device, place[3])
                self._pool[place] = tensor
            return tensor
        tensor = self._values[source.op, source.output]
        shape = tuple(tensor.shape)
        if shape == spec.shape and (source.is_whole or tuple(tensor.stride()) == spec.stride):
            return tensor
        # Traced by a rule that does not know the size: a workspace, a random state.
        if source.is_whole and tensor.numel() != prod(spec.shape):
            return tensor
        # An operator here may lay its result out otherwise than the one that was traced.
        return tensor.as_strided(spec.shape, spec.stride)

    def _compile(self) -> list[Instruction | None]:
        places = Places(self._ops)
        program: list[Instruction | None] = []
        last_read: dict[Output, int] = {}
        for index, op in enumerate(self._ops):
            try:
                args, kwargs = rebuild.parse(op)
                call = rebuild.resolve(op.name)
                call = rebuild.with_seeds_in_reach(op.name, call, self._device)
                if op.name in _WITH_GRAD_MODE:
                    call = torch.enable_grad()(call)
                made = valid_inputs(op)
            except WorkloadError as error:
                self.failures[op.key] = str(error)
                program.append(None)
                continue
            sources = tuple(places.source(index, position) for position in range(len(op.inputs)))
            # Also of what is replaced below: it lives as long as in the step.
            for source in sources:
                if source.op >= 0:
                    last_read[source.op, source.output] = index
            sources = tuple(
                valid(source, spec, made.get(position))
                for position, (source, spec) in enumerate(zip(sources, op.inputs, strict=True))
            )
            pairs = zip(sources, op.inputs, strict=True)
            only_issued = tuple(source for source, spec in pairs if is_only_issued(spec))
            program.append(Instruction(op, call, args, kwargs, sources, only_issued))
        for (made_by, output), reader in last_read.items():
            self._read[made_by].append(output)
            self._dead[reader].append((made_by, output))
        return program

    def _needed(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        # From the end, so that who needs an op is known before what that needs.
        for index, step in reversed(list(enumerate(self._program))):
            if step is None or step.op.key in self._skip:
                continue
            for source in step.only_issued:
                found[source.op] |= {step.op.key} | found.get(index, set())
        return found


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a result in the order in which tracing lists them."""
    if isinstance(result, (tuple, list)):
        return [tensor for value in result for tensor in tensors_in(value)]
    return [result] if isinstance(result, Tensor) else []


def _is_out_of_memory(error: BaseException) -> bool:
    """On the CPU torch has no error of its own for this."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "can't allocate memory" in str(error)
    )
