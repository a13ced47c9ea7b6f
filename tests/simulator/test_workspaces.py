"""What operators take for themselves, in the memory that a step is predicted to need."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import units
from ridgeline.machine import Machine, OperatorTiming, Setting, Workspace
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.pruning import Pruned, fitting
from ridgeline.simulator.memory import PEAK_CATEGORIES, fits, memory_peak, peak_memory_bytes
from ridgeline.simulator.step import simulate
from ridgeline.simulator.workspaces import workspace_bytes
from ridgeline.workload import Op, TensorSpec, Workload
from strategies import make_machine, make_workload, measured

ALONE = Setting(device="cpu", workers=1, threads=2)
NUM_OPS = 9
sizes = st.lists(st.integers(0, 1 << 20), min_size=NUM_OPS, max_size=NUM_OPS)


def machine_with(
    workload: Workload, spaces: Sequence[Workspace], setting: Setting = ALONE, **options: object
) -> Machine:
    """A machine on which operator k was found to take `spaces[k]`."""
    timings = tuple(
        OperatorTiming(setting=setting, key=op.key, seconds=measured(1e-3, "s"), workspace=space)
        for op, space in zip(workload.ops, spaces, strict=True)
    )
    return msgspec.structs.replace(make_machine(device=setting.device, **options), timings=timings)


def kept(index: int, num_bytes: int) -> list[Workspace]:
    """Workspaces of which one is kept."""
    return [Workspace(kept_bytes=num_bytes if k == index else 0) for k in range(NUM_OPS)]


def changed(workload: Workload, index: int, op: Op) -> Workload:
    ops = (*workload.ops[:index], op, *workload.ops[index + 1 :])
    return msgspec.structs.replace(workload, ops=ops)


@given(sizes)
def test_what_passes_counts_where_its_operator_runs(passing: list[int]) -> None:
    """The peak is the greatest sum of what is traced at an operator and what that takes."""
    workload = make_workload()
    machine = machine_with(workload, [Workspace(passing_bytes=size) for size in passing])
    live = [point.total_bytes for point in workload.memory]
    peak = memory_peak(workload, Plan(), machine)
    assert peak.total_bytes == max(map(sum, zip(live, passing, strict=True)))
    assert peak.workspace_bytes == passing[peak.op]


def test_the_categories_of_a_prediction_add_up() -> None:
    """A predicted timeline says what its peak consists of."""
    workload = make_workload()
    machine = machine_with(workload, [Workspace(passing_bytes=5)] * NUM_OPS)
    counters = simulate(machine, workload, Plan()).counters
    parts = [counters[f"peak_{category}_bytes"] for category in PEAK_CATEGORIES]
    assert sum(parts) == counters["peak_memory_bytes"] == workload.peak_memory_bytes + 5
    assert counters["peak_workspace_bytes"] == 5


def test_what_is_kept_counts_until_it_is_read_for_the_last_time() -> None:
    """A recurrent layer's reserve is there from its forward to its backward operator, whatever runs between."""
    workload = make_workload()
    reserve = TensorSpec(shape=(0,), stride=(1,), dtype="uint8")
    maker = msgspec.structs.replace(workload.ops[1], outputs=(reserve,), memory=((0, 0), (7, 0)))
    reader = msgspec.structs.replace(workload.ops[5], inputs=(reserve,), memory=((7, 0), (0, 0)))
    workload = changed(changed(workload, 1, maker), 5, reader)
    machine = machine_with(workload, kept(1, 100))
    assert workspace_bytes(machine, workload, ALONE) == (0, 100, 100, 100, 100, 100, 0, 0, 0)
    # Of each of three micro-batches a third is kept.
    assert max(workspace_bytes(machine, workload, ALONE, accumulate=3)) == 34


def test_a_sparse_gradient_stays_to_the_end() -> None:
    """Its parts have no storage of which a trace knows; of another sparse tensor they are traced."""
    workload = make_workload()
    sparse = TensorSpec(shape=(9, 3), stride=(), dtype="float32")
    for index, last in ((6, NUM_OPS - 1), (8, 8), (2, 2)):
        maker = msgspec.structs.replace(
            workload.ops[index], outputs=(sparse,), memory=((0, 0), (-1, 0))
        )
        step = changed(workload, index, maker)
        found = workspace_bytes(machine_with(step, kept(index, 10)), step, ALONE)
        assert found == tuple(10 if index <= k <= last else 0 for k in range(NUM_OPS))


def test_a_librarys_buffers_stay_for_each_thread() -> None:
    """On a GPU a thread of its own runs the backward pass, and has the library's largest buffers again."""
    workload = make_workload(device="cuda")
    spaces = [Workspace(library_bytes=size) for size in (1, 32, 8, 0, 4, 16, 0, 0, 2)]
    gpu = Setting(device="cuda")
    found = workspace_bytes(machine_with(workload, spaces, gpu), workload, gpu)
    assert found == (32 + 16,) * NUM_OPS


def test_a_profile_that_has_no_workspaces_counts_none(tmp_path: Path) -> None:
    """One of an older release loads, and predicts what the trace alone tells."""
    workload = make_workload()
    machine = machine_with(workload, [Workspace(passing_bytes=7)] * NUM_OPS)
    path = machine.save(tmp_path / "machine.json")
    old = msgspec.json.decode(path.read_bytes())
    del old["sha256"]
    for timing in old["value"]["timings"]:
        del timing["workspace"]
    path.write_bytes(msgspec.json.encode(old))
    loaded = Machine.load(path)
    assert workspace_bytes(loaded, workload, ALONE) == ()
    assert memory_peak(workload, Plan(), loaded).workspace_bytes is None
    assert peak_memory_bytes(workload, Plan(), loaded) == workload.peak_memory_bytes
    assert peak_memory_bytes(workload, Plan(), machine) == workload.peak_memory_bytes + 7


def test_the_nearest_setting_tells_where_none_was_measured() -> None:
    """Four workers are expected to take what two take; those without a workspace say nothing."""
    workload = make_workload()
    two = Setting(device="cpu", workers=2, threads=1)
    machine = machine_with(workload, [Workspace(passing_bytes=3)] * NUM_OPS, two)
    untold = machine_with(workload, [Workspace()] * NUM_OPS, ALONE).timings
    untold = tuple(msgspec.structs.replace(timing, workspace=None) for timing in untold)
    machine = msgspec.structs.replace(machine, timings=(*untold, *machine.timings))
    for workers in (1, 2, 4):
        setting = Setting(device="cpu", workers=workers, threads=1)
        assert workspace_bytes(machine, workload, setting) == (3,) * NUM_OPS


def test_a_plan_whose_workspaces_find_no_room_is_ruled_out() -> None:
    """Micro-batches need not make a workspace smaller."""
    workload = make_workload(gradient_bytes=[100] * 4, activation_bytes=1000)
    small = machine_with(workload, [Workspace()] * NUM_OPS, memory_bytes=3000)
    assert fits(small, workload, Plan())
    large = machine_with(workload, [Workspace(passing_bytes=5000)] * NUM_OPS, memory_bytes=3000)
    assert not fits(large, workload, Plan())
    ruled_out = fitting(large, workload, Plan(), may_split=True)
    assert isinstance(ruled_out, Pruned)
    # Parameters, gradients in a bucket, the largest beside it, an eighth of the activations, the workspace.
    assert ruled_out.plan.accumulate == 8
    assert ruled_out.reason == (
        f"needs {units.num_bytes(400 + 400 + 100 + 125 + 5000)} of memory per worker, of which 2.64 KiB are "
        "usable"
    )


def test_operators_in_another_precision_take_what_they_took_as_written() -> None:
    """Where only the step as written was measured, one in bf16 is not predicted to need none."""
    workload = make_workload()
    narrow = [msgspec.structs.replace(spec, dtype="bfloat16") for spec in workload.ops[1].inputs]
    variant = msgspec.structs.replace(
        changed(workload, 1, msgspec.structs.replace(workload.ops[1], inputs=tuple(narrow))),
        precision="bf16",
    )
    machine = machine_with(
        workload, [Workspace(passing_bytes=1 << 30 if k == 1 else 0) for k in range(NUM_OPS)]
    )
    both = msgspec.structs.replace(workload, variants=(variant,))
    peak = memory_peak(both, Plan(precision="bf16"), machine)
    assert peak == memory_peak(both, Plan(), machine)
    assert peak.workspace_bytes == 1 << 30


def test_a_step_of_which_nothing_was_measured_has_no_workspaces_of_size_zero() -> None:
    """Timings of another step in the profile say nothing of this one."""
    workload = make_workload()
    machine = machine_with(workload, [Workspace(passing_bytes=7)] * NUM_OPS)
    ops = tuple(msgspec.structs.replace(op, name=f"other.{op.name}") for op in workload.ops)
    other = msgspec.structs.replace(workload, ops=ops)
    assert workspace_bytes(machine, other, ALONE) == ()
    assert memory_peak(other, Plan(), machine).workspace_bytes is None
