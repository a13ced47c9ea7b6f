"""What a child process is asked to do with a network, and what it answers: values in files, without torch."""

from collections.abc import Callable
from typing import Literal

from ridgeline.codec import Value
from ridgeline.experiments.networks.result import (
    Check,
    FormRow,
    Headline,
    NetworkTerms,
    TriedPlan,
)

Task = Literal["compile", "compile again", "plan", "contest", "check", "machine"]
TASKS: tuple[Task, ...] = ("compile", "compile again", "plan", "contest", "check")
"""In the order in which a network goes through them; each in a process of its own.

`compile`: the first step of `torch.compile` with empty caches, then what can be written by hand.
`compile again`: the first step once more, with the caches of the first time.
`plan`: `auto` with empty caches: the time to its plan, what it tried, what it expected and then took.
`contest`: `auto` for the second time, then all forms in turns.
`check`: ten steps of `auto` in float32 against the plain loop.

Once for all networks, `machine` measures the machine.
"""


class NetworkSettings(NetworkTerms, frozen=True, kw_only=True):
    """How the experiment is run.

    Attributes:
        tasks: What to do with each network.
        limit_s: A task that takes longer is ended.
        stop_after_s: No network begins after so many seconds; None: all do.
        is_warm: Use this user's own caches instead of empty ones.
        machine: File of a machine profile to use; empty: the machine is measured.
        sources: Files with networks beside the catalog's; those that `run` is given.
    """

    tasks: tuple[Task, ...] = TASKS
    limit_s: float = 600.0
    stop_after_s: float | None = None
    is_warm: bool = False
    machine: str = ""
    sources: tuple[str, ...] = ()


class NetworkRequest(Value, frozen=True, kw_only=True):
    """One task on one network.

    Attributes:
        task: What to do.
        network: Its name in the catalog; empty for `machine`.
        how: As all of the experiment is run.
        by_hand: Forms written by hand that take part in the contest; None: all.
        plan_cache: Folder of the compiler's caches that `auto` uses.
        peer_cache: That of the other forms.
        answer: The file to write, again whenever more is known; under several workers rank 0 does.
    """

    task: Task
    network: str
    how: NetworkSettings
    by_hand: tuple[str, ...] | None = None
    plan_cache: str
    peer_cache: str
    answer: str


class NetworkAnswer(Value, frozen=True, kw_only=True):
    """What a task found; fields that are not its own stay empty.

    Attributes:
        first_s: Seconds to the first step or plan that the task is about.
        forms: Rows of forms; those by hand in `compile` have rough times.
        headline: Of the chosen plan.
        tried: Plans that were tried.
        check: Against the plain loop.
        notes: What the child has to say.
        doing: What was under way when this was written; empty where that was the end.
    """

    first_s: float | None = None
    forms: tuple[FormRow, ...] = ()
    headline: Headline | None = None
    tried: tuple[TriedPlan, ...] = ()
    check: Check | None = None
    notes: tuple[str, ...] = ()
    doing: str = ""


Write = Callable[[NetworkAnswer], None]
"""Takes what is known so far."""
