"""Which operators become one kernel, and how many bytes cross its boundary."""

import itertools

import msgspec
import pytest
from hypothesis import given

from chained_workloads import ELEMENT_BYTES, Builder, chains, flows, make_chain, tensor
from ridgeline.execution import Form
from ridgeline.simulator.compiler.fusion import (
    FUSABLE,
    LEAST_REDUCED,
    blocks_of,
    fused_runs,
    is_loop,
    run_alone,
)
from ridgeline.simulator.pricing.dataflow import data_flow, spec_bytes
from ridgeline.workload import TensorSpec, Workload

N = (1 << 20) * ELEMENT_BYTES
FORMS: tuple[Form, ...] = ("compiled", "regional", "step-graph")


def _sizes(workload: Workload, form: Form = "compiled") -> list[tuple[tuple[int, ...], int, int]]:
    return [
        (run.ops, run.bytes_read // N, run.bytes_written // N) for run in fused_runs(workload, form)
    ]


def test_a_run_moves_what_enters_and_what_leaves() -> None:
    """Three operators in a row read one tensor and write one, instead of three each."""
    workload = make_chain((3,))
    assert _sizes(workload)[0] == ((1, 2, 3), 1, 1)


def test_what_is_used_outside_is_written() -> None:
    """A result inside a run that a later contraction takes as well leaves it."""
    b = Builder()
    first = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    second = b.op("forward", "elementwise", (first,))
    b.op("forward", "matmul", (first, second))
    assert _sizes(b.workload()) == [((0, 1), 1, 2)]


def test_a_tensor_is_read_once() -> None:
    """Two operators of a run that take the same result read it once."""
    b = Builder()
    product = b.op("forward", "matmul")
    left = b.op("forward", "elementwise", (product,))
    b.op("forward", "elementwise", (product, left))
    assert _sizes(b.workload()) == [((1, 2), 1, 1)]


def test_views_are_transparent() -> None:
    """A view between two operators parts nothing: its base is what is taken."""
    b = Builder()
    first = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    view = b.op("forward", "view", (first,))
    b.op("forward", "elementwise", (view,), waits=(first,))
    assert _sizes(b.workload()) == [((0, 2), 1, 1)]


def test_no_run_waits_for_itself() -> None:
    """Operators joined around a contraction would wait for it and it for them: they stay apart."""
    b = Builder()
    first = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    product = b.op("forward", "matmul", (first,))
    b.op("forward", "elementwise", (first, product))
    assert _sizes(b.workload()) == []


def test_what_a_reduction_gives_is_read_back() -> None:
    """A reduction ends a kernel where its result is spread over more elements, as in clipping."""
    b = Builder()
    source = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    norm = b.op("forward", "reduction", (source,), output=tensor(1))
    b.op("forward", "elementwise", (source, norm))
    assert [run.ops for run in fused_runs(b.workload(), "compiled")] == [(0, 1)]


def test_what_is_reduced_is_read_by_a_pass_of_its_own() -> None:
    """The gradient of a bias sums what a kernel of rows has just written; few elements become one on the way."""
    b = Builder()
    rows = b.op("backward", "elementwise", more=(tensor(b.elements, "batch"),))
    b.op("backward", "reduction", (rows,), output=tensor(b.elements // LEAST_REDUCED))
    b.op("backward", "matmul", (rows,))
    (run,) = fused_runs(b.workload(), "compiled")
    assert (run.ops, run.bytes_read, run.bytes_written) == ((0, 1), 2 * N, N + N // LEAST_REDUCED)
    b.ops[1] = msgspec.structs.replace(b.ops[1], name="aten.max_pool2d.default")
    (run,) = fused_runs(b.workload(), "compiled")
    assert run.bytes_read == N


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("native_group_norm", 1),
        ("native_batch_norm", 0),  # of whose input a trace says that it is read twice
        ("native_layer_norm", 0),
        ("native_layer_norm_backward", 2),
    ],
)
def test_statistics_across_rows_cost_a_second_pass(name: str, again: int) -> None:
    """A batch's statistics are known when all of it was read, a row's while it is on the chip."""
    b = Builder()
    inputs = (tensor(b.elements, "batch"), tensor(b.elements, "buffer"))
    index = b.op("forward", "normalization", more=inputs, name=f"aten.{name}.default")
    assert run_alone(b.workload(), index).bytes_read == (2 + again) * N
    b.op("forward", "elementwise", (index,))
    (run,) = fused_runs(b.workload(), "compiled")
    assert (run.bytes_read, run.bytes_written) == ((2 + again) * N, N)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_draws_stay_the_librarys_unless_programs_own_them(device: str) -> None:
    """Dropout ends the run before it and begins the one behind it; its backward is any other operator."""
    b = Builder()
    first = b.op("forward", "elementwise", more=(tensor(b.elements, "batch"),))
    second = b.op("forward", "elementwise", (first,))
    dropped = b.op("forward", "elementwise", (second,), name="aten.native_dropout.default")
    third = b.op("forward", "elementwise", (dropped,))
    b.op("forward", "elementwise", (third,), name="aten.native_dropout_backward.default")
    workload = b.workload(device=device)
    assert [run.ops for run in fused_runs(workload, "compiled")] == [(0, 1), (3, 4)]
    (run,) = fused_runs(workload, "compiled", owns_random=True)
    assert run.ops == (0, 1, 2, 3, 4)


def test_a_cast_is_made_where_it_is_read() -> None:
    """What is read again is the narrow tensor of which the kernel made a wide one."""
    b = Builder()
    narrow = msgspec.structs.replace(tensor(b.elements, "batch"), dtype="bfloat16")
    cast = b.op("backward", "copy", more=(narrow,), name="aten._to_copy.default")
    b.op("backward", "reduction", (cast,), output=tensor(1))
    once = b.ops[0].bytes_read
    (run,) = fused_runs(b.workload(), "compiled")
    assert run.bytes_read == once + N // 2


def test_a_step_of_sgd_moves_five_words() -> None:
    """Momentum SGD with weight decay reads gradient, state and parameter and writes the last two."""
    workload = make_chain((0,))
    assert _sizes(workload, "step-graph") == [((3, 4, 5), 3, 2)]
    assert _sizes(workload, "compiled") == []


def test_what_only_waits_for_its_user_is_joined() -> None:
    """Momentum could decay at the start of the step; it is one kernel with what adds the gradient."""
    b = Builder()
    state = tensor(b.elements, "state")
    gradient = b.op("backward", "matmul", output=tensor(b.elements, "gradient"))
    decayed = b.op("optimizer", "elementwise", more=(state,), output=state, name="aten.mul_.Tensor")
    b.op("optimizer", "elementwise", (decayed, gradient), output=state, name="aten.add_.Tensor")
    # The decayed momentum is overwritten in place, so it is written once.
    assert _sizes(b.workload(), "step-graph") == [((1, 2), 2, 1)]


def _message(b: Builder) -> tuple[int, int, int, int]:
    """Rows of a product are taken by index, scaled and added by index to zeros: numbers of the last four."""
    table = b.op("forward", "matmul")
    index = TensorSpec(shape=(4 * N,), stride=(1,), dtype="int64", role="batch")
    wide = tensor(4 * N)
    taken = b.op(
        "forward", "gather", (table,), more=(index,), output=wide, name="aten.index.Tensor"
    )
    scaled = b.op("forward", "elementwise", (taken,), output=wide)
    zeros = b.op("forward", "elementwise", (table,), name="aten.zeros_like.default")
    added = b.op("forward", "gather", (zeros, scaled), more=(index,), name="aten.index_add.default")
    return taken, scaled, zeros, added


def test_what_is_taken_and_added_by_index_is_one_kernel_on_a_gpu() -> None:
    """Neither what is taken nor what is added is ever in memory; what was not there before comes first."""
    b = Builder(N)
    taken, scaled, zeros, added = _message(b)
    after = b.op("forward", "elementwise", (added,))
    groups = [run.ops for run in fused_runs(b.workload(device="cuda"), "compiled")]
    assert groups == [(taken, scaled, added)]
    (run,) = fused_runs(b.workload(device="cuda"), "compiled")
    # The table, the index once and the zeros; the result.
    assert run.bytes_read == 2 * N * ELEMENT_BYTES + 4 * N * 8
    assert run.bytes_written == N * ELEMENT_BYTES
    assert zeros not in run.ops
    assert after not in run.ops
    assert all(taken not in run.ops for run in fused_runs(b.workload(), "compiled"))


def test_a_table_that_is_computed_is_whole_before_rows_are_taken() -> None:
    """A loop that takes rows by index cannot make them itself."""
    b = Builder(N)
    made = b.op("forward", "elementwise", more=(tensor(N),))
    index = TensorSpec(shape=(N,), stride=(1,), dtype="int64", role="batch")
    taken = b.op("forward", "gather", (made,), more=(index,), name="aten.index_select.default")
    used = b.op("forward", "elementwise", (taken,))
    runs = fused_runs(b.workload(device="cuda"), "compiled")
    assert [run.ops for run in runs] == [(taken, used)]


def test_regions_do_not_reach_into_each_other() -> None:
    """Compiled by region, operators of two blocks stay two kernels; compiled whole they are one."""
    b = Builder()
    first = b.op("forward", "matmul", module="layers.0.linear")
    for path in ("layers.0.act", "layers.0.act", "layers.1.act", "layers.1.act", "head", "head"):
        first = b.op("forward", "elementwise", (first,), module=path)
    workload = b.workload()
    assert [run.ops for run in fused_runs(workload, "compiled")] == [(1, 2, 3, 4, 5, 6)]
    assert [run.ops for run in fused_runs(workload, "regional")] == [(1, 2), (3, 4)]
    assert fused_runs(workload, "eager") == ()


def test_blocks_are_numbered_modules_with_modules_beneath() -> None:
    """`stages.0.1` is a block, the leaf `stem.1` is not, and the optimizer lies in none."""
    b = Builder()
    for path in ("stem.1", "stages.0.0.conv", "stages.0.0", "stages.0.1.conv", "head"):
        b.op("forward", "elementwise", module=path)
    b.op("optimizer", "elementwise", module="stages.0.0")
    assert blocks_of(b.workload()) == {"stages.0.0": (1, 2), "stages.0.1": (3,)}
    assert blocks_of(make_chain((1, 1), is_numbered=False)) == {}


def test_a_slice_is_part_of_a_result() -> None:
    """What is smaller than the only result that it can come from is a part of it."""
    b = Builder()
    whole = b.op("forward", "matmul", output=tensor(3 * b.elements))
    at = b.op("forward", "elementwise", more=(tensor(b.elements),), waits=(whole,))
    assert data_flow(b.workload()).sources[at] == ((whole, 0),)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("int64", 8), ("bool", 1), ("float8_e4m3fn", 1)],
)
def test_bytes_of_a_tensor(dtype: str, size: int) -> None:
    """Distinct elements times the size that the dtype's name tells; an expanded dimension is one."""
    assert spec_bytes(TensorSpec(shape=(5, 7), stride=(0, 1), dtype=dtype)) == 7 * size
    assert spec_bytes(TensorSpec(shape=(5, 7), stride=(), dtype=dtype)) == 35 * size, "sparse"


@given(flows())
def test_laws_of_runs(workload: Workload) -> None:
    """Runs are disjoint, of one phase, of families that fuse, and their kernels have an order."""
    for form in FORMS:
        runs = fused_runs(workload, form)
        members = list(itertools.chain.from_iterable(run.ops for run in runs))
        assert len(members) == len(set(members))
        for run in runs:
            assert len({workload.ops[i].phase for i in run.ops}) == 1
            assert all(workload.ops[i].family in FUSABLE for i in run.ops)
            if workload.ops[run.ops[0]].phase != "backward":
                assert run.num_bytes <= sum(workload.ops[i].bytes_moved for i in run.ops)
        # Backward may read more, of what forward is made from, where forward does not store a result.
        apart = sum(workload.ops[i].bytes_moved for i in members)
        assert sum(run.num_bytes for run in runs) <= apart
        leader = {i: run.ops[0] for run in runs for i in run.ops}
        edges = {
            (leader.get(a, a), leader.get(b, b))
            for b, before in enumerate(data_flow(workload).waits)
            for a in before
        }
        _check_order({(a, b) for a, b in edges if a != b})


def _check_order(edges: set[tuple[int, int]]) -> None:
    """Whether kernels can be put in order: remove those that wait for nothing until none is left."""
    while edges:
        waiting = {b for _, b in edges}
        left = {(a, b) for a, b in edges if a in waiting}
        assert left != edges, "kernels wait for each other"
        edges = left


@given(chains)
def test_coarser_parts_never_move_more(workload: Workload) -> None:
    """Compiling whole moves no more bytes than by region, and the optimizer included no more still."""
    moved = []
    for form in ("eager", "regional", "compiled", "step-graph"):
        runs = fused_runs(workload, form)
        inside = {i for run in runs for i in run.ops}
        alone = sum(op.bytes_moved for i, op in enumerate(workload.ops) if i not in inside)
        moved.append(alone + sum(run.num_bytes for run in runs))
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("aten.amax.default", True), ("aten.topk.default", False), ("aten.sort.stable", False)],
)
def test_sorting_is_left_to_libraries(name: str, expected: bool) -> None:
    """As reductions, the neighbours of a point cloud took 4 % of what they take."""
    op = next(op for op in make_chain(device="cuda").ops if op.family == "elementwise")
    reduction = msgspec.structs.replace(op, name=name, family="reduction")
    assert is_loop(reduction, on_gpu=True, owns_random=False) is expected
