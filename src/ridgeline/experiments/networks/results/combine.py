"""From the answers of the children to the result of a network; nothing is run here."""

from collections.abc import Mapping

import msgspec

from ridgeline.experiments.networks.network import Network
from ridgeline.experiments.networks.process import ChildReply
from ridgeline.experiments.networks.request import NetworkAnswer, Task
from ridgeline.experiments.networks.result import AUTO, NO_TURNS, FormRow, NetworkResult, Starts


def combined(
    network: Network, replies: Mapping[Task, ChildReply], seconds: float, reason: str = ""
) -> NetworkResult:
    """One network's result."""
    answers = {task: reply.answer for task, reply in replies.items()}
    contest, plan = answers.get("contest", NetworkAnswer()), answers.get("plan", NetworkAnswer())
    # A process that did nothing but choose comes before one in which other forms ran besides.
    told = plan if plan.headline is not None else contest
    check = answers.get("check", NetworkAnswer())
    return NetworkResult(
        network=network.name,
        kind=network.kind,
        title=network.title,
        forms=_forms(contest, answers.get("compile", NetworkAnswer()), replies),
        headline=told.headline,
        tried=told.tried,
        starts=_starts(answers),
        check=check.check,
        seconds=seconds,
        notes=_notes(replies),
        reason=reason,
    )


def best_by_hand(answer: NetworkAnswer) -> tuple[str, ...]:
    """The form by hand that a rough timing found fastest, if any ran."""
    timed = [(row.step_s.value, row.form) for row in answer.forms if row.step_s is not None]
    return (min(timed)[1],) if timed else ()


def _forms(
    contest: NetworkAnswer, compiled: NetworkAnswer, replies: Mapping[Task, ChildReply]
) -> tuple[FormRow, ...]:
    """Rows of the contest, then the forms by hand that did not get there."""
    rows = {row.form: row for row in contest.forms}
    best = best_by_hand(compiled)
    for row in compiled.forms:
        if row.form not in rows:
            reason = row.reason or f"left out of the turns: {best[0]} was faster"
            rows[row.form] = msgspec.structs.replace(row, step_s=None, reason=reason)
    reply = replies.get("contest")
    if reply is not None and reply.reason:
        # Rows were written as they came; those without a time wait for turns that never were.
        rows = {name: _ended(row, reply.reason) for name, row in rows.items()}
        if AUTO not in rows:
            rows[AUTO] = FormRow(form=AUTO, kind="ridgeline", reason=reply.reason)
    return tuple(rows.values())


def _ended(row: FormRow, reason: str) -> FormRow:
    """The row of a form with why it has no time, where that is the end of the contest."""
    if row.step_s is not None or row.reason:
        return row
    return msgspec.structs.replace(row, reason=f"{NO_TURNS}{reason}")


def _starts(answers: Mapping[Task, NetworkAnswer]) -> Starts:
    """In a contest `auto` starts for the second time, if it had a first one to itself."""
    contest_s = answers["contest"].first_s if "contest" in answers else None
    # Without that task the contest is the first to choose, so that its seconds are those of a first
    # start.
    has_first = "plan" in answers
    return Starts(
        plan_s=answers["plan"].first_s if has_first else contest_s,
        plan_again_s=contest_s if has_first else None,
        compile_s=answers["compile"].first_s if "compile" in answers else None,
        compile_again_s=answers["compile again"].first_s if "compile again" in answers else None,
    )


def _notes(replies: Mapping[Task, ChildReply]) -> tuple[str, ...]:
    """What went wrong in a child, then what the children say, each thing once."""
    failures = [f"{task}: {reply.reason}" for task, reply in replies.items() if reply.reason]
    said = [note for reply in replies.values() for note in reply.answer.notes]
    return tuple(dict.fromkeys([*failures, *said]))
