"""Warming up, sampling and the check against whole passes, by a clock that operators wind themselves."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from test_replay import op, spec, workload_of

from ridgeline.machine import Quantity, Setting, StepCheck
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.operators import operators
from ridgeline.probe.operators.clock import Passes, ReplayClock, Stretch
from ridgeline.probe.operators.host_costs import HostCosts
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.operators.passes import WARM_PASSES, timed_passes
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.whole_step import check_step, correction, warning
from ridgeline.workload import Op, TensorSpec, Workload

CPU = torch.device("cpu")
ONE = Setting(device="cpu", workers=1, threads=1)
PREPARING_S, WORKING_S = 1000.0, 1.0
WHOLE = "the operators of test (as-is) at 1 x 1 cpu threads take "


class _Wound:
    """A clock that only the operator below moves: far in its first calls, a little in all others."""

    ns = 0
    calls = 0
    preparing = 0


@torch.library.custom_op("probe_passes::prepared", mutates_args=())
def prepared(x: torch.Tensor) -> torch.Tensor:
    """Prepares in its first calls, as a library does that loads kernels and tries algorithms."""
    _Wound.ns += int(1e9 * (PREPARING_S if _Wound.calls < _Wound.preparing else WORKING_S))
    _Wound.calls += 1
    return x.clone()


def step_of(count: int) -> Workload:
    """A step that calls the operator `count` times, each time on other shapes."""
    ops = tuple(
        op("probe_passes.prepared.default", [x], {"args": [{"tensor": 0}], "kwargs": {}})
        for x in (spec(2, 1 + size) for size in range(count))
    )
    return msgspec.structs.replace(workload_of(), ops=ops)


def step_that_calls(
    function: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> Workload:
    """A step of one operator, in whose place a replay calls the function."""
    workload = step_of(1)
    replay = WorkloadReplay(workload.ops, CPU)
    object.__setattr__(replay._program[0], "call", function)
    monkeypatch.setattr(operators, "WorkloadReplay", lambda *args, **kwargs: replay)
    return workload


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ReplayClock:
    """The clock, at zero, and no host that costs anything besides."""
    _Wound.ns = _Wound.calls = _Wound.preparing = 0
    monkeypatch.setattr(operators, "host_costs", lambda kind: HostCosts(*[0.0] * 7))
    return ReplayClock(CPU, now_ns=lambda: _Wound.ns)


@pytest.mark.parametrize("count", [1, 5])
def test_preparation_is_in_no_sample(
    clock: ReplayClock, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the first two passes take, a timing is that of the steady step, to the digit."""
    monkeypatch.setattr("ridgeline.probe.operators.passes.MOST_PASSES", 3)
    _Wound.preparing = count * WARM_PASSES
    timings, warnings, check = time_operators(step_of(count), ONE, budget_s=60.0, clock=clock)
    assert [timing.seconds.value for timing in timings] == [WORKING_S] * count
    assert check.ratio == pytest.approx(1.0)
    assert warnings == ()


def test_rare_delays_do_not_move_a_timing(
    clock: ReplayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call in five that takes a thousand times as long is in no median, but in the correction."""
    monkeypatch.setattr("ridgeline.probe.operators.passes.time.monotonic", lambda: _Wound.ns * 1e-9)
    calls = iter(range(10_000))

    def rare(x: torch.Tensor) -> torch.Tensor:
        _Wound.ns += int(1e9 * (2.0 if next(calls) % 5 == 4 else 1.0))
        return x

    workload = step_that_calls(rare, monkeypatch)
    ((timing,), _, check) = time_operators(workload, ONE, budget_s=60.0, clock=clock)
    assert timing.seconds.value == pytest.approx(check.ops_s)
    assert check.ops_s == pytest.approx(1.0)


def test_a_step_longer_than_the_budget_ends(
    clock: ReplayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is warmed up twice, and then each distinct operator is issued once, however often it comes."""
    monkeypatch.setattr("ridgeline.probe.operators.passes.time.monotonic", lambda: _Wound.ns * 1e-9)
    same = [step_of(2).ops[0]] * 50
    workload = msgspec.structs.replace(workload_of(), ops=(*same, step_of(2).ops[1]))
    (timings, _, check) = time_operators(workload, ONE, budget_s=3.0, clock=clock)
    assert len(timings) == 2
    assert check.untimed == 0
    # For the budget all are issued; after it those of which none was: in warming up and in sampling. Then
    # each once more, for its workspace.
    assert _Wound.calls == 3 * (3 + 1 + 1) + 2


@pytest.mark.parametrize("slow", [2, 4])
def test_passes_warm_up_as_long_as_they_get_faster(
    clock: ReplayClock, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that comes fresh from the system may cost more than two passes."""
    monkeypatch.setattr("ridgeline.probe.operators.passes.time.monotonic", lambda: _Wound.ns * 1e-9)
    taken = iter([*(1.0 - 0.1 * number for number in range(slow)), *[0.1] * 1000])

    def settling(x: torch.Tensor) -> torch.Tensor:
        _Wound.ns += int(1e9 * next(taken))
        return x

    workload = step_that_calls(settling, monkeypatch)
    ((timing,), _, _) = time_operators(workload, ONE, budget_s=1.0, clock=clock)
    assert timing.seconds.value == pytest.approx(0.1)
    assert timing.seconds.high == pytest.approx(0.1)


def test_whole_passes_are_taken_among_the_others(
    clock: ReplayClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every three passes one has no marks between its ops; all stretches together are the step."""
    monkeypatch.setattr("ridgeline.probe.operators.passes.time.monotonic", lambda: _Wound.ns * 1e-9)
    workload = step_of(3)
    replay = WorkloadReplay(workload.ops, CPU)
    keys = [op.key for op in workload.ops]
    peers = Peers(rank=0, size=1, device=CPU)
    # Ten of three seconds each.
    passes = timed_passes(replay, clock, keys, peers, budget_s=29.5 * WORKING_S)
    assert len(passes.ops) == 7
    assert passes.whole == [[Stretch(0, 3, 3 * WORKING_S)]] * 3
    assert all(taken == {0: 1.0, 1: 1.0, 2: 1.0} for taken in passes.ops)


def family_step() -> Workload:
    ops = [op(f"aten.op{i}.default", [], {}, family=f) for i, f in enumerate(["matmul", "copy"])]
    return msgspec.structs.replace(workload_of(), name="test", ops=tuple(ops))


CPU_SETTING = Setting(device="cpu", threads=1)
GPU_SETTING = Setting(device="cuda")


def checked(*, matmul_s: float, copy_s: float, setting: Setting = CPU_SETTING) -> StepCheck:
    """The check of two ops of 1 s each, where whole passes found other times."""
    whole = [Stretch(0, 1, matmul_s), Stretch(1, 2, copy_s)]
    return check_step(family_step(), setting, Passes(whole=[whole, whole]), {0: 1.0, 1: 1.0})


def test_timings_that_add_up_are_left_alone() -> None:
    """Within two percent nothing is scaled and nothing said."""
    check = checked(matmul_s=1.0, copy_s=1.02)
    assert correction(check) == 1.0
    assert warning(check) is None
    assert check.missed == ()


def test_timings_that_do_not_add_up_are_scaled_and_the_families_named() -> None:
    """They are made to add up to the whole pass, and a warning says where the difference is."""
    check = checked(matmul_s=1.0, copy_s=1.2)
    assert check.ratio == pytest.approx(2.0 / 2.2)
    assert check.missed == ("copy",)
    assert correction(check) * check.ops_s == pytest.approx(2.2)
    assert warning(check) == (
        "the operators of test (as-is) at 1 x 1 cpu threads take 2.00 s one by one and 2.20 s in a whole pass, "
        "mostly in copy: their timings were scaled by 1.100"
    )
    assert checked(matmul_s=0.5, copy_s=1.0).missed == ("matmul",)


def test_on_a_gpu_no_timing_grows() -> None:
    """A pass from the host is slower where kernels are short, and what replays them is not."""
    late = checked(matmul_s=1.0, copy_s=1.2, setting=GPU_SETTING)
    assert correction(late) == 1.0
    said = warning(late)
    assert said is not None
    assert said.endswith("mostly in copy: their timings were left as they are")
    early = checked(matmul_s=1.0, copy_s=0.8, setting=GPU_SETTING)
    assert correction(early) * early.ops_s == pytest.approx(1.8)


def test_no_correction_goes_far() -> None:
    """A machine that was busy with something else changes no timing by more than a quarter."""
    assert correction(checked(matmul_s=9.0, copy_s=9.0)) == 1.25
    assert correction(checked(matmul_s=0.1, copy_s=0.1)) == 0.8
    assert correction(msgspec.structs.replace(checked(matmul_s=1.0, copy_s=1.0), whole=None)) == 1.0


def host(shape: TensorSpec) -> TensorSpec:
    return msgspec.structs.replace(shape, on_host=True)


def on_gpu_step() -> tuple[Op, Op, Op]:
    """A counter's read on the host, the read of a tensor on the device, and a product there."""
    one = {"args": [{"tensor": 0}], "kwargs": {}}
    counter = op("aten._local_scalar_dense.default", [host(spec())], one)
    read = op("aten._local_scalar_dense.default", [spec()], one)
    product = op("aten.relu.default", [spec(4)], one, outputs=(spec(4),))
    return counter, read, product


def test_ops_of_the_host_cost_the_device_nothing() -> None:
    """Only the host's time is left of them; the read of a tensor on the device keeps its own."""
    workload = msgspec.structs.replace(workload_of(), ops=on_gpu_step(), device="cuda")
    taken = dict.fromkeys((op.key for op in workload.ops), Quantity.measured([1e-3], "s"))
    seconds = operators._of_kernels(taken, {}, workload)
    issue = {op.key: Quantity.measured([1e-6], "s") for op in workload.ops}
    found = operators._timings(Setting(device="cuda"), seconds, issue, {})
    assert [timing.seconds.value for timing in found] == [0.0, 1e-3, 1e-3]
    assert [timing.issue.value for timing in found] == [1e-6] * 3
    assert [op.runs_on_host for op in workload.ops] == [True, False, False]
    assert workload.ops[0].key != workload.ops[1].key


def test_tensors_of_the_host_are_made_there() -> None:
    """In a step on a GPU (here: the device without data) its counters have values, and are read."""
    (counter, _, _) = on_gpu_step()
    kwargs = {"args": [[2]], "kwargs": {"device": {"device": "cpu"}, "dtype": {"dtype": "int64"}}}
    made = op("aten.zeros.default", [], kwargs, outputs=(host(spec(2, dtype="int64")),))
    seen: list[torch.Tensor] = []
    replay = WorkloadReplay((counter, made), torch.device("meta"), has_host=True)
    call: Callable[..., torch.Tensor] = replay._program[1].call
    object.__setattr__(replay._program[1], "call", lambda *a, **k: seen.append(call(*a, **k)))
    replay.run(lambda index: True)
    assert replay.failures == {}
    assert seen[0].device == CPU


class _Sleeper:
    """A ruler whose GPU wakes early behind the ops of `waits`, and then behind those of `hiccups` once."""

    def __init__(self, waits: set[int], hiccups: set[int]) -> None:
        self.waits, self.hiccups = waits, hiccups
        self.now = -1
        self.holds: list[bool | None] = []
        self._is_awake = False

    def issued(self, index: int) -> None:
        self.now += 1
        if index in self.waits or index in self.hiccups:
            self._is_awake = True
            self.hiccups.discard(index)

    def is_awake(self) -> bool:
        return self._is_awake

    def pace(self) -> bool:
        was, self._is_awake = self._is_awake, False
        return was

    def hold(self, *, is_slow: bool | None = None) -> bool:
        self.holds.append(is_slow)
        return self.pace()

    def mark(self) -> int:
        return self.now

    def restart(self) -> None:
        self._is_awake = False

    def seconds(self, begin: int, end: int) -> float:
        return float(end - begin)


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> tuple[ReplayClock, WorkloadReplay, _Sleeper]:
    """A clock of a GPU, and a step of six ops of which the third waits for the GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    clock, replay, ruler = ReplayClock(CPU), WorkloadReplay(step_of(6).ops, CPU), _Sleeper({2}, {4})
    monkeypatch.setattr(clock, "_ruler", ruler)
    for index, step in enumerate(replay._program):
        object.__setattr__(step, "call", lambda x, index=index: ruler.issued(index))
    return clock, replay, ruler


def test_times_that_a_gpu_may_have_waited_in_are_kept_apart(
    sleeping: tuple[ReplayClock, WorkloadReplay, _Sleeper],
) -> None:
    """An op behind which the GPU was awake has no time in that pass; one that waits itself never has."""
    clock, replay, _ = sleeping
    assert set(clock.ops(replay, lambda index: True)) == {0, 1, 3, 5}
    assert set(clock.ops(replay, lambda index: True)) == {0, 1, 3, 4, 5}
    assert clock.late == {2: [1.0, 1.0], 4: [1.0]}
    samples = operators._samples(Passes(), clock, [str(i) for i in range(6)], replay)
    assert samples == {2: [1.0, 1.0], 4: [1.0]}


def test_a_stretch_ends_behind_an_op_that_waits(
    sleeping: tuple[ReplayClock, WorkloadReplay, _Sleeper],
) -> None:
    """Then the GPU is awake, and put to sleep again without sleeping longer; all ops are in a stretch."""
    clock, replay, ruler = sleeping
    for _ in range(2):
        clock.ops(replay, lambda index: True)
    assert clock.whole(replay) == [Stretch(0, 3, 3.0), Stretch(3, 6, 3.0)]
    assert ruler.holds == [None, False]
    ruler.hiccups.add(5)
    assert clock.whole(replay) is None
