"""Replaying a workload: the right tensors, the right lifetimes, and nothing hidden."""

import dataclasses
import itertools
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.errors import WorkloadError
from ridgeline.machine import Setting
from ridgeline.probe.operators import operators, rebuild, values
from ridgeline.probe.operators.clock import ReplayClock
from ridgeline.probe.operators.host_costs import HostCosts
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.small_step import PHASES, WIDTH, SmallNetwork, SmallStep
from ridgeline.probe.operators.valid_inputs import Made
from ridgeline.probe.rates.dispatch import measure_dispatch
from ridgeline.tracing.capture import trace
from ridgeline.workload import Op, TensorSpec, Workload

CPU = torch.device("cpu")
SETTING = Setting(device="cpu", workers=1, threads=1)


def workload_of(width: int = 16) -> Workload:
    """One step of a small convolutional network with a norm, an embedding and a residual sum."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, width)
            self.conv = nn.Conv2d(1, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.linear = nn.Linear(4 * 8 * width, 10)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens).unsqueeze(1)
            y = self.norm(self.conv(x)).relu_()
            return self.linear((x + y).flatten(1))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = (torch.randint(0, 50, (4, 8)), torch.randint(0, 10, (4,)))

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loss_fn(model, batch).backward()
    optimizer.step()
    found = trace(model, loss_fn, optimizer, batch, name="test")
    # No place among the operators, of which tests take some.
    parameters = [msgspec.structs.replace(one, ready_op=-1) for one in found.parameters]
    return msgspec.structs.replace(found, parameters=tuple(parameters), ready_order=())


def op(name: str, inputs: list[TensorSpec], arguments: object, **fields: object) -> Op:
    values = {
        "phase": "forward",
        "module": "",
        "family": "other",
        "dtype": "float32",
        "outputs": (),
        "flops": 0,
        "bytes_read": 0,
        "bytes_written": 0,
        **fields,
    }
    text = msgspec.json.encode(arguments).decode()
    return Op(name=name, inputs=tuple(inputs), arguments=text, **values)


def spec(*shape: int, dtype: str = "float32", role: str = "activation") -> TensorSpec:
    stride = torch.empty(shape).stride()
    return TensorSpec(shape=shape, stride=stride, dtype=dtype, role=role)


def test_every_op_of_a_step_is_issued() -> None:
    """A whole training step (forward, backward, optimizer) replays without a failure, twice."""
    workload = workload_of()
    replay = WorkloadReplay(workload.ops, CPU)
    for _ in range(2):
        marks = replay.run(lambda index: True)
        assert replay.failures == {}
        assert sorted(marks) == list(range(len(workload.ops)))
        assert all(begin < end for begin, end in marks.values())


def test_inputs_are_what_the_ops_before_made() -> None:
    """Data flows from op to op: (x * 2) + 1 on a filled tensor gives what it gives in a step."""
    seen: list[torch.Tensor] = []
    x = spec(4)
    ops = [
        op("aten.full.default", [], {"args": [[4], 3.0], "kwargs": {}}, outputs=(x,)),
        op(
            "aten.mul.Tensor",
            [x],
            {"args": [{"tensor": 0}, 2.0], "kwargs": {}},
            outputs=(x,),
            dependencies=(0,),
        ),
        op(
            "aten.add.Tensor",
            [x],
            {"args": [{"tensor": 0}, 1.0], "kwargs": {}},
            outputs=(x,),
            dependencies=(1,),
        ),
    ]
    replay = WorkloadReplay(ops, CPU)
    replay._program = [
        step and dataclasses.replace(step, call=_spy(step.call, seen)) for step in replay._program
    ]
    replay.run(lambda index: True)
    assert [tensor[0].item() for tensor in seen] == [3.0, 6.0, 7.0]


def _spy(call, seen):
    def spied(*args, **kwargs):
        seen.append(call(*args, **kwargs))
        return seen[-1]

    return spied


def test_outputs_die_after_their_last_reader() -> None:
    """At the end of a pass no tensor of the step is alive; parameters are."""
    replay = WorkloadReplay(workload_of().ops, CPU)
    replay.run(lambda index: True)
    assert replay._values == {}
    assert {place[0] for place in replay._pool} >= {"parameter", "state", "made up"}


def test_ops_that_are_not_wanted_are_passed_over() -> None:
    """Only wanted ops are issued, and those that follow still get tensors of the right shape."""
    workload = workload_of()
    replay = WorkloadReplay(workload.ops, CPU)
    marks = replay.run(lambda index: index % 2 == 1)
    assert replay.failures == {}
    assert set(marks) == {i for i in range(len(workload.ops)) if i % 2 == 1}


def test_op_that_cannot_be_issued_is_left_out_with_the_reason() -> None:
    """An operator that torch does not have, or that refuses its inputs, becomes a warning; not a view."""
    x = spec(4)
    unknown = op("aten.no_such_op.default", [x], {"args": [{"tensor": 0}], "kwargs": {}})
    refusing = op("aten.mm.default", [x], {"args": [{"tensor": 0}, {"tensor": 0}], "kwargs": {}})
    fine = op("aten.relu.default", [x], {"args": [{"tensor": 0}], "kwargs": {}}, outputs=(x,))
    arguments = {"args": [{"tensor": 0}, {"opaque": "UntypedStorage"}], "kwargs": {}}
    view = op("aten.set_.source_Storage", [x], arguments, family="view")
    workload = msgspec.structs.replace(workload_of(), ops=(unknown, refusing, fine, view))
    timings, warnings, check = time_operators(workload, SETTING, budget_s=0.01)
    assert [timing.key for timing in timings] == [fine.key]
    assert check.untimed == 3
    assert sum("could not be timed" in line for line in warnings) == 2
    assert warnings[0].startswith(
        f"operator {unknown.key} could not be timed: "
        "wanted the operator aten.no_such_op.default of the workload, got none of that name"
    )
    assert warnings[1].startswith(f"operator {refusing.key} could not be timed: RuntimeError: ")


def test_timings_cover_every_key_with_at_least_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every distinct op has a time from at least two passes of a step that is shorter than the budget."""
    still = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("ridgeline.probe.operators.passes.time", still)
    workload = workload_of()
    timings, warnings, _ = time_operators(workload, SETTING, budget_s=0.3)
    assert [line for line in warnings if "could not be timed" in line] == []
    assert {timing.key for timing in timings} == {op.key for op in workload.ops}
    assert all(timing.seconds.n >= 2 for timing in timings)
    assert all(t.seconds.low <= t.seconds.value <= t.seconds.high for t in timings)
    assert all(timing.setting == SETTING for timing in timings)


def test_timing_follows_the_size_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one replay, by a clock that operators move by their work: each has its own call in its time."""
    now_ns, product = [0], torch.ops.aten.mm.default

    def wound(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now_ns[0] += x.shape[0] ** 3
        return product(x, y)

    monkeypatch.setattr(rebuild, "resolve", lambda name: wound)
    monkeypatch.setattr(operators, "host_costs", lambda kind: HostCosts(*[0.0] * 7))
    clock = ReplayClock(CPU, now_ns=lambda: now_ns[0])
    small, large = spec(32, 32, role="parameter"), spec(256, 256, role="parameter")
    arguments = {"args": [{"tensor": 0}, {"tensor": 0}], "kwargs": {}}
    ops = (op("aten.mm.default", [small], arguments), op("aten.mm.default", [large], arguments))
    workload = msgspec.structs.replace(workload_of(), ops=ops)
    timings, _, _ = time_operators(workload, SETTING, budget_s=0.1, clock=clock)
    seconds = {timing.key: timing.seconds.value for timing in timings}
    assert seconds == pytest.approx(
        {one.key: n**3 * 1e-9 for one, n in zip(ops, (32, 256), strict=True)}
    )


def test_dispatch_costs_are_measured_for_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and optimizer each have the seconds of the phase by its operators."""
    # Between steps, then by phase.
    clock = itertools.accumulate(itertools.cycle([7.0, 1.0, 2.0, 4.0]))
    fake = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("ridgeline.probe.operators.small_step.time", fake)
    costs = measure_dispatch(CPU, quick=True)
    assert [cost.phase for cost in costs] == list(PHASES)
    network, batch = SmallNetwork(), torch.rand(2, WIDTH)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    step = SmallStep(lambda: network(batch), optimizer, CPU, times_clearing=False)
    for cost, seconds in zip(costs, (1.0, 2.0, 4.0), strict=True):
        assert cost.seconds.value == pytest.approx(seconds / len(step.calls[cost.phase]))


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    data=st.data(),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int64", "int32", "bool", "uint8"]),
)
def test_random_tensors_are_as_described(shape: list[int], data: st.DataObject, dtype: str) -> None:
    """Shape, stride and dtype are those asked for, also permuted and expanded; integers stay in range."""
    order = data.draw(st.permutations(range(len(shape))))
    base = torch.empty([shape[d] for d in order]).permute(
        [order.index(d) for d in range(len(shape))]
    )
    wanted = TensorSpec(shape=tuple(base.shape), stride=base.stride(), dtype=dtype)
    tensor = values.made_up(wanted, CPU, Made("index", 7))
    assert tuple(tensor.shape) == wanted.shape
    assert tensor.stride() == wanted.stride
    assert str(tensor.dtype) == f"torch.{dtype}"
    if tensor.numel() and dtype in ("int64", "int32", "uint8"):
        assert 0 <= int(tensor.min()) <= int(tensor.max()) < 7
    assert not tensor.is_floating_point() or bool(tensor.isfinite().all())


def test_expanded_tensor_keeps_its_zero_stride() -> None:
    """A broadcast tensor takes the memory of one row."""
    tensor = values.made_up(TensorSpec(shape=(5, 3), stride=(0, 1), dtype="float32"), CPU)
    assert tensor.stride() == (0, 1)
    assert tensor.untyped_storage().nbytes() == 12


def test_arguments_come_back_as_torch_objects() -> None:
    """Tensors, dtypes, layouts, memory formats, special floats and lists of them are put in place."""
    x = torch.ones(2)
    encoded = [
        {"tensor": 0},
        [{"tensor": 0}, None, 3],
        {"dtype": "float16"},
        {"device": "cuda"},
        {"layout": "strided"},
        {"memory_format": "channels_last"},
        {"float": "-inf"},
        {"complex": [1.0, 2.0]},
        {"generator": None},
    ]
    filled = rebuild.fill(encoded, [x], CPU)
    assert filled[0] is x
    assert filled[1][0] is x
    assert filled[1][1:] == [None, 3]
    assert filled[2:6] == [torch.float16, CPU, torch.strided, torch.channels_last]
    assert filled[6:] == [float("-inf"), 1 + 2j, None]


def test_unknown_encoding_is_refused() -> None:
    """Text that tracing never writes is an error, not a guess."""
    with pytest.raises(
        WorkloadError, match=r"wanted an encoded argument .*, got \{'shape': 3\}; trace"
    ):
        rebuild.fill({"shape": 3}, [], CPU)
    with pytest.raises(WorkloadError, match=r'wanted arguments of aten\.relu\.default as \{"args"'):
        rebuild.parse(op("aten.relu.default", [], [1]))
