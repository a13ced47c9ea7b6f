"""A profile for a step of this process is measured by children whose threads wait as those here do."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from ridgeline.machine import Setting
from ridgeline.probe import attempts
from ridgeline.probe import measure as probe
from ridgeline.probe.findings import Findings

ONE = Setting(device="cpu", workers=1, threads=1)


@pytest.mark.parametrize(
    ("here", "given", "wanted"), [(True, None, "300000"), (True, "7", None), (False, None, None)]
)
def test_a_step_of_this_process(
    here: bool,
    given: str | None,
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What the user says of threads is inherited; workers that are started to train have a rule of theirs."""
    environments: list[Mapping[str, str]] = []

    def answer(*_: object, environment: Mapping[str, str], **how: object) -> bytes:
        environments.append(environment)
        return msgspec.json.encode(Findings())

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setitem(os.environ, "GOMP_SPINCOUNT", given)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attempts, "run_in_group", answer)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 0.0)
    probe.measure(settings=[ONE], here=here)
    assert [environment.get("GOMP_SPINCOUNT") for environment in environments] == [wanted]
