"""How often a process lost a core: counted from when the count was made, for each second of computing."""

from types import SimpleNamespace

import pytest

from ridgeline.host import preemption
from ridgeline.host.preemption import Preemptions


def test_times_are_those_of_a_second_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was before, and idle time, plays no part."""
    usages = [(5.0, 1.0, 700), (5.05, 1.04, 720), (6.0, 2.0, 1200)]
    told = iter([SimpleNamespace(ru_utime=u, ru_stime=s, ru_nivcsw=n) for u, s, n in usages])
    monkeypatch.setattr(preemption.resource, "getrusage", lambda who: next(told))
    counted = Preemptions()
    assert counted.per_s() is None
    assert counted.per_s() == 250.0
