"""Choices of earlier starts: the same step on the same machine need not be measured and tried again.

A choice is kept below the cache directory under a digest of all that it depends on. It decides only which
plan is tried first: whether that is right is checked at every start.
"""

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from ridgeline.codec import VERSION, Noun
from ridgeline.errors import FileFormatError
from ridgeline.planner import Candidate, Ranking

MOST_KEPT = 200
"""Choices kept; the oldest go first."""
THEN = "when it was chosen: "
"""How reasons of a remembered choice begin: their figures are of that start, beside those of this one."""


class Remembered(Noun, frozen=True, kw_only=True):
    """What was chosen for a step: the ranking, without the operators of its timelines.

    `digests` are those of steps that its trials captured; see `runtime.cleared`. `profile` is when that was
    measured from which the ranking's predictions were made.
    """

    kind: ClassVar[str] = "choice"

    ranking: Ranking
    digests: tuple[str, ...] = ()
    profile: str = ""


def key_of(parts: Sequence[object]) -> str:
    """A digest of all that a choice depends on: step, machine, number of workers, permissions, release."""
    return hashlib.sha256(msgspec.json.encode([VERSION, *map(str, parts)])).hexdigest()[:24]


def recall(directory: Path, key: str) -> Remembered | None:
    """The choice kept under a key; None where there is none that this release can read."""
    try:
        return Remembered.load(_path(directory, key))
    except (FileFormatError, OSError):
        return None


def keep(
    directory: Path, key: str, ranking: Ranking, digests: Collection[str] = (), *, profile: str = ""
) -> str:
    """Keep a choice, see `Remembered`; why it could not be kept, or an empty text."""
    try:
        kept = Remembered(ranking=_slim(ranking), digests=tuple(sorted(digests)), profile=profile)
        kept.save(_path(directory, key))
    except OSError as error:
        return (
            f"the choice could not be kept in {directory} ({error.strerror}) and will be made again; let "
            "XDG_CACHE_HOME name a directory that can be written"
        )
    _forget_oldest(directory)
    return ""


def noted(ranking: Ranking, best: Candidate, how: str) -> Ranking:
    """A remembered ranking with what is known of its best plan now, and a note that says so."""
    note = (
        f"chosen by an earlier start on this machine for the same step, {how}; reasons name what was "
        "measured then"
    )
    replace = msgspec.structs.replace
    choices = tuple(
        replace(one, reason=_then(one.reason)) if one.origin == "search" else one
        for one in best.plan.choices
    )
    best = replace(best, plan=replace(best.plan, choices=choices), why=_then(best.why))
    return replace(
        ranking,
        candidates=(best, *ranking.candidates[1:]),
        # The note of the start before is left out, or each start would add one.
        notes=(note, *(n for n in ranking.notes if n != note)),
    )


def _then(reason: str) -> str:
    # What is kept again after a start says so already.
    return reason if reason.startswith(THEN) else f"{THEN}{reason}"


def _path(directory: Path, key: str) -> Path:
    return directory / f"choice-{key}.json"


def _slim(ranking: Ranking) -> Ranking:
    """The ranking without detail spans and programs, which are most of its size."""
    slim = []
    for candidate in ranking.candidates:
        spans = tuple(span for span in candidate.timeline.spans if not span.detail)
        timeline = msgspec.structs.replace(candidate.timeline, spans=spans)
        measured = candidate.measured
        if measured is not None:
            measured = msgspec.structs.replace(measured, programs=())
        slim.append(msgspec.structs.replace(candidate, timeline=timeline, measured=measured))
    return msgspec.structs.replace(ranking, candidates=tuple(slim))


def _forget_oldest(directory: Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove the same file
        # By age: names are digests, which tell no order.
        files = sorted(directory.glob("choice-*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_KEPT]:
            path.unlink(missing_ok=True)
