"""What a child does with a network but the check: first starts, the choice of a plan, forms in turns."""

import os
from collections.abc import Callable, Collection, Mapping

import msgspec

from ridgeline.experiments.contests import FAILURES, dismiss, reason_of, release_memory, wall_s
from ridgeline.experiments.networks.request import (
    NetworkAnswer,
    NetworkRequest,
    NetworkSettings,
    Write,
)
from ridgeline.experiments.networks.result import AUTO, COMPILE, FormKind, FormRow
from ridgeline.experiments.networks.sides.forms import (
    NetworkForm,
    NetworkSubject,
    forms_by_hand,
    plain_forms,
)
from ridgeline.experiments.networks.sides.ours import Ours, headline, notes_of, tried_plans
from ridgeline.experiments.networks.sides.timing import rough_s, time_forms
from ridgeline.experiments.turns import Samples, times_faster
from ridgeline.experiments.ways.case import WayRunner
from ridgeline.machine import Quantity
from ridgeline.workers.agree import largest_of_workers

TURNS_LIMIT_S = 120.0
CHOOSING = "choosing a plan"
ALONE = "training the chosen plan alone"
TURNS = "taking turns"
"""What a child says it is doing."""
CLEARLY_SLOWER = 1.1
"""A form by hand that is this much slower than another by hand, roughly timed, leaves: memory is scarce."""


def first_step(request: NetworkRequest, subject: NetworkSubject, write: Write) -> None:
    """Time the first step of the compiler with its own defaults; nothing else ran in this process."""
    form = next(form for form in plain_forms(subject) if form.name.endswith(COMPILE))
    entry = _Entrants(subject)
    entry.admit(form)
    row = entry.rows[form.name]
    # Before forms by hand are made, which need the memory.
    entry.close()
    notes = (f"{form.name}: {row.reason}",) if row.reason else ()
    answer = NetworkAnswer(first_s=row.first_s, notes=notes)
    write(answer)
    if request.task != "compile":
        return
    by_hand = _Entrants(subject)
    for form in forms_by_hand(subject):
        by_hand.admit(form)
        # After each, so that no more than two hold memory.
        by_hand.drop_clearly_slower()
        write(msgspec.structs.replace(answer, forms=tuple(by_hand.rows.values())))
    by_hand.close()


def choose_plan(request: NetworkRequest, subject: NetworkSubject, write: Write) -> None:
    """Time `auto` from the first batch to its plan, and train on to see whether it kept its word."""
    ours = Ours(subject, request.how, allow=request.how.allow)
    write(NetworkAnswer(doing=CHOOSING))
    ours.prepare()
    answer = _chosen(ours)
    write(msgspec.structs.replace(answer, doing=ALONE))
    write(_trained(answer, ours, request.how, subject))
    ours.step.close()


def contest(request: NetworkRequest, subject: NetworkSubject, write: Write) -> None:
    """Choose a plan (with the caches of the first time, where there was one), then take turns with all."""
    how = request.how
    ours = Ours(subject, how, allow=how.allow)
    entry = _Entrants(subject)
    answer = NetworkAnswer()

    def tell(doing: str, samples: Samples | None = None) -> None:
        forms = rows_with_times(entry.rows, samples or {})
        write(msgspec.structs.replace(answer, forms=forms, doing=doing))

    def prepared(_: NetworkSubject) -> WayRunner:
        ours.prepare()
        return ours.runner()

    tell(CHOOSING)
    # First of all, while nothing is warm or compiled for another form.
    entry.admit(NetworkForm(AUTO, "ridgeline", prepared))
    answer = NetworkAnswer(first_s=ours.plan_s)
    if AUTO in entry.runners:
        answer = _chosen(ours)
        tell(ALONE)
        answer = _trained(answer, ours, how, subject)
    # What other forms compile must not be found by `auto` in a later process.
    if not how.is_warm:
        use_cache(request.peer_cache)
    for form in plain_forms(subject):
        tell(f"running the first step of {form.name}")
        entry.admit(form)
    for form in forms_by_hand(subject):
        if request.by_hand is None or form.name in request.by_hand:
            tell(f"running the first step of {form.name}")
            entry.admit(form)
            entry.drop_clearly_slower()
    tell(TURNS)
    samples = entry.time(
        turns=how.turns, steps=how.steps, each=lambda samples: tell(TURNS, samples)
    )
    tell("", samples)
    entry.close()


def _chosen(ours: Ours) -> NetworkAnswer:
    """What is known of a plan that was chosen, before it trains."""
    return NetworkAnswer(
        first_s=ours.plan_s,
        tried=tried_plans(ours.step),
        headline=headline(ours.step),
        notes=notes_of(ours.step),
    )


def _trained(
    answer: NetworkAnswer, ours: Ours, how: NetworkSettings, subject: NetworkSubject
) -> NetworkAnswer:
    """The answer with what the plan's steps take while nothing else is in the process.

    That is what a script has, and what a prediction is of. Other forms that take turns leave caches, the
    allocator's memory and pools of threads in a state of their own.
    """
    samples = time_forms(
        {AUTO: ours.runner().run},
        subject.world,
        turns=how.turns,
        steps=how.steps,
        limit_s=TURNS_LIMIT_S,
    )
    trained_s = Quantity.measured(samples[AUTO], "s")
    return msgspec.structs.replace(answer, headline=headline(ours.step, trained_s))


def use_cache(folder: str) -> None:
    """Let the compiler keep its programs in a folder from now on; it looks at each use."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"


def rows_with_times(rows: Mapping[str, FormRow], samples: Samples) -> tuple[FormRow, ...]:
    """The rows with medians over turns, and with the time of `auto` over each, turn by turn."""
    ratios = times_faster(samples, AUTO) if AUTO in samples else {}
    return tuple(
        msgspec.structs.replace(
            row, step_s=Quantity.measured(samples[name], "s"), auto_over=ratios.get(name)
        )
        if name in samples
        else row
        for name, row in rows.items()
    )


class _Entrants:
    """Forms that were made and run; those that fail are rows with a reason."""

    def __init__(self, subject: NetworkSubject) -> None:
        self.rows: dict[str, FormRow] = {}
        self.runners: dict[str, WayRunner] = {}
        self._subject = subject
        self._rough_s: dict[str, float] = {}

    def admit(self, form: NetworkForm) -> None:
        """Make a form and run its first step."""
        reason, first_s, runner = "", None, None
        try:
            runner = form.make(self._subject)
            first_s = wall_s(runner.run)
        except FAILURES as error:
            reason = reason_of(error)
        # All or none: a form that some lack would wait for those in its first collective.
        if largest_of_workers(float(bool(reason)), self._subject.world):
            reason = reason or "it failed in another worker"
            if runner is not None:
                dismiss(runner.close)
            runner = None
        self.rows[form.name] = FormRow(
            form=form.name, kind=form.kind, first_s=first_s, reason=reason
        )
        if runner is None:
            release_memory()
        else:
            self.runners[form.name] = runner

    def drop_clearly_slower(self) -> None:
        """Let those by hand go that a rough timing finds far behind the best of them."""
        for name in self._names("by hand"):
            if name not in self._rough_s:
                self._rough_s[name] = rough_s(self.runners[name].run, 5, self._subject.world)
                # Kept for the contest of another process; it is replaced by that of the turns.
                figure = Quantity.measured([self._rough_s[name]], "s")
                self.rows[name] = msgspec.structs.replace(self.rows[name], step_s=figure)
        names = self._names("by hand")
        best = min(names, key=lambda name: self._rough_s[name], default="")
        for name in names:
            over = self._rough_s[name] / self._rough_s[best]
            if over > CLEARLY_SLOWER:
                dismiss(self.runners.pop(name).close)
                reason = f"left out of the turns: roughly {over:.2f} times the time of {best}"
                self.rows[name] = msgspec.structs.replace(
                    self.rows[name], step_s=None, reason=reason
                )
        release_memory()

    def time(self, *, turns: int, steps: int, each: Callable[[Samples], None]) -> Samples:
        """Figures of all that run, turn by turn; `each` is called after every turn with those so far."""
        if not self.runners:
            return {}
        return time_forms(
            {name: runner.run for name, runner in self.runners.items()},
            self._subject.world,
            turns=turns,
            steps=steps,
            limit_s=TURNS_LIMIT_S,
            each=each,
        )

    def close(self) -> None:
        """Release everything."""
        for runner in self.runners.values():
            dismiss(runner.close)
        self.runners.clear()
        release_memory()

    def _names(self, kind: FormKind) -> Collection[str]:
        return [name for name in self.runners if self.rows[name].kind == kind]
