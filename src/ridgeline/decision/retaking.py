"""Whether a start begins with measuring a doubtful profile again, and the marks that trials leave on it."""

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.machine import Machine
from ridgeline.machine.host_load import HostLoad
from ridgeline.planner import Ranking, doubted


class Due(NamedTuple):
    """Why the profile is to be measured again now, empty where it is not, and what is to be said of it."""

    why: str
    lines: tuple[str, ...]


def due(machine: Machine, listen: Callable[[], HostLoad]) -> Due:
    """Whether a profile is to be measured again now.

    `listen` says what others take of the host now; it is asked only where it matters.
    """
    why = doubted.why_again(machine)
    if not why:
        return Due("", doubted.said(machine))
    if machine.effort == "full":  # that took minutes, which only its owner can grant again
        line = "a full profile is measured again by `ridgeline measure --full --refresh`"
        return Due("", (*doubted.said(machine), line))
    now = listen()
    if now.is_disturbed:
        line = f"the profile is not measured again yet: right now {now}"
        return Due("", (*doubted.said(machine), line))
    return Due(why, ())


def doubting(
    mark: Callable[[Machine, str, int], Machine], tell: Callable[[str], None]
) -> Callable[[Machine, Ranking], Machine]:
    """For `staleness.choose_by_profile`: marks a profile that trials of plain plans contradict by far."""

    def doubt(machine: Machine, ranking: Ranking) -> Machine:
        why = doubted.suspicion(machine, ranking)
        if not why or machine.suspect:
            return machine
        tell(f"{why}: the next start measures again" if not machine.retakes else why)
        return mark(machine, why, machine.retakes)

    return doubt
