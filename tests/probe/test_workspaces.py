"""Workspaces of operators: found by one call of each, and with the trace the peak that a step really has."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_replay import op, spec, workload_of
from test_replay_recurrent import workload_of as recurrent_workload
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ridgeline.machine import Machine, Setting, Workspace
from ridgeline.plan import Plan
from ridgeline.probe.operators import operators
from ridgeline.probe.operators.clock import ReplayClock
from ridgeline.probe.operators.operators import Timed, time_operators
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.workspaces import (
    MARK,
    HeldMemory,
    held_in,
    made_bytes,
    measured_workspaces,
)
from ridgeline.simulator.memory import peak_memory_bytes
from ridgeline.tracing.capture import trace
from ridgeline.workload import TensorSpec, Workload
from strategies import make_machine

CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], Tensor]


def here() -> Setting:
    return Setting(device="cpu", workers=1, threads=torch.get_num_threads())


def measured(workload: Workload, passes: int = 2) -> dict[str, Workspace]:
    """The workspaces of a step that has run before."""
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for _ in range(passes):
            replay.run(lambda index: True)
    found, notes = measured_workspaces(replay, workload, here(), ReplayClock(CPU))
    assert notes == ()
    return found


def knowing(timed: Timed) -> Machine:
    machine = make_machine(settings=[here()], cores=torch.get_num_threads())
    return msgspec.structs.replace(machine, timings=timed.timings)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 64, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.AvgPool3d(2), nn.Conv3d(4, 8, 3))


def _squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def held_by_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """What a plain step held at most, by torch's profiler, the model and the batch included."""

    def step() -> None:
        optimizer.zero_grad()
        _squares(model, batch).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    there = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), batch))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    now = most = 0
    events = run.profiler.kineto_results.events()
    for event in sorted(
        (each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return there + most


@pytest.mark.parametrize(
    ("make", "shape"), [(_Recurrent, (16, 20, 64)), (_convolutions, (2, 3, 8, 16, 16))]
)
def test_the_predicted_peak_is_that_of_a_real_step(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Within 5 %, where the trace alone is a tenth or more too low."""
    torch.manual_seed(0)
    model, batch = make(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workload = trace(model, _squares, optimizer, batch)
    machine = knowing(time_operators(workload, here(), budget_s=0.01))
    held = held_by_a_step(model, optimizer, batch)
    assert workload.peak_memory_bytes < 0.9 * held
    assert peak_memory_bytes(workload, Plan(), machine) == pytest.approx(held, rel=0.05)


def test_workspaces_are_the_same_each_time() -> None:
    """Of every operator, whatever the allocator has at hand."""
    workload = recurrent_workload(nn.LSTM)
    first = measured(workload)
    assert set(first) == {each.key for each in workload.ops}
    assert measured(workload, passes=4) == first


def test_each_operator_is_called_once_but_those_that_others_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two equal layers: each makes the reserve of its own backward, all else is called once a kind."""
    model = _Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workload = trace(model, _squares, optimizer, torch.randn(4, 5, 64))
    replay, called = WorkloadReplay(workload.ops, CPU), []
    with torch.no_grad():
        replay.run(lambda index: True)
    issue = WorkloadReplay._issue

    def counted(self: WorkloadReplay, index: int, *rest: Any) -> Any:
        called.append(workload.ops[index])
        return issue(self, index, *rest)

    monkeypatch.setattr(WorkloadReplay, "_issue", counted)
    measured_workspaces(replay, workload, here(), ReplayClock(CPU))
    others = [each.key for each in called if each.name != "aten.mkldnn_rnn_layer.default"]
    assert len(others) == len(set(others))
    assert len(called) - len(others) == 2


def test_a_profiler_that_is_in_use_costs_a_note_and_no_timing() -> None:
    """Nothing is known of workspaces then; the note names no operator, which would not be issued again."""
    one = {"args": [{"tensor": 0}], "kwargs": {}}
    relu = op("aten.relu.default", [spec(4, 4)], one, outputs=(spec(4, 4),))
    workload = msgspec.structs.replace(workload_of(), ops=(relu,), variants=())
    with torch.autograd.profiler.profile() as run:
        timed = time_operators(workload, here(), budget_s=0.01)
    assert timed.warnings[-1] == (
        f"workspaces of {workload.name} were not measured at {here()}: RuntimeError: torch's profiler is in "
        "use; measure where nobody profiles"
    )
    assert [timing.workspace for timing in timed.timings] == [None]
    assert "aten::relu" in {event.key for event in run.key_averages()}


def test_an_operator_that_fails_only_while_it_is_watched_keeps_its_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no workspace, and no warning says that it could not be timed."""
    one = {"args": [{"tensor": 0}], "kwargs": {}}
    relu = op("aten.relu.default", [spec(4, 4)], one, outputs=(spec(4, 4),))
    workload = msgspec.structs.replace(workload_of(), ops=(relu,), variants=())
    replay = WorkloadReplay(workload.ops, CPU)

    def fails(x: Tensor) -> Tensor:
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("watched")
        return x

    object.__setattr__(replay._program[0], "call", fails)
    monkeypatch.setattr(operators, "WorkloadReplay", lambda *args, **kwargs: replay)
    timed = time_operators(workload, here(), budget_s=0.01)
    assert [timing.workspace for timing in timed.timings] == [None]
    assert not any("watched" in line for line in timed.warnings)


def test_a_gpus_allocator_is_asked_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most over what was there passes, but for what is left, which the library keeps: no output is."""
    one = {"args": [{"tensor": 0}], "kwargs": {}}
    relu = op("aten.relu.default", [spec(4, 4)], one, outputs=(spec(4, 4),))
    workload = msgspec.structs.replace(workload_of(), ops=(relu,), variants=())
    asked = iter([(1000, 5000), (1032, 1532)])
    done: list[str] = []

    def requested() -> dict[str, dict[str, dict[str, int]]]:
        current, peak = next(asked)
        done.append("asked")
        return {"requested_bytes": {"all": {"current": current, "peak": peak}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", requested)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("cleared"), raising=False
    )
    replay = WorkloadReplay(workload.ops, CPU)
    found, notes = measured_workspaces(replay, workload, Setting(device="cuda"), ReplayClock(CPU))
    assert notes == ()
    assert done == ["cleared", "reset", "asked", "asked"]
    assert found == {relu.key: Workspace(passing_bytes=500, library_bytes=32)}


def test_an_allocator_that_does_not_count_costs_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as CUDA's own, which knows no requests."""
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    workload = recurrent_workload(nn.LSTM)
    replay = WorkloadReplay(workload.ops, CPU)
    found, notes = measured_workspaces(replay, workload, Setting(device="cuda"), ReplayClock(CPU))
    assert found == {}
    assert notes == (
        f"workspaces of {workload.name} were not measured at 1 x cuda: KeyError: 'requested_bytes'",
    )


def _event(name: str, start: int, end: int, num_bytes: int = 0) -> Any:
    return SimpleNamespace(
        name=lambda: name, start_ns=lambda: start, end_ns=lambda: end, nbytes=lambda: num_bytes
    )


@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), max_size=5), st.randoms())
def test_a_call_holds_what_came_and_went_in_its_range(calls: list[list[int]], random: Any) -> None:
    """The greatest partial sum and the whole one; what is allocated between two calls is in neither."""
    events, now = [], 0
    for number, changes in enumerate(calls):
        events.append(_event(f"{MARK}{number}", now, now + 10))
        events += [_event("[memory]", now + 1 + k, 0, each) for k, each in enumerate(changes)]
        events += [_event("[memory]", now + 15, 0, 1 << 30), _event("aten::mm", now + 2, now + 3)]
        now += 20
    random.shuffle(events)
    sums = [[sum(changes[:k]) for k in range(len(changes) + 1)] for changes in calls]
    assert held_in(events) == {k: HeldMemory(max(each), each[-1]) for k, each in enumerate(sums)}


def test_only_new_memory_is_made() -> None:
    """Views and what was given are not; what a trace cannot size is counted apart."""
    given_tensor, fresh = torch.zeros(8), torch.zeros(4, 4)
    reserve = torch.zeros(100, dtype=torch.uint8)
    sparse = torch.eye(4).to_sparse()
    unknown = TensorSpec(shape=(0,), stride=(1,), dtype="uint8")
    specs = [spec(2), spec(4, 4), spec(4), unknown, TensorSpec(shape=(4, 4), stride=(), dtype="x")]
    made = [given_tensor[:2], fresh, fresh[0], reserve, sparse]
    parts = 4 * 4 + 2 * 4 * 8
    found = made_bytes(([given_tensor], {}), made, specs, "cpu")
    assert found == (64 + 100 + parts, 100 + parts)
    assert made_bytes(((), {}), made, specs, "cuda") == (0, 0)
