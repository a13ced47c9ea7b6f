"""Keeps plans of compiled programs from winning a trial, in tests that ask for the bits of the plain loop."""

from typing import Any

import msgspec
import pytest

from ridgeline.decision import choice
from ridgeline.plan import Plan
from ridgeline.planner.preparation import is_compiled
from ridgeline.timeline import Timeline


def never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled plans are tried as ever, and measure a thousand times slower than they are.

    A compiler changes the last bits of a step, and which plan wins depends on how busy the machine is.
    """
    run_trial = choice.run_trial

    def stretched(make: Any, plan: Plan, *others: Any, **more: Any) -> Timeline:
        measured = run_trial(make, plan, *others, **more)
        if not is_compiled(plan):
            return measured
        slow = tuple(1000 * step for step in measured.steps_ns)
        return msgspec.structs.replace(measured, steps_ns=slow)

    monkeypatch.setattr(choice, "run_trial", stretched)
