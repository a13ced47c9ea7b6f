"""What an earlier start chose and learned is found again, and a damaged file is no more than a lost one."""

import math
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import make_chain
from ridgeline import units
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.decision.memory import compile_times, remembered
from ridgeline.decision.memory.compile_times import CompileTime, CompileTimes
from ridgeline.decision.memory.recalling import tried_again
from ridgeline.planner import choose
from ridgeline.simulator.compiler.compile_time import compile_seconds
from strategies import make_machine, make_workload


def test_a_choice_is_found_again(tmp_path: Path) -> None:
    """With the same plan, steps and reasons; operators of its timelines are left out."""
    ranking = choose(make_machine(), make_chain((2, 2)))
    assert remembered.keep(tmp_path, "key", ranking, {"b", "a"}) == ""
    kept = remembered.recall(tmp_path, "key")
    assert kept is not None
    assert kept.digests == ("a", "b")
    found = kept.ranking
    assert found.best.plan == ranking.best.plan
    assert found.best.timeline.step_ns == ranking.best.timeline.step_ns
    assert found.best.timeline.frames == ranking.best.timeline.frames
    assert not any(span.detail for span in found.best.timeline.spans)
    assert remembered.recall(tmp_path, "other") is None


def test_a_rhythm_is_found_again_and_tried_over_its_period(tmp_path: Path) -> None:
    """A run that is started again goes on with the interval, the fragments and the delay of the first choice."""
    machine = make_machine(latency_s=1e-4, bandwidth=2e6)
    workload = make_workload(forward=[10**8] * 4)
    ranking = choose(machine, workload, world_size=2, allow=("local-steps",))
    chosen = ranking.best.plan.sync
    assert chosen.every > 1
    assert chosen.options
    assert remembered.keep(tmp_path, "key", ranking) == ""
    kept = remembered.recall(tmp_path, "key")
    assert kept is not None
    assert kept.ranking.best.plan.sync == chosen
    # In a step without exchange nothing was waited for: its share comes on top.
    step = ranking.best.timeline
    alone = msgspec.structs.replace(
        step, origin="measured", steps_ns=(step.step_ns - step.total_ns("wait"),) * 8
    )
    again = tried_again(kept.ranking, lambda plan: alone, Heartbeat(None), lambda line: None)
    assert again is not None
    assert again.best.plan.sync == chosen
    assert again.best.step_s == pytest.approx(step.step_ns * 1e-9)


def test_figures_of_an_earlier_start_are_told_from_those_of_this_one() -> None:
    """However often it is started: once in front of each reason that has some."""
    ranking = choose(make_machine(), make_chain((2, 2)))
    now = msgspec.structs.replace(ranking.best.timeline, origin="measured")
    again = ranking
    for _ in range(2):
        found = tried_again(again, lambda plan: now, Heartbeat(None), lambda line: None)
        assert found is not None
        again = found
    assert again.best.why == f"when it was chosen: {ranking.best.why}"
    pairs = zip(ranking.best.plan.choices, again.best.plan.choices, strict=True)
    searched = [(old, new) for old, new in pairs if old != new]
    assert searched
    assert all(new.reason == f"when it was chosen: {old.reason}" for old, new in searched)
    assert {old.origin for old, _ in searched} == {"search"}


def test_a_damaged_choice_is_made_again(tmp_path: Path) -> None:
    """And a directory that cannot be written is said, not raised."""
    (tmp_path / "choice-key.json").write_text("{")
    assert remembered.recall(tmp_path, "key") is None
    ranking = choose(make_machine(), make_chain((2, 2)))
    file = tmp_path / "file"
    file.write_text("")
    problem = remembered.keep(file, "key", ranking)
    assert problem.startswith(f"the choice could not be kept in {file} (File exists)")


def test_only_so_many_choices_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first."""
    monkeypatch.setattr(remembered, "MOST_KEPT", 2)
    ranking = choose(make_machine(), make_chain((2, 2)))
    for key in ("a", "b", "c"):
        remembered.keep(tmp_path, key, ranking)
    assert len([*tmp_path.glob("choice-*.json")]) == 2
    assert remembered.recall(tmp_path, "c") is not None


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_keys_tell_parts_apart(one: list[str], other: list[str]) -> None:
    """Equal for equal parts, and never by joining them in another way."""
    assert (remembered.key_of(one) == remembered.key_of(other)) == (one == other)


def test_compile_times_are_learned(tmp_path: Path) -> None:
    """A step that compiled twice as fast as expected is expected to do so again; a cache tells nothing."""
    ranking = choose(make_machine(device="cuda"), make_chain((2, 2), device="cuda"))
    assert compile_times.load(tmp_path).factor("s") == 1.0
    compiled = next(c for c in ranking.candidates if c.plan.execution == "compiled+graph")
    expected_s = compiled.timeline.counters["compile_s"]
    for share, factor in ((0.01, 1.0), (0.5, 0.5)):
        measured = msgspec.structs.replace(
            compiled.timeline, origin="measured", counters={"compile_s": share * expected_s}
        )
        tried = msgspec.structs.replace(compiled, measured=measured)
        compile_times.learn(
            tmp_path, msgspec.structs.replace(ranking, candidates=(tried,)), 1.0, step="s"
        )
        assert compile_times.load(tmp_path).factor("s") == pytest.approx(factor)
    (tmp_path / "compile-times.json").write_text("{")
    assert compile_times.load(tmp_path).factor("s") == 1.0


def test_what_was_learned_stays_where_it_holds(tmp_path: Path) -> None:
    """Compiling that takes thrice of what is assumed is thrice of it at every start, for the best plan too."""
    machine, workload = make_machine(device="cuda"), make_chain((2, 2), device="cuda")
    fixed = {"execution": "compiled+graph", "kernels": "default"}
    takes_s = 3.0 * compile_seconds(workload, "compiled+graph")
    for _ in range(3):
        factor = compile_times.load(tmp_path).factor("s")
        ranking = choose(machine, workload, fixed=fixed, compile_factor=factor)
        best, others = ranking.candidates[0], ranking.candidates[1:]
        assert best.timeline.counters["compile_s"] == pytest.approx(factor * takes_s / 3.0)
        said = (
            f"compiling takes about {units.seconds(factor * takes_s / 3.0)} before the first step"
        )
        assert any(said in note for note in best.timeline.notes)
        measured = msgspec.structs.replace(
            best.timeline, origin="measured", counters={"compile_s": takes_s}
        )
        tried = msgspec.structs.replace(best, measured=measured)
        learned = msgspec.structs.replace(ranking, candidates=(tried, *others))
        compile_times.learn(tmp_path, learned, factor, step="s")
        assert compile_times.load(tmp_path).factor("s") == pytest.approx(3.0)


@pytest.mark.parametrize(("least", "factor"), [(0.5, 1.0), (4.0, 4.0)])
def test_a_trial_that_was_stopped_tells_the_least(
    least: float, factor: float, tmp_path: Path
) -> None:
    """Compiling takes longer than that: it raises what is expected, and never lowers it."""
    ranking = choose(make_machine(), make_chain((2, 2)))
    compile_times.learn(tmp_path, ranking, 1.0, step="s", least=least)
    assert compile_times.load(tmp_path).factor("s") == pytest.approx(factor)


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=20))
def test_a_few_other_steps_tell_little_of_the_host(ratios: list[float]) -> None:
    """What is expected of a new step lies between what is assumed and what was seen, nearer with each."""
    known = tuple(CompileTime(step=str(i), ratio=ratio) for i, ratio in enumerate(ratios))
    factor = CompileTimes(known=known).factor("new")
    median = statistics.median(ratios)
    assert min(1.0, median) - 1e-9 <= factor <= max(1.0, median) + 1e-9
    share = len(ratios) / (len(ratios) + 2)
    assert math.log(factor) == pytest.approx(share * math.log(median), abs=1e-9)
    assert CompileTimes(known=known).factor("0") == ratios[0]
