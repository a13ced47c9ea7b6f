"""`rl.parallelize`: the independent parts of a function side by side, over threads, streams or devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ridgeline.autoparallel.graphs.gradients import close_call, differentiated, trace_halves
from ridgeline.autoparallel.graphs.guard import Guard, read_function
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.devices import with_index
from ridgeline.autoparallel.report import ParallelReport
from ridgeline.autoparallel.scheduling.schedule import Schedule
from ridgeline.autoparallel.search import Mode, report_of, search
from ridgeline.autoparallel.ways import Offer, ProgramWay, offer, offer_halves
from ridgeline.capture.flat_program import as_arguments, name_of
from ridgeline.capture.named_arguments import positional
from ridgeline.closing import Closing
from ridgeline.errors import PlanError
from ridgeline.given import checked
from ridgeline.guards.guards import Guards
from ridgeline.guards.reading import UnreadableError
from ridgeline.machine import Machine
from ridgeline.reach.undo import Undo
from ridgeline.timeline import Timeline


@checked(PlanError, but=("fn", "mode", "lanes", "devices"))
def parallelize(
    fn: Callable[..., Any],
    example_inputs: Any,
    *,
    devices: Sequence[str | torch.device] | None = None,
    lanes: int | None = None,
    mode: Mode = "auto",
    machine: Machine | None = None,
    capture: bool = True,
) -> "Parallel":
    """The function with its independent parts run side by side, with the same results.

    It is traced for inputs like these; what does not depend on each other is put on different lanes:
    threads of the CPU, streams of a GPU (captured in one CUDA graph), or several devices. Ways to do so are
    predicted from measured costs, compared with the function itself on changed inputs, and timed in turns;
    where nothing is gained the function runs one operation after the other, and the report says so.

    A function may contain its backward pass: `torch.autograd.grad`, `.backward()`, updates in place.
    Where its results are differentiable and gradients are enabled, forward and backward are two programs,
    and `.backward()` of what a call returns runs the second; it has no second derivatives. Parameters are
    read by reference. Calls that do not fit what was traced (other shapes, replaced parameters, another
    `training` flag) run the function as it was written; the report counts them.

    Args:
        fn: Function or module; its arguments can be given by position, and calls may name them.
        example_inputs: A tuple of its arguments (nests of tensors), or the only one.
        devices: Where operations may run; None: where the inputs and the state are.
        lanes: Most lanes on one device; default: cores, at most 4, or 31 streams.
        mode: `auto` measures; `serial` runs one operation after the other; `parallel` takes the best way on
            several lanes even if it gains nothing.
        machine: Its measured links are used between devices; None: they are measured now.
        capture: Capture streams of one GPU in a CUDA graph.

    Raises:
        CaptureError: the function depends on values of tensors, writes into an argument, changes something
            in Python (a cache that its first call fills: make that call before), or cannot be captured.
        EquivalenceError: with `parallel`, no way gave the function's results.
        MachineError: the machine has no figures for a link that is needed.
        PlanError: a device or argument is not usable, the function works on a device that is not among
            `devices`, or `parallel` is asked of a function with no independent parts.
        ScheduleError: an input or state is on a device on which nothing is computed.

    Cost: Seconds: some hundred calls, and some milliseconds a distinct operation. Waits for the device.
    """
    _check(fn, mode)
    args = as_arguments(example_inputs)
    # Read before it is traced: a function that changes something in Python must not have run by then.
    guards, program = _read_and_traced(fn, args)

    def offer_for(program: Program, args: tuple[Any, ...]) -> Offer:
        where = _devices(program, devices)
        return offer(program, args, devices=where, lanes=lanes, machine=machine, capture=capture)

    serves_gradients = program.is_differentiable and torch.is_grad_enabled()
    guard = Guard(fn, guards, program, args, serves_gradients=serves_gradients)
    if serves_gradients:
        halves = trace_halves(fn, args, program)
        offered = offer_halves(halves, args, offer_for)
        # Forward alone says nothing of the backward program, whose gradients and time count as much.
        as_tried = partial(differentiated, wanted=halves.wanted)
    else:
        offered = offer_for(program, args)
        as_tried = None
    found = search(fn, program, args, offered, mode, as_tried)
    report = report_of(name_of(fn), offered, found)
    return Parallel(fn, guard, found.call, found.way, report)


def _check(fn: object, mode: str) -> None:
    if mode not in ("auto", "serial", "parallel"):
        raise PlanError(
            f"wanted mode 'auto', 'serial' or 'parallel' for parallelize, got {mode!r}; use one of these"
        )
    if not callable(fn) or isinstance(fn, type):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise PlanError(
            f"wanted a function or module to parallelize, got {got}; give what is called, and "
            "an example of its arguments behind it"
        )


def _read_and_traced(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Guards, Program]:
    """What a function reads, and its program; one that changes something in Python is never run."""
    before = Undo(fn, args, values=False, arrays=True)  # a trace computes nothing else
    try:
        return read_function(fn, args), trace_program(fn, args)
    except UnreadableError as error:
        trace_program(fn, args)
        raise UnreadableError(f"{error}; do that around the call") from error.__cause__
    finally:
        before.restore()


class Parallel(Closing):
    """A function whose independent parts run side by side; made by `rl.parallelize`.

    Use it in a `with` block, or `close()` it, to end its threads and give up its graph.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        guard: Guard,
        call: Callable[..., Any] | None,
        way: ProgramWay | None,
        report: ParallelReport,
    ) -> None:
        self._fn = fn
        self._guard = guard
        self._call = call
        self._way = way
        self._report = report
        self._counters: Counter[str] = Counter()
        self._is_closed = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result for these arguments, as the function gives it.

        Raises:
            PlanError: it was closed.
            BatchError: an argument can be given by name only.
        """
        if self._is_closed:
            raise PlanError(
                "wanted to call a parallelized function, got one that was closed; keep it open for calls"
            )
        if named:
            args = positional(self._fn, args, named)
        # As written won: the function itself needs no guard.
        if self._call is None:
            return self._fn(*args)
        refusal = self._guard.refusal(args)
        if refusal is not None:
            self._counters[refusal] += 1
            return self._fn(*args)
        return self._call(*args)

    def __repr__(self) -> str:
        report = self._report
        return f"Parallel({report.subject}, {report.chosen}, {report.device})"

    @property
    def schedule(self) -> Schedule | None:
        """Who runs where; None where the function runs as it was written."""
        return self._way.schedule if self._way is not None else None

    @property
    def report(self) -> ParallelReport:
        """What was tried, what was chosen and why, and what was counted so far."""
        return msgspec.structs.replace(self._report, counters=dict(self._counters))

    def timeline(self) -> Timeline:
        """The last call on its lanes.

        Raises:
            PlanError: it does not run on threads: what a device did is seen by torch.profiler.
        """
        timeline = getattr(self._call, "timeline", None)
        if timeline is None:
            raise PlanError(
                f"wanted the timeline of a call on threads, got a function that runs {self._report.chosen!r} "
                f"on {self._report.device}; use torch.profiler for what happens on a device"
            )
        return timeline()

    def close(self) -> None:
        """End threads and give up graphs; calls afterwards are errors.

        Cost: Waits for the device if there is a graph.
        """
        self._is_closed = True
        close_call(self._call)


def _devices(
    program: Program, asked: Sequence[str | torch.device] | None
) -> tuple[torch.device, ...]:
    """The devices that were asked for, or those on which the function's tensors are."""
    here = tuple(dict.fromkeys(operation.device for operation in program.operations))
    if asked is None:
        return here
    try:
        # A name is no list of names: its letters are none.
        names = [asked] if isinstance(asked, str) else [*asked]
        wanted = tuple(dict.fromkeys(with_index(torch.device(device)) for device in names))
    except (RuntimeError, TypeError) as error:  # no such name, no name at all
        raise PlanError(
            f"wanted devices such as ['cuda:0', 'cpu'] for parallelize, got devices={asked!r}; name each"
        ) from error
    missing = [str(device) for device in here if device not in wanted]
    if missing:
        raise PlanError(
            f"wanted the function's tensors on devices={[str(device) for device in wanted]}, got operations "
            f"on {', '.join(missing)}; add it to devices, or move the tensors with .to(device)"
        )
    return wanted
