"""What the experiment found: frozen values, without torch."""

from typing import ClassVar, Literal

from ridgeline.codec import Noun, Value
from ridgeline.execution import MODES
from ridgeline.machine import Device, Host, Quantity
from ridgeline.plan import Execution
from ridgeline.planner.trials.trial_loop import NOT_TRIED

FormKind = Literal["plain", "by hand", "ridgeline"]
Family = Literal["eager and graph", "compiled"]
FAMILIES: tuple[Family, ...] = ("eager and graph", "compiled")
AUTO = "auto"
"""The form that is Ridgeline's."""
COMPILE = "torch.compile"
"""The compiler with its own defaults; under DDP its name is `DDP + torch.compile`."""
NO_TURNS = "no turns: "
"""How the reason begins of a form that ran, but took no turns with the others, since they ended before."""


def family_of(execution: Execution) -> Family:
    """Whether torch's compiler has a part in a mode."""
    return "compiled" if MODES[execution].is_compiled else "eager and graph"


class FormRow(Value, frozen=True, kw_only=True):
    """One form of a network's step.

    Attributes:
        form: Its name.
        kind: Written by a user without the compiler's internals, written by hand, or ours.
        step_s: Seconds a step: the median over turns with quartiles; None where it failed or was left out.
        first_s: Seconds until its first step had run, caches as they were.
        auto_over: Time of `auto` over this one's, turn by turn; None where one of them has no time.
        reason: Why there is no time.
    """

    form: str
    kind: FormKind
    step_s: Quantity | None = None
    first_s: float | None = None
    auto_over: Quantity | None = None
    reason: str = ""

    @property
    def was_cut(self) -> bool:
        """Whether it ran, and what times it ended before."""
        return self.step_s is None and self.reason.startswith(NO_TURNS)


class TriedPlan(Value, frozen=True, kw_only=True):
    """A plan that was tried for real, or failed: predicted and measured.

    Attributes:
        plan: In a few words.
        execution: Its mode.
        before_s: Predicted before any trial.
        after_s: Predicted when all that trials taught was in, its own trial left out; None: not known.
        measured_s: In its trial; None where that failed.
        failure: Why it failed.
    """

    plan: str
    execution: Execution
    before_s: float
    after_s: float | None = None
    measured_s: float | None = None
    failure: str = ""

    @property
    def why_not(self) -> str:
        """Why it failed, in one clause: tables have no room for every line of code that was in the way."""
        return self.failure.partition("\n")[0].partition("; ")[0]

    @property
    def was_begun(self) -> bool:
        """Whether there was a trial at all; what fails in one plan is not tried again in plans like it."""
        return not self.failure.startswith(NOT_TRIED)


class Starts(Value, frozen=True, kw_only=True):
    """Seconds before training begins, each in a process of its own: with empty caches, then once more.

    Attributes:
        plan_s: `step.prepare(batch)` with `plan="auto"`.
        plan_again_s: The same with the caches of the first time.
        compile_s: The first step of `torch.compile`.
        compile_again_s: The same with the caches of the first time.
    """

    plan_s: float | None = None
    plan_again_s: float | None = None
    compile_s: float | None = None
    compile_again_s: float | None = None


class Headline(Value, frozen=True, kw_only=True):
    """What was said of the chosen plan, and what its steps then took.

    Attributes:
        plan: The plan as a program.
        execution: Its mode.
        before_s: Predicted before any trial.
        expected_s: Expected when training began, after the trials; None: not known.
        trained_s: What its steps took in the same process right after the choice, before any other form was
            made, as those of a script do; the quartiles show the machine's drift. Steps in turns with other
            forms find caches and memory as those left them: they give ratios.
    """

    plan: str
    execution: Execution
    before_s: float | None = None
    expected_s: float | None = None
    trained_s: Quantity | None = None


class Check(Value, frozen=True, kw_only=True):
    """Ten steps of `auto` against as many of the plain loop, in float32 and from the same random state.

    Attributes:
        plan: What `auto` chose for it.
        execution: The mode of that plan.
        losses: Largest relative difference of a loss.
        parameters: Largest difference of a parameter tensor, relative to its own size (norms).
        sensitivity: What `parameters` is for the plain loop itself, begun with the last bits changed.
        tolerance: What both differences may be.
        is_equal: Whether they are, or are within four times the sensitivity.
        is_exact: Whether all losses and parameters have the same bits.
    """

    plan: str
    execution: Execution
    losses: float
    parameters: float
    sensitivity: float
    tolerance: float
    is_equal: bool
    is_exact: bool


class NetworkResult(Value, frozen=True, kw_only=True):
    """Everything about one network. What was not asked for, or failed, is None and has a note."""

    network: str
    kind: str
    title: str
    forms: tuple[FormRow, ...] = ()
    headline: Headline | None = None
    tried: tuple[TriedPlan, ...] = ()
    starts: Starts = Starts()
    check: Check | None = None
    seconds: float = 0.0
    """What all of it took."""
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why it was not run at all, or not to its end: tables leave it out, but for this."""

    def form(self, name: str) -> FormRow | None:
        """The row of a form, if there is one."""
        return next((row for row in self.forms if row.form == name), None)

    def fastest(self, kind: FormKind) -> FormRow | None:
        """The form of a kind with the least median."""
        timed = [row for row in self.forms if row.kind == kind and row.step_s is not None]
        return min(timed, key=_median_s, default=None)

    @property
    def compiled(self) -> FormRow | None:
        """The compiler with its own defaults, under DDP where there are several workers."""
        return self.form(COMPILE) or self.form(f"DDP + {COMPILE}")


class NetworkTerms(Noun, frozen=True, kw_only=True):
    """What figures of networks depend on beside the machine.

    Attributes:
        device: `cpu` or `cuda`.
        scale: Of the networks.
        workers: Processes that train a network together.
        allow: Changes of the maths that all forms may make.
        turns: Turns of the timing, at most.
        steps: Steps in a turn; 0: as many as fill one.
        budget_s: What `TrainStep` gets to choose in; None: its own.
        run_steps: Steps that it is told it will train; None: unknown. A CPU begins without a compiler then.
        parallel: Networks at the same time, each on its own GPU and share of the cores.
    """

    device: Literal["cpu", "cuda"]
    scale: Literal["gpu", "cpu"]
    workers: int = 1
    allow: tuple[str, ...] = ()
    turns: int
    steps: int
    budget_s: float | None = None
    run_steps: int | None = None
    parallel: int = 1


class NetworksExperiment(NetworkTerms, frozen=True, kw_only=True):
    """The experiment on one machine; saved as JSON after each task on a network.

    Attributes:
        date: Of the run, as YYYY-MM-DD.
        machine_s: What measuring the machine took, once, before all networks; None: each did for itself.
    """

    kind: ClassVar[str] = "networks-experiment"

    date: str
    host: Host
    devices: tuple[Device, ...]
    versions: dict[str, str]
    machine_s: float | None = None
    networks: tuple[NetworkResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hardware(self) -> str:
        """In a few words: `1 x NVIDIA H200`, `2-core CPU`."""
        names = [one.name for one in self.devices if one.kind == "cuda"]
        if self.device == "cuda" and names:
            return f"{self.workers} x {names[0]}"
        return f"{self.host.cores}-core CPU"


def _median_s(row: FormRow) -> float:
    assert row.step_s is not None
    return row.step_s.value
