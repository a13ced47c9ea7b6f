"""What `measure` asks groups for, answered at once, with a cache of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.machine import (
    Ceiling,
    Collective,
    Dispatch,
    OperatorTiming,
    Quantity,
    Setting,
    SizePoint,
)
from ridgeline.probe import attempts, fields
from ridgeline.probe import measure as probe
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.host.load import Counters, Processors
from strategies import make_codec_timing

ONE = Setting(device="cpu", workers=1, threads=1)
TWO = Setting(device="cpu", workers=2, threads=1)
QUIET = Counters(10.0, Processors(0.0, 0.0, 0.0), None)
SECONDS = Quantity.measured([1.0, 2.0, 3.0], "s")


def found(request: Request) -> Findings:
    """Findings as a group would make them for a request."""
    keys = {op.key for op in request.workload.ops} if request.workload else ()
    rate = Quantity.measured([1e9], "FLOP/s")
    return Findings(
        ceilings=tuple(
            Ceiling(setting=s, family="matmul", dtype="float32", rate=rate)
            for s in request.ceilings
        ),
        dispatch=(
            (Dispatch(device="cpu", phase="forward", seconds=SECONDS),) if request.dispatch else ()
        ),
        collectives=tuple(
            Collective(
                setting=s,
                operation="all_reduce",
                backend="gloo",
                table=(SizePoint(num_bytes=1024, seconds=SECONDS),),
            )
            for s in request.collectives
        ),
        codecs=tuple(make_codec_timing(setting) for setting in request.codecs),
        timings=tuple(
            OperatorTiming(setting=s, key=key, seconds=SECONDS)
            for s in request.timings
            for key in keys
        ),
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Request]:
    """The requests that `measure` sends to groups, answered at once; the cache is a fresh folder."""
    requests: list[Request] = []

    def answer(target: str, request: bytes, **how: object) -> bytes:
        assert target == "ridgeline.probe.survey:survey"
        requests.append(msgspec.json.decode(request, type=Request))
        return msgspec.json.encode(found(requests[-1]))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attempts, "run_in_group", answer)
    monkeypatch.setattr(probe, "counters", lambda: QUIET)
    monkeypatch.setattr(probe, "completed", lambda machine, keep, say: machine)
    return requests


def answered(
    monkeypatch: pytest.MonkeyPatch, module: str, answer: Callable[[bytes], bytes]
) -> list[tuple[bytes, Setting]]:
    """Stands in for fresh processes, as many as a setting has workers; what they were asked, and as what."""
    calls: list[tuple[bytes, Setting]] = []

    def in_group(target: str, request: bytes, *, deadline_s: float, **how: Any) -> bytes:
        assert (target, deadline_s) == (f"ridgeline.probe.{module}:in_worker", 240.0)
        calls.append((request, Setting(**how)))
        return answer(request)

    monkeypatch.setattr(fields, "run_in_group", in_group)
    return calls


def cache_file(tmp_path: Path) -> Path:
    return next((tmp_path / "ridgeline").glob("machine-*.json"))
