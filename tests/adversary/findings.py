"""What came of many programs: verdicts counted by mode, and one script for each kind of failure."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from adversary.judging import Outcome, Verdict
from adversary.program import Program
from adversary.scripts import script

MOST_REASONS = 12
"""Of refusals in a mode that are told, the most frequent ones first."""


class Findings:
    """Verdicts counted; used by several threads.

    Attributes:
        finished: In how many modes the program of a seed was run.
        is_over: No more is counted: children are being ended.
    """

    def __init__(self, folder: Path) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.finished: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.unconfirmed: set[str] = set()
        self.blamed: dict[str, set[str]] = {}
        self.is_over = threading.Event()
        self._folder = folder
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, verdict: Verdict, program: Program, seed: int) -> bool:
        """Count a verdict on what was made of a seed; True if it is the first failure of its kind."""
        with self._lock:
            if self.is_over.is_set():
                return False
            self.outcomes[verdict.mode, verdict.outcome] += 1
            self.finished[seed] += 1
            if verdict.outcome == "refused":
                self.reasons.setdefault(verdict.mode, Counter())[reason(verdict.detail)] += 1
            if verdict.outcome != "failed":
                return False
            title = title_of(verdict, program)
            self.kinds[title] += 1
            self.blamed.setdefault(verdict.mode, set()).update(blamed(program))
            return self.kinds[title] == 1

    def write(self, verdict: Verdict, program: Program, *, is_confirmed: bool) -> str:
        """A script for a kind of failure, and a line; `is_confirmed`: it fails with the compiler as well."""
        title = title_of(verdict, program)
        if not is_confirmed:
            self.unconfirmed.add(title)
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:150]
        (self._folder / f"{name}.py").write_text(script(program, verdict))
        mark = "" if is_confirmed else " (not with the compiler)"
        return f"seed {program.seed}: {title}{mark}"

    def counts(self, mode: str) -> dict[str, int]:
        """How many programs in a mode had which outcome."""
        return {name: self.outcomes[mode, name] for name in get_args(Outcome)}

    def told(self, modes: list[str]) -> dict[str, Any]:
        """All counts, for JSON."""
        with self._lock:
            return {
                "runs": self.outcomes.total(),
                "failed": sum(self.kinds.values()),
                "modes": {mode: self.counts(mode) for mode in modes},
                "kinds": dict(self.kinds.most_common()),
                "unconfirmed": sorted(self.unconfirmed),
                "refusals": {
                    mode: dict(self.reasons[mode].most_common(MOST_REASONS))
                    for mode in modes
                    if mode in self.reasons
                },
            }


def title_of(verdict: Verdict, program: Program) -> str:
    """Names a kind of failure: equal ones are counted together."""
    return f"{verdict.mode} {verdict.kind} [{', '.join(program.words())}]"


def blamed(program: Program) -> tuple[str, ...]:
    """What to leave out of later programs, so that other failures show."""
    words = program.words()
    return tuple(word for word in words if "/" in word) or words[-1:]


def reason(detail: str) -> str:
    """What a refusal says, without what differs from program to program."""
    text = re.sub(
        r"wanted a program that a CUDA graph can hold.*?:(?= )", "a graph cannot hold", detail
    )
    text = re.sub(r" \(\w+\.py:\d+ in \w+\)", "", re.sub(r"(/[\w.~-]+)+", "FILE", text))
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:200]
