"""What a trial read of the compiler's programs: plans with the same program are predicted from it."""

import json
from pathlib import Path

import msgspec
import pytest

from made_programs import loop, program, small_programs, small_step
from ridgeline.compiled_program import CompilerProgram
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.ranking import CompilerReading
from ridgeline.planner.trials.readings import as_read
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine

MACHINE = make_machine(device="cuda", num_gpus=1)
ALLOW = ("random",)
LINE = (
    "the compiler made 2 kernels of its own that move 18.0 MiB, where 3 and 24.0 MiB were assumed: a step of "
    "24.8 ms from what it made, 27.3 ms as assumed"
)


def try_with(
    programs: tuple[CompilerProgram, ...], notes: tuple[str, ...] = (), factor: float = 0.9
):
    """Trials in which compiling makes such programs, and then a step takes so much of what they tell."""

    def trial(plan: Plan) -> Timeline:
        made = programs if "compiled" in plan.execution else ()
        predicted = simulate(MACHINE, small_step(), plan, details=False, programs=made)
        return msgspec.structs.replace(
            predicted,
            origin="measured",
            programs=made,
            notes=notes if made else (),
            steps_ns=(round(predicted.step_ns * (factor if made else 1.0)),) * 3,
        )

    return trial


def choose_with(trial, **more) -> Ranking:
    return choose(MACHINE, small_step(), world_size=1, allow=ALLOW, trial=trial, **more)


def of(ranking: Ranking, **knobs: object):
    """The candidates whose plan has these values."""
    return [c for c in ranking.candidates if all(getattr(c.plan, k) == v for k, v in knobs.items())]


def test_plans_with_the_same_program_are_read_again() -> None:
    """Whoever replays it, and however its kernels are joined; other forms and random numbers are not."""
    ranking = choose_with(try_with(small_programs()), tries=4)
    (tried,) = (c for c in ranking.candidates if c.measured is not None and c.measured.programs)
    assert tried.plan.execution == "compiled+graph"
    assert tried.reading is not None
    assert tried.reading.text == LINE
    for candidate in ranking.candidates:
        is_same = (
            candidate.plan.execution in ("compiled", "compiled+graph")
            and candidate.plan.random == tried.plan.random
        )
        assert (candidate.reading is not None) == is_same, candidate.plan
    (called,) = of(
        ranking, execution="compiled", random="as-is", optimizer="as-is", kernels="default"
    )
    wanted = simulate(MACHINE, small_step(), called.plan, programs=small_programs())
    assert called.reading is not None
    assert called.reading.step_s == wanted.step_ns * 1e-9
    assert called.reading.assumed_s == called.timeline.step_ns * 1e-9
    # What the host issues is corrected by what else it issues; that took as long as predicted.
    assert called.corrected_s == pytest.approx(called.reading.step_s, rel=1e-6)
    (joined,) = of(ranking, execution="compiled+graph", random="as-is", kernels="combined")
    # A replayed step is corrected by the trial over what was read there.
    assert joined.corrected_s == pytest.approx(0.9 * joined.reading.step_s, rel=1e-6)


def test_the_notes_say_what_was_read_and_not_what_was_assumed() -> None:
    """Once, for the chosen plan; predictions before any trial stay what they were."""
    ranking = choose_with(try_with(small_programs(), factor=0.1), tries=4)
    best = ranking.best
    assert best.plan.execution == "compiled+graph"
    assert best.timeline.step_ns == simulate(MACHINE, small_step(), best.plan).step_ns
    assert sum(note == f"read: {LINE}" for note in ranking.notes) == 1
    assert not any(note.startswith("assumed: compiling makes") for note in ranking.notes)
    assert f"read: {LINE}" in best.timeline.notes


def test_programs_that_are_not_the_step_are_told() -> None:
    """And nothing is predicted from them."""
    part = (program("forward", loop(), inputs=[(5, 5)]),)
    ranking = choose_with(try_with(part), tries=4)
    assert all(c.reading is None for c in ranking.candidates)
    (note,) = (n for n in ranking.notes if n.startswith("the kernels of"))
    assert note == (
        "the kernels of 1 worker, compiled+graph stay as assumed: its programs take 0.0 % of the parameters, "
        "and the rest runs as it was written"
    )


def test_an_unreadable_program_is_told() -> None:
    """The note of the trial becomes one of the choice."""
    note = "what the compiler made could not be read from x.py (why): its kernels stay as assumed"
    trial = try_with(small_programs(), notes=(note, "something else"))

    def unread(plan: Plan) -> Timeline:
        return msgspec.structs.replace(trial(plan), programs=())

    ranking = choose_with(unread, tries=4)
    assert all(c.reading is None for c in ranking.candidates)
    assert note in ranking.notes
    assert "something else" not in ranking.notes


def test_a_ranking_keeps_what_was_read(tmp_path: Path) -> None:
    """Programs and readings survive the file; files without either still load."""
    ranking = choose_with(try_with(small_programs()), tries=4)
    path = ranking.save(tmp_path / "ranking.json")
    assert Ranking.load(path) == ranking
    content = json.loads(path.read_text())
    del content["sha256"]
    for candidate in content["value"]["candidates"]:
        del candidate["reading"]
        for timeline in filter(None, (candidate["timeline"], candidate["measured"])):
            del timeline["programs"]
    path.write_text(json.dumps(content))
    older = Ranking.load(path)
    assert all(c.reading is None for c in older.candidates)
    assert all(not c.measured.programs for c in older.candidates if c.measured is not None)


def test_a_prediction_without_a_reading_stays() -> None:
    """Nothing is replaced where nothing was read."""
    plan = Plan(execution="compiled")
    predicted = simulate(MACHINE, small_step(), plan)
    assert as_read(predicted, None) == predicted
    reading = CompilerReading(
        kernels=1, num_bytes=2, step_s=3.0, assumed_kernels=4, assumed_bytes=5, assumed_s=6.0
    )
    assert as_read(predicted, reading).notes[0] == (
        "read: the compiler made 1 kernels of its own that move 2 B, where 4 and 5 B were assumed: a step of "
        "3.00 s from what it made, 6.00 s as assumed"
    )


def test_a_packaged_step_is_the_same_program() -> None:
    """Reading the step as one program tells of the packaged one too, whose code is another language's."""
    whole = program("forward", *(k for p in small_programs() for k in p.calls))

    def trial(plan: Plan) -> Timeline:
        made = (whole,) if plan.execution == "step-graph" else ()
        predicted = simulate(MACHINE, small_step(), plan, details=False, programs=made)
        return msgspec.structs.replace(predicted, origin="measured", programs=made)

    ranking = choose(
        make_machine(),
        small_step("cpu"),
        world_size=1,
        fixed={"threads": 2, "memory_format": "as-is"},
        trial=trial,
        seconds=1e9,
    )
    readings = {c.plan.execution: c.reading for c in ranking.candidates}
    assert readings["step-graph"] is not None
    assert readings["packaged"] is not None
    assert readings["compiled"] is None
