"""What a trial tells about plans that were not tried: their steps, and what preparing them takes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planned_candidates import S, make_candidate
from ridgeline.plan import Plan, Sync
from ridgeline.planner.trials.relatives import AGAIN, SHARED_S, corrected


def test_an_untried_plan_is_prepared_like_its_kin() -> None:
    """Buckets do not change what capturing takes, so a plan is not ahead because nobody tried it."""
    tried = make_candidate("graph", 0.002, 0.8, is_measured=True)
    plain = make_candidate("graph", 0.002)
    buckets = Sync(bucket_bytes=(1 << 20,))
    kin = msgspec.structs.replace(plain, plan=Plan(execution="graph", sync=buckets))
    eager = make_candidate("eager", 0.004)
    others = corrected([tried, kin, eager, msgspec.structs.replace(plain, plan=Plan(workers=2))])
    assert [c.compile_s for c in others] == [0.8, 0.8, 0.0, 0.0]
    assert kin.compile_s == 0.0


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    """A plan with the program of a tried one is captured in a second; another one is compiled, faster."""
    tried = make_candidate("compiled", 0.002, 40.0, is_measured=True)
    tried = msgspec.structs.replace(
        tried, timeline=msgspec.structs.replace(tried.timeline, counters={"compile_s": 80.0})
    )
    same = make_candidate("compiled+graph", 0.001, 80.0)
    other = msgspec.structs.replace(
        same, plan=Plan(execution="compiled+graph", memory_format="channels_last")
    )
    _, same, other = corrected([tried, same, other])
    assert same.compile_s == SHARED_S
    assert other.compile_s == pytest.approx(AGAIN * 40.0)


BY_MIB = Sync(bucket_bytes=(1 << 20,))


@pytest.mark.parametrize(
    ("done", "wanted", "is_shared"),
    [
        (Plan(execution="compiled"), Plan(execution="compiled+graph"), True),
        (Plan(execution="compiled+graph"), Plan(execution="compiled"), True),
        (Plan(execution="compiled+graph", workers=2), Plan(execution="compiled", workers=2), False),
        (Plan(execution="compiled", workers=2), Plan(execution="compiled+graph", workers=2), False),
        (
            Plan(execution="compiled+graph", workers=2),
            Plan(execution="compiled", workers=2, sync=Sync(every=8)),
            True,
        ),
        (
            Plan(execution="compiled", workers=2, optimizer="fused"),
            Plan(execution="compiled", workers=2),
            True,
        ),
        (
            Plan(execution="compiled", workers=2, optimizer="fused"),
            Plan(execution="compiled", workers=2, sync=BY_MIB),
            False,
        ),
        (
            Plan(execution="compiled+graph", workers=2, optimizer="fused"),
            Plan(execution="compiled+graph", workers=2, sync=BY_MIB),
            True,
        ),
    ],
)
def test_a_program_in_parts_is_another_one(done: Plan, wanted: Plan, is_shared: bool) -> None:
    """Over several workers a step that the host calls is cut where buckets end; a replayed one is whole."""
    counters = {"compile_s": 80.0}
    tried = make_candidate("compiled", 0.002, 40.0, is_measured=True)
    timeline = msgspec.structs.replace(tried.timeline, counters=counters)
    tried = msgspec.structs.replace(tried, plan=done, timeline=timeline)
    other = msgspec.structs.replace(make_candidate("compiled", 0.001, 80.0), plan=wanted)
    _, other = corrected([tried, other])
    assert other.compile_s == pytest.approx(SHARED_S if is_shared else AGAIN * 40.0)


@given(st.floats(0.1, 10.0), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0))
def test_trials_correct_their_relatives(factor: float, graph_s: float, eager_s: float) -> None:
    """What a trial took over its prediction is expected of the others; other numbers of workers stay."""
    graph = make_candidate("graph", graph_s)
    measured = msgspec.structs.replace(
        graph.timeline, origin="measured", steps_ns=(round(factor * graph_s * S),)
    )
    tried = msgspec.structs.replace(graph, measured=measured)
    eager = make_candidate("eager", eager_s)
    two = msgspec.structs.replace(eager, plan=Plan(workers=2))
    tried, eager, two = corrected([tried, eager, two])
    assert tried.step_s == pytest.approx(factor * graph_s, rel=1e-5)
    assert eager.step_s == pytest.approx(factor * eager_s, rel=1e-5)
    assert two.step_s == pytest.approx(eager_s, rel=1e-5)
