"""Families of operators beside transfers: which settings are asked, what is made of rounds, what is kept."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch
from answered_requests import answered
from probe_targets import SHORT_CONTENTION

from ridgeline.errors import LaunchError, LawError
from ridgeline.machine import Machine, Setting
from ridgeline.machine.contention import ComputeFamily, Contention
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.rates import contention
from ridgeline.probe.rates.contention import (
    family_calls,
    measure_contention,
    settings_without,
    with_contention,
)
from ridgeline.probe.rates.overlap import OverlapRound
from strategies import make_machine

CPU = torch.device("cpu")
TWO = Setting(device="cpu", workers=2, threads=1)


def entry(setting: Setting = TWO, compute: float = 1.25, transfer: float = 2.0) -> Contention:
    return Contention(
        setting=setting,
        family="matmul",
        call="mm",
        transfer="collective",
        message_bytes=4 << 20,
        compute_slowdown=Sampled.measured([compute], "x"),
        transfer_slowdown=Sampled.measured([transfer], "x"),
    )


@pytest.mark.parametrize(
    ("slowdowns", "gain"), [((1.0, 1.0), 2.0), ((2.0, 2.0), 1.0), ((4.0, 2.0), 0.75)]
)
def test_gain_is_the_work_done_at_once_over_that_done_in_turn(
    slowdowns: tuple[float, float], gain: float
) -> None:
    """Both at full speed do twice as much; below 1 overlapping loses."""
    assert entry(TWO, *slowdowns).gain == gain


def test_slowdowns_that_are_none_are_refused() -> None:
    """In a profile that was edited: no time is left of what takes none."""
    with pytest.raises(LawError, match=r"^wanted a finite compute_slowdown >= 1e-30"):
        entry(TWO, 0.0)


def test_settings_with_collectives_are_asked_and_one_gpu() -> None:
    """Once each; a worker alone on the CPU has nothing to contend with."""
    assert settings_without(make_machine()) == (TWO,)
    assert settings_without(msgspec.structs.replace(make_machine(), collectives=())) == ()
    gpus = make_machine(device="cuda")
    one, two = (Setting(device="cuda", workers=workers) for workers in (1, 2))
    assert settings_without(gpus) == (one, two)
    assert settings_without(msgspec.structs.replace(gpus, contention=(entry(one),))) == (two,)


def test_every_family_has_a_call() -> None:
    """That computes, and says what."""
    calls = list(family_calls(CPU))
    assert [call.family for call in calls] == list(get_args(ComputeFamily))
    shapes = [call.compute().shape for call in calls]  # type: ignore[attr-defined]
    assert shapes == [(256, 256), (4, 32, 28, 28), (1 << 22,)]
    assert calls[2].call == "add of 16 MiB in float32"


def test_each_family_has_its_slowdowns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of computing those of the slowest worker, of transfers those of all; the first round warms up."""
    rounds: dict[int, int] = {}

    def beside(
        compute: Callable[[], torch.Tensor], message: torch.Tensor, peers: Peers
    ) -> OverlapRound:
        assert message.nbytes == 4 << 20
        size = compute().numel()
        rounds[size] = rounds.get(size, 0) + 1
        is_warm = rounds[size] > 1
        return OverlapRound(2.0 if is_warm else 99.0, 3.0 if is_warm else 99.0, 1e-3)

    monkeypatch.setattr(contention, "beside_all_reduces", beside)
    peers: Any = SimpleNamespace(
        size=2, device=CPU, gather=lambda mine: [mine, [1.5 * value for value in mine]]
    )
    found = measure_contention(TWO, peers)
    assert [(one.family, one.transfer) for one in found] == [
        (family, "collective") for family in get_args(ComputeFamily)
    ]
    for one in found:
        assert one.compute_slowdown == Sampled.measured([3.0] * 7, "x")
        assert one.transfer_slowdown == Sampled.measured([3.0] * 7 + [4.5] * 7, "x")
    assert list(rounds.values()) == [8, 8, 8]


def test_a_worker_alone_on_the_cpu_contends_with_nothing() -> None:
    """And waits for nothing."""
    assert measure_contention(Setting(device="cpu", threads=1), Peers(0, 1, CPU)) == ()


def reply(request: bytes) -> bytes:
    """Of a group that measured at the setting that it was asked for."""
    return msgspec.json.encode((entry(msgspec.json.decode(request, type=Setting)),))


def test_a_profile_gets_each_setting_once_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails costs itself and a warning, which goes when it is measured."""
    kept: list[Machine] = []
    said: list[str] = []
    machine = make_machine(device="cuda")

    def keep(one: Machine) -> Machine:
        kept.append(one)
        return one

    one, two = (Setting(device="cuda", workers=workers) for workers in (1, 2))

    def fails_alone(request: bytes) -> bytes:
        if request == msgspec.json.encode(one):
            raise LaunchError("wanted a GPU, got none")
        return reply(request)

    answered(monkeypatch, "rates.contention", fails_alone)
    found = with_contention(machine, keep, said.append)
    assert found.contention == (entry(two),)
    assert found.warnings == (
        *machine.warnings,
        "contention was not measured at 1 x cuda: wanted a GPU, got none",
    )
    asked = answered(monkeypatch, "rates.contention", reply)
    again = with_contention(found, keep, said.append)
    assert asked == [(msgspec.json.encode(one), one)]
    assert (again.contention, again.warnings) == ((entry(two), entry(one)), machine.warnings)
    assert with_contention(again, keep, said.append) == again
    assert len(kept) == 2
    assert said == [
        "contention: 1 x cuda (1 of 2)",
        "contention: 2 x cuda (2 of 2)",
        "contention: 1 x cuda (1 of 1)",
    ]


def test_two_workers_measure_each_family_beside_all_reduces() -> None:
    """Nothing is faster beside something else than alone."""
    request = msgspec.json.encode(TWO)
    reply = run_in_group(SHORT_CONTENTION, request, workers=2, threads=1, device="cpu")
    found = msgspec.json.decode(reply, type=tuple[Contention, ...])
    assert [one.family for one in found] == list(get_args(ComputeFamily))
    for one in found:
        assert one.setting == TWO
        assert (one.compute_slowdown.n, one.transfer_slowdown.n) == (1, 2)
        assert min(*one.compute_slowdown.samples, *one.transfer_slowdown.samples) >= 1.0
