"""When the host has issued the operators of a step, with and without waiting for what the device computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.simulator.frames import Frame
from ridgeline.simulator.model import StepModel
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.simulator.schedule import issue_step, schedule
from ridgeline.workload import Op, TensorSpec

FRAMES = (Frame(name="forward", lane="compute"), Frame(name="backward", lane="compute"))


def piece(host_s: float, lane_s: float, *, waits: bool = False) -> Piece:
    return Piece(
        name="aten.some.default",
        module="",
        op=0,
        work_s=lane_s,
        fixed_s=0.0,
        host_s=host_s,
        ideal_s=0.0,
        roofline_s=0.0,
        bound="memory",
        source="timing",
        flops=0,
        num_bytes=0,
        has_kernel=True,
        waits=waits,
    )


def model(forward: list[Piece], backward: list[Piece]) -> StepModel:
    pieces = {"forward": tuple(forward), "backward": tuple(backward)}
    return StepModel(FRAMES, pieces, {}, {}, 0.0, 0.0, ())


times = st.floats(0.0, 1.0)
lists = st.lists(st.builds(piece, times, times, waits=st.booleans()), min_size=1, max_size=6)


@given(lists, lists)
def test_waiting_costs_and_is_bounded(forward: list[Piece], backward: list[Piece]) -> None:
    """A step takes at least what the host does, and at most what host and device do one after the other."""
    both = [*forward, *backward]
    host_s, lane_s = sum(p.host_s for p in both), sum(p.lane_s for p in both)
    found = issue_step(model(forward, backward)).step_s
    assert found >= host_s - 1e-9
    assert found <= host_s + lane_s + 1e-9
    if not any(p.waits for p in both):
        assert found == pytest.approx(host_s)


@given(lists, lists)
def test_what_waits_keeps_the_host_with_the_device(
    forward: list[Piece], backward: list[Piece]
) -> None:
    """Where a value is read in each step, none can take less than the device needs for one."""
    forward = [piece(0.1, 0.0, waits=True), *forward]
    found = issue_step(model(forward, backward)).step_s
    assert found >= sum(p.lane_s for p in (*forward, *backward)) - 1e-9


def test_the_device_stands_still_while_the_host_issues_what_comes_after_a_wait() -> None:
    """5 ms of forward, read by the host; then 1 ms until backward is issued, which takes 4 ms."""
    found = model([piece(1e-3, 5e-3)], [piece(1e-3, 0.0, waits=True), piece(1e-3, 4e-3)])
    issue = issue_step(found)
    # The next step is issued while backward runs, so 1 ms of reading and 1 ms of issuing are in the open.
    assert issue.step_s == pytest.approx(11e-3)
    spans = [s for s in schedule(found, device="cuda", execution="eager") if not s.detail]
    assert max(s.end_ns for s in spans) == pytest.approx(11_000_000)


DEVICE = TensorSpec(shape=(4,), stride=(1,), dtype="float32", role="activation")
HOST = TensorSpec(shape=(4,), stride=(1,), dtype="float32", role="activation", on_host=True)
MASK = TensorSpec(shape=(4,), stride=(1,), dtype="bool", role="activation")


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "waits"),
    [
        ("aten._local_scalar_dense.default", (DEVICE,), (), True),
        ("aten._local_scalar_dense.default", (HOST,), (), False),
        ("aten.nonzero.default", (DEVICE,), (DEVICE,), True),
        ("aten._to_copy.default", (DEVICE,), (HOST,), True),
        ("aten._to_copy.default", (HOST,), (DEVICE,), False),
        ("aten.index.Tensor", (DEVICE, MASK), (DEVICE,), True),
        ("aten.index.Tensor", (MASK, DEVICE), (MASK,), False),
        ("aten._ctc_loss.Tensor", (DEVICE, DEVICE), (DEVICE,), True),
        ("aten.mm.default", (DEVICE, DEVICE), (DEVICE,), False),
    ],
)
def test_which_operators_wait(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *, waits: bool
) -> None:
    op = Op(
        name=name,
        phase="forward",
        module="",
        family="other",
        dtype="float32",
        inputs=inputs,
        outputs=outputs,
        arguments="",
        flops=0,
        bytes_read=0,
        bytes_written=0,
    )
    assert op.waits_for_device is waits
