"""General rates, measured in the process that is to train, for choices without time for a profile."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from ridgeline.machine import Machine, Setting
from ridgeline.probe import measure, rates_here
from ridgeline.probe.groups.group import run_in_group
from strategies import make_machine

PHASES = {"forward", "backward", "optimizer"}


def test_what_a_machine_lacks_is_measured_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One visit to each number; what it had is as it was, and random numbers are as if nothing had been done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = measure.known_machine().machine
    assert not before.ceilings
    setting = Setting(device="cpu", workers=1, threads=torch.get_num_threads())
    state = torch.random.get_rng_state()
    found = rates_here.rates_here(before, setting)
    assert found is not None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {c.setting for c in found.ceilings} == {setting}
    assert {("matmul", "float32"), ("memory", "float32")} <= {
        (c.family, c.dtype) for c in found.ceilings
    }
    assert {d.phase for d in found.dispatch} == PHASES
    assert not found.links
    assert not measure.known_machine().machine.ceilings
    assert rates_here.seconds_here(before, setting) > rates_here.seconds_here(found, setting) == 0.0
    assert rates_here.rates_here(found, setting) == found


def test_all_workers_have_the_rates_of_the_first(tmp_path: Path) -> None:
    """Collectives too, whatever the caches of their hosts know."""
    cache = str(tmp_path).encode()
    reply = run_in_group("probe_targets:rates_of_both", cache, workers=2, threads=1, device="cpu")
    first, second = json.loads(reply)
    assert first == second
    machine = msgspec.json.decode(first, type=Machine)
    assert {c.setting.workers for c in machine.collectives} == {2}
    assert machine.fingerprint == "of 0"
    assert {d.phase for d in machine.dispatch} == PHASES
    assert machine.timings == ()


def test_a_gpu_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may fill it: then nothing is measured, and rates are assumed."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (rates_here.ROOM_BYTES, 80 << 30))
    blank = msgspec.structs.replace(make_machine(device="cuda"), ceilings=())
    assert rates_here.rates_here(blank, Setting(device="cuda", workers=1, threads=0)) is None
