"""Whether a saved profile still describes the machine: trials are a check of it that costs nothing more.

A profile holds for as long as the machine is as fast as it was: not when it was measured in a busy hour, on
battery, or beside another neighbour. A trial that misses its prediction may as well be the model's fault,
so a profile that is young is believed; measuring again and again would find the same.
"""

import datetime
import traceback
from collections.abc import Callable

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.ranking import Ranking
from ridgeline.planner.trials.trial_loop import Trial
from ridgeline.timeline import Timeline
from ridgeline.verdict import verify

YOUNG = datetime.timedelta(minutes=10)
"""A profile measured within this time describes the machine as it is now."""


def choose_by_profile(
    profile: Callable[[bool], Machine | None],
    rank: Callable[[Machine], Ranking],
    *,
    agree: Callable[[str], str] = str,
    say: Callable[[str], None] = lambda line: None,
    again: str = "",
    doubt: Callable[[Machine, Ranking], Machine] = lambda machine, ranking: machine,
) -> tuple[Machine, Ranking]:
    """The ranking by a saved profile, or by one measured again where the trials contradict that.

    A profile that was measured again is believed, whatever the trials say.

    Args:
        profile: The machine: saved, as far as it is, or with True all measured again, or None where there is
            no time for that: the saved one then stands.
        rank: The plans by a machine, with `remembered` trials: they are not run again.
        agree: Takes rank 0's word, where there are several workers; their clocks may differ.
        say: Takes a line that says why the machine is measured again.
        again: Why it is to be measured again at once, see `doubted.why_again`; the same on all workers.
        doubt: The machine, marked where the trials contradict it, though it is too young to be stale.
    """
    if again:
        say(f"{again}: measuring again")
        retaken = profile(True)
        if retaken is not None:
            return retaken, rank(retaken)
    machine = profile(False)
    assert machine is not None, "a profile has rates, be they assumed"
    ranking = rank(machine)
    why = agree(why_stale(machine, ranking, datetime.datetime.now(datetime.UTC)) or "")
    if not why:
        return doubt(machine, ranking), ranking
    say(f"{why}: measuring again")
    anew = profile(True)
    return (machine, ranking) if anew is None else (anew, rank(anew))


def remembered(trial: Trial) -> Trial:
    """A trial that runs each plan once and then says what it found, be it a failure."""
    found: dict[str, Timeline | Exception] = {}

    def attempt(plan: Plan) -> Timeline:
        key = repr(plan)  # without the reasons
        if key not in found:
            try:
                found[key] = trial(plan)
            except Exception as error:  # noqa: BLE001 - raised again below, each time it is asked for
                _release(error)
                found[key] = error
        result = found[key]
        if isinstance(result, Exception):
            raise result
        return result

    return attempt


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of a failed trial hold, so that the next one finds the memory free."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def why_stale(machine: Machine, ranking: Ranking, now: datetime.datetime) -> str | None:
    """Why the machine is to be measured again before the ranking is believed; None when it is not."""
    best = ranking.best
    if best.measured is None or verify(best.timeline, best.measured).passed:
        return None
    if _is_young(machine.measured_at, now):
        return None
    return (
        f"the profile measured at {machine.measured_at} predicts "
        f"{units.nanoseconds(best.timeline.step_ns)} a step where the trial took "
        f"{units.nanoseconds(best.measured.step_ns)}"
    )


def _is_young(measured_at: str, now: datetime.datetime) -> bool:
    try:
        then = datetime.datetime.fromisoformat(measured_at)
    except ValueError:  # it was written by hand
        return False
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.UTC)
    # A clock that was set back puts a profile into the future, where it would stay young for as long.
    return abs(now - then) <= YOUNG
