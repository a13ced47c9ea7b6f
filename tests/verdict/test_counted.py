"""What a run counted besides its steps is told in plain words; compiled steps match their prediction."""

import msgspec
import pytest

from chained_workloads import make_chain
from ridgeline.plan import Execution, Plan
from ridgeline.simulator.step import simulate
from ridgeline.verdict import verify
from ridgeline.verdict.words import counted_words
from strategies import make_machine, make_timeline


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({}, ()),
        ({"overhead_ns": 5.0, "hidden_overhead": 1.0, "shapes": 1.0, "compile_s": 0.0}, ()),
        (
            {"eager_steps": 1.0},
            (
                (
                    "1 batch of other shapes ran operator by operator; their time is among the measured "
                    "steps"
                ),
            ),
        ),
        (
            {"eager_steps": 3.0, "recaptures": 1.0, "shapes": 2.0, "compile_s": 50.7},
            (
                (
                    "3 batches of other shapes ran operator by operator; their time is among the measured "
                    "steps"
                ),
                "the step was captured again 1 time",
                "2 batch shapes were captured, each a program of its own",
                (
                    "preparing the step (compiling, capturing, checking) took 50.7 s once, which is in no "
                    "measured step"
                ),
            ),
        ),
        ({"recaptures": 2.0}, ("the step was captured again 2 times",)),
        ({"preempted_per_s": 100.0}, ()),
        (
            {"preempted_per_s": 256.4},
            (
                (
                    "the process lost a core 256 times for each second that it computed, to other programs or "
                    "to threads of its own"
                ),
            ),
        ),
    ],
)
def test_counted(counters: dict, words: tuple) -> None:
    """Each counter that says something is one sentence; the usual ones say nothing."""
    assert counted_words(counters) == words


def test_lost_cores_are_named_where_time_is_unexplained() -> None:
    """To look at the timeline would show frames that all take longer."""
    spans = [("forward", "compute", 0, 100)]
    alone, beside = (
        verify(make_timeline(spans), make_timeline(spans, counters={"preempted_per_s": times}))
        for times in (3.0, 256.0)
    )
    assert alone.next.startswith("look at the timeline for what runs between the frames")
    assert beside.next == (
        "end the other programs on this host, or give the step fewer threads, which wait for each other "
        "(torch.set_num_threads(1)); no gain is claimed for unexplained time"
    )


def test_counted_comes_after_the_notes_of_the_run() -> None:
    """First what the run could not do, then what it counted, then what was assumed."""
    spans = [("step", "compute", 0, 5)]
    measured = make_timeline(spans, notes=("ran",), counters={"recaptures": 1.0})
    predicted = make_timeline(spans, origin="predicted", notes=("assumed",))
    verdict = verify(predicted, measured)
    assert verdict.notes[:3] == ("ran", "the step was captured again 1 time", "assumed")
    assert "note  the step was captured again 1 time" in verdict.text.splitlines()


@pytest.mark.parametrize("execution", ["step-graph", "packaged"])
def test_one_program_matches_span_by_span(execution: Execution) -> None:
    """A measured step of one program has the frames of its prediction, and its parts add up."""
    machine, workload = make_machine(dispatch_s=1e-5), make_chain((2, 2))
    predicted = simulate(machine, workload, Plan(execution=execution))
    measured = make_timeline(
        [("input", "host", 0, 1000), ("step", "compute", 1000, 2 * predicted.step_ns)]
    )
    verdict = verify(predicted, measured)
    assert verdict.missing == verdict.extra == ()
    assert sum(part.ns for part in verdict.waterfall) == measured.step_ns
    assert verdict.share_of_ceiling is not None
    assert {f.name for f in verdict.frames if f.error is not None} == {"input", "step"}


def test_calls_of_compiled_programs_are_launch_gaps() -> None:
    """What calling a program costs on a CPU is no inefficiency of its kernels."""
    machine, workload = make_machine(dispatch_s=1e-3, rate=1e15), make_chain((2,))
    predicted = simulate(machine, workload, Plan(execution="compiled"))
    parts = {part.name: part.ns for part in verify(predicted, predicted).waterfall}
    assert parts["launch gaps"] == pytest.approx(predicted.step_ns, rel=1e-4)


def test_fusing_is_not_advised_twice() -> None:
    """A memory-bound step is told to fuse its operators unless it is compiled already."""
    machine, workload = make_machine(), make_chain((4, 4), flops=1)
    plain = simulate(machine, workload, Plan())
    assert verify(plain, plain).next.startswith(
        "move fewer bytes: fuse elementwise operators (execution='compiled', with '+graph' on a GPU) or "
        "allow a lower precision; "
    )
    compiled = simulate(machine, workload, Plan(execution="compiled"))
    assert verify(compiled, compiled).next.startswith("move fewer bytes: allow a lower precision; ")
    assert verify(compiled, msgspec.structs.replace(compiled, notes=())).passed
