"""The execution modes: what each of them is, and where it is offered.

A mode has two parts: the *form* of the program (how its operators are issued) and whether the device
replays it as one CUDA graph. Runtime, simulator and planner read the same table.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ridgeline.errors import PlanError
from ridgeline.plan import Execution, Plan, Precision
from ridgeline.synchronisation import (
    HELD,
    changing_options,
    check_sync,
    holds,
    is_exact,
    replaces_update,
    shards_update,
    trains_apart,
    values_of,
)

Form = Literal["eager", "script", "compiled", "regional", "step-graph", "packaged"]
Purpose = Literal["callable", "step"]


class Mode(NamedTuple):
    """One way to run a program: its form, and whether a captured CUDA graph replays it.

    `replays_model`: only the model is replayed, in a step whose loss and optimizer run as they were written.
    """

    form: Form
    is_replayed: bool
    replays_model: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether torch's compiler has a part in it, so that there is compile time to earn back."""
        return self.form in ("compiled", "regional", "step-graph", "packaged")

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs replay the step, or the model in it."""
        return self.is_replayed or self.replays_model

    @property
    def is_one_program(self) -> bool:
        """Whether a training step is one program, with its backward and its optimizer inside."""
        return self.form in ("step-graph", "packaged")

    def checks_values_on(self, device: str) -> bool:
        """Whether checks of arguments (`torch.distributions` has some) run in a step, which read values.

        No compiled or captured program can hold them.
        """
        return not (self.is_compiled or self.replays_model or self.is_replayed_on(device))

    def is_replayed_on(self, device: str) -> bool:
        """Whether a GPU replays a training step as one CUDA graph.

        One program needs the host for nothing, so on a GPU it is captured as well.
        """
        return device == "cuda" and (self.is_replayed or self.is_one_program)


SPINS = "10000"
"""Rounds in which an idle OpenMP thread looks for work before it sleeps: about 0.1 ms, longer than the time
between two operators. The default spins on for milliseconds, and where anything else wants the core (a
loader, another program) each thread then waits for one that the system has stopped.

Source: measured on two busy cores, steps of the `mlp` task with two threads: median 13 ms with the default,
1.8 with a passive wait, 1.2 with 10000 rounds, 2.0 with 1000.
"""


def thread_variables(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a worker of this host that computes with so many threads.

    Without `threads` their number is left as it is; how they wait, where the environment `given` says so.
    """
    found: dict[str, str] = {}
    if threads:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if not _says_how_to_wait(given):
        found["GOMP_SPINCOUNT"] = SPINS
    return found


USUAL_SPINS = "300000"
"""Rounds where no variable says otherwise, about 3 ms. Source: libgomp/env.c of GCC."""


def waiting_as_here(given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which the OpenMP threads of a child wait as those of this process do.

    Operators that are timed for a step of this very process then take what they take here: EfficientNet on
    two cores takes 5 % longer where threads sleep early.

    `given` is the environment of this process, as it was when it began.
    """
    # What this process was given, its children inherit.
    return {} if _says_how_to_wait(given) else {"GOMP_SPINCOUNT": USUAL_SPINS}


def _says_how_to_wait(given: Mapping[str, str]) -> bool:
    return bool({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & given.keys())


MODES: dict[Execution, Mode] = {
    "eager": Mode("eager", False),
    "script": Mode("script", False),
    "compiled": Mode("compiled", False),
    "regional": Mode("regional", False),
    "graph": Mode("eager", True),
    "compiled+graph": Mode("compiled", True),
    "regional+graph": Mode("regional", True),
    "model-graph": Mode("eager", False, replays_model=True),
    "compiled+model-graph": Mode("compiled", False, replays_model=True),
    "step-graph": Mode("step-graph", False),
    "packaged": Mode("packaged", False),
}
"""Name in plans to mode."""

CALLED: tuple[Execution, ...] = ("eager", "compiled", "regional")
"""Modes of a step that call the loss like a function: on any shape, and as often as an optimizer wants."""

BESIDE_FLOPS = 8e9
BESIDE_BYTES = 40e6
"""Work and memory traffic up to which an operator runs beside others: a larger one fills the GPU alone.

Source: 10 us of an H200, at its 800 TFLOP/s in bfloat16 and its 4 TB/s.
"""

ONLY_FOR: dict[Execution, Purpose] = {
    "script": "callable",
    "step-graph": "step",
    "model-graph": "step",
    "compiled+model-graph": "step",
}
"""Modes that make sense for one purpose: TorchScript serves inference, what knows of a step, training."""


PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "cpu": ("as-is", "bf16"),
    "cuda": ("as-is", "tf32", "bf16"),
}
"""What a training step runs in, by device; a GPU offers all there are."""


def offered(purpose: Purpose, device: str) -> tuple[Execution, ...]:
    """The modes for calling a function or module, or for a training step, on `cpu` or `cuda`."""
    return tuple(
        name
        for name, mode in MODES.items()
        if ONLY_FOR.get(name, purpose) == purpose and (device == "cuda" or not mode.is_captured)
    )


def check_offered(name: str, purpose: Purpose, device: str) -> Mode:
    """The mode of that name; a PlanError that lists the others where it is not offered there."""
    names = offered(purpose, device)
    for candidate in names:
        if candidate == name:
            return MODES[candidate]
    what = "a training step" if purpose == "step" else "calling a function or module"
    raise PlanError(
        f"wanted an execution mode for {what} on {device} out of {', '.join(names)}, got {name!r}; choose "
        "one of those"
    )


def check_alone(name: Execution, workers: int) -> None:
    """Raise a PlanError for several workers in a mode that exchanges nothing before its very end."""
    if MODES[name].replays_model and workers > 1:
        raise PlanError(
            f"wanted workers=1 for execution={name!r}, got workers={workers} in the plan; this release "
            "replays the model alone on one worker: use another mode"
        )
    # One program has backward and optimizer inside, where no bucket could leave.
    if MODES[name].is_one_program and workers > 1:
        raise PlanError(
            f"wanted workers=1 for execution={name!r}, got workers={workers} in the plan; a step that is one "
            "program exchanges no gradients: use one worker, or another mode"
        )


def runs_uncaptured(name: Execution, device: str) -> bool:
    """Whether a step of a mode is issued again each time, so that steps, or workers, may do other things.

    A captured step is the same in every replay. So workers that train alone between exchanges, or that update
    a part of the parameters each, want such a mode.
    """
    return not MODES[name].is_replayed_on(device)


def is_compiled_in_parts(plan: Plan, device: str) -> bool:
    """Whether a forward pass is compiled in as many parts as its gradients have buckets.

    One program hands out all its gradients when its backward pass is over; a part, those of its bucket. In
    a captured step operators report gradients by themselves, and workers that train alone send none.
    """
    mode = MODES[plan.execution]
    is_called = mode.form == "compiled" and not (mode.replays_model or mode.is_replayed_on(device))
    return is_called and plan.workers > 1 and not trains_apart(plan.sync)


def is_checked(name: Execution) -> bool:
    """Whether the first step in a mode is compared with the step as it was written."""
    mode = MODES[name]
    return mode.is_compiled or mode.is_replayed or mode.replays_model


def check_plan(plan: Plan, device: str) -> None:
    """Raise a PlanError for a plan of a training step that can neither be run nor predicted here."""
    # A CUDA machine offers every precision there is, so its words are all that are known.
    known = PRECISIONS["cuda"]
    if plan.precision not in known:
        words = ", ".join(repr(word) for word in known)
        raise PlanError(
            f"wanted precision to be one of {words}, got {plan.precision!r} in the plan; this release "
            "runs no other"
        )
    # Words first, then what fits together: an error should name the first thing to correct.
    check_sync(plan.sync, plan.workers, device)
    if plan.layout is not None and plan.layout.data != plan.workers:
        raise PlanError(
            f"wanted all workers along the data axis, got {plan.layout} in the plan; this release runs "
            "data parallelism only"
        )
    check_offered(plan.execution, "step", device)
    check_alone(plan.execution, plan.workers)
    _check_shapes(plan, device)
    if trains_apart(plan.sync) and not runs_uncaptured(plan.execution, device):
        raise PlanError(
            f"wanted sync.every=1 for execution={plan.execution!r}, got {plan.sync.every} in the plan; a "
            "captured step is the same in every replay: exchange in every step, or use another mode"
        )
    # Only eager code reads parameters through Python, which is where the update is caught up.
    if plan.workers > 1 and holds(plan.sync) and plan.execution != "eager":
        raise PlanError(
            f"wanted execution='eager' for sync.options[{HELD.name!r}], got {plan.execution!r} in the plan; "
            "programs and captured steps read parameters without notice: hold none, or run eagerly"
        )
    is_parted = plan.workers > 1 and shards_update(plan.sync)
    if is_parted and not runs_uncaptured(plan.execution, device):
        raise PlanError(
            f"wanted another execution for sync.algorithm={plan.sync.algorithm!r}, got {plan.execution!r} in "
            "the plan; this release captures no update that is divided among workers: use another mode, or "
            "another algorithm"
        )
    if plan.workers > 1 and replaces_update(plan.sync):
        _check_replaced(plan, device)
    if MODES[plan.execution].replays_model and plan.accumulate > 1:
        raise PlanError(
            f"wanted accumulate=1 for execution={plan.execution!r}, got {plan.accumulate} in the plan; its "
            "gradients are overwritten by the next backward pass"
        )
    if plan.precision not in PRECISIONS[device]:
        raise PlanError(
            f"wanted a CUDA device for precision={plan.precision!r}, got {device}; use precision='as-is' "
            "there"
        )


class RowsRefusal(NamedTuple):
    """Why a plan cannot exchange a sparse gradient, to follow "a plan that", and what to do."""

    reason: str
    advice: str

    @property
    def error(self) -> PlanError:
        """What is raised where such a plan is to run, or to be predicted."""
        return PlanError(
            f"wanted a plan that can exchange sparse gradients, got one that {self.reason}; {self.advice}"
        )


def rows_refusal(plan: Plan, device: str, name: str) -> RowsRefusal | None:
    """Why workers of a plan could not exchange a gradient of sparse rows, be it to run it or to predict it.

    Workers that train alone exchange parameters, and a store takes rows: None, as for a worker alone.
    """
    sync, dense = plan.sync, "make its layer with sparse=False"
    if plan.workers == 1 or trains_apart(sync):
        return None
    if not runs_uncaptured(plan.execution, device):
        return RowsRefusal(
            f"captures the step (execution={plan.execution!r}), while the sparse gradient of {name} has "
            "another number of rows in each step",
            f"use execution='eager', or {dense}",
        )
    if shards_update(sync):
        return RowsRefusal(
            f"divides the update among workers (sync.algorithm={sync.algorithm!r}) by parts of dense "
            f"gradients, while that of {name} is sparse",
            f"use another algorithm, or {dense}",
        )
    # Rows pass through no codec, which is what keeps such momentum.
    momentum = values_of(sync).get("momentum")
    if momentum:
        return RowsRefusal(
            f"accumulates momentum before it sends (sync.compression={sync.compression!r} with "
            f"momentum={momentum!r}), which the rows of the sparse gradient of {name} would not have",
            f"leave the option out, or {dense}",
        )
    return None


def _check_replaced(plan: Plan, device: str) -> None:
    """Refuse to capture what others update, or to check it where no two steps are the same."""
    algorithm = plan.sync.algorithm
    if not runs_uncaptured(plan.execution, device):
        raise PlanError(
            f"wanted another execution for sync.algorithm={algorithm!r}, got {plan.execution!r} in the plan; "
            "the update that it captures is not made by the worker there: use another mode, or another "
            "algorithm"
        )
    # The check runs a step twice and compares; without waiting, other workers change the values between.
    if is_checked(plan.execution) and not is_exact(plan.sync):
        raise PlanError(
            f"wanted execution='eager' for workers that need not wait for each other, got {plan.execution!r} "
            "in the plan; no two steps of theirs are the same, as its check requires: use that, or let them "
            "wait"
        )


def _check_shapes(plan: Plan, device: str) -> None:
    """A captured step sends the same shapes in every replay."""
    if plan.workers == 1 or not MODES[plan.execution].is_replayed_on(device):
        return
    for name, value in changing_options(plan.sync).items():
        raise PlanError(
            f"wanted sync.options[{name!r}] left out for execution={plan.execution!r}, got {value!r} in the "
            "plan; what is sent would change its shape, which a captured step cannot: use another mode, or "
            "train the first steps under a plan of their own"
        )
