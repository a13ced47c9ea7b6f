"""Which plan is tried next: what compiles nothing first, and nothing that cannot win or cannot end in time."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planned_candidates import S, make_candidate
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.planner import Candidate
from ridgeline.planner.trials.relatives import corrected
from ridgeline.planner.trials.trial_loop import Allowance
from ridgeline.planner.trials.trial_steps import least_steps
from ridgeline.planner.trials.trials import Room, could_win, left_untried, next_trial
from strategies import make_timeline


def _trials(candidates: list[Candidate], device: str = "cpu", tries: int = 9) -> list[str]:
    """The executions that are tried, in order, where each takes what was predicted."""
    found = []
    for num_tried in range(99):
        index = next_trial(candidates, Room(tries=tries - num_tried), device=device)
        if index is None:
            break
        found.append(candidates[index].plan.execution)
        measured = msgspec.structs.replace(candidates[index].timeline, origin="measured")
        candidates[index] = msgspec.structs.replace(candidates[index], measured=measured)
        candidates = corrected(candidates)
    return found


def test_the_plain_plan_is_always_tried() -> None:
    """And first: modes that compile never crowd out the best one that does not."""
    candidates = [
        make_candidate("compiled+graph", 1.0, 1.0),
        make_candidate("regional+graph", 0.9, 1.0),
        make_candidate("graph", 2.0),
    ]
    assert _trials(list(candidates), tries=1) == ["graph"]
    assert _trials(list(candidates)) == ["graph", "compiled+graph", "regional+graph"]


@pytest.mark.parametrize(
    ("device", "step_s", "tried"),
    [("cpu", 1.2, True), ("cpu", 1.4, False), ("cuda", 1.4, True), ("cuda", 2.1, False)],
)
def test_what_cannot_win_is_not_tried(device: str, step_s: float, tried: bool) -> None:
    """A mode that compiles is tried while it may win by as much as is in doubt, on a GPU by half."""
    candidates = [make_candidate("compiled", step_s, 10.0), make_candidate("eager", 1.0)]
    assert _trials(candidates, device) == ["eager", *(["compiled"] if tried else [])]


@pytest.mark.parametrize(("failure", "wanted"), [("an obstacle", "eager"), ("", "graph")])
def test_after_a_failure_the_step_as_written_comes_first(failure: str, wanted: str) -> None:
    """It takes a second where what replays the model may take ten, and others are expected by it."""
    times: dict[Execution, float] = {
        "graph": 0.2,
        "model-graph": 0.5,
        "eager": 1.0,
        "compiled": 0.3,
    }
    candidates = [make_candidate(*each) for each in times.items()]
    candidates[0] = msgspec.structs.replace(candidates[0], failure=failure)
    index = next_trial(candidates, Room(tries=9, seconds=30.0), device="cuda")
    assert index is not None
    assert candidates[index].plan.execution == wanted


@pytest.mark.parametrize(("execution", "tried"), [("eager", True), ("graph", False)])
def test_the_host_may_be_the_limit_in_one_precision_only(execution: str, tried: bool) -> None:
    """What it takes to issue a step drifts, so that another precision is tried though expected 40 % slower."""
    candidates = [make_candidate(execution, 1.0), make_candidate(execution, 1.4)]
    narrow = msgspec.structs.replace(candidates[1].plan, precision="bf16")
    candidates[1] = msgspec.structs.replace(candidates[1], plan=narrow)
    assert _trials(candidates, "cuda") == [execution] * (1 + tried)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("execution", "step_s", "tried"),
    [
        ("regional+graph", 0.9, True),
        ("regional+graph", 1.05, False),
        ("step-graph", 1.1, True),
        ("step-graph", 1.25, False),
    ],
)
def test_programs_of_one_compiler_tell_much_of_each_other(
    device: str, execution: Execution, step_s: float, tried: bool
) -> None:
    """A step is compiled whole first, and otherwise only where that is expected to take little more."""
    candidates = [make_candidate(execution, step_s, 1.0)]
    candidates.append(make_candidate("compiled+graph", 1.0, 1.0))
    also = [execution] if tried else []
    assert _trials(candidates, device) == ["compiled+graph", *also]


@pytest.mark.parametrize(("device", "tried"), [("cpu", True), ("cuda", False)])
def test_the_host_adds_nothing_to_a_replay(device: str, tried: bool) -> None:
    """What a GPU replays is not issued by its host as well."""
    candidates = [make_candidate("compiled+graph", 1.0, 1.0), make_candidate("compiled", 0.99, 1.0)]
    found = _trials(candidates, device)
    assert sorted(found) == (["compiled", "compiled+graph"] if tried else ["compiled+graph"])


@pytest.mark.parametrize("threads", [0, 4])
def test_what_a_gpu_replays_comes_before_what_its_host_calls(threads: int) -> None:
    """Also where the user has said with how many threads that host computes."""
    called, replayed = (
        make_candidate("compiled", 0.99, 1.0),
        make_candidate("compiled+graph", 1.0, 1.0),
    )
    candidates = [
        msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, threads=threads))
        for c in (called, replayed)
    ]
    assert _trials(candidates, "cuda") == ["compiled+graph"]


def test_one_program_is_tried_once() -> None:
    """A package is the step graph called more cheaply: it is tried too only where that matters."""
    alike = [make_candidate("packaged", 1.0, 1.0), make_candidate("step-graph", 1.01, 1.0)]
    plain = [make_candidate("eager", 2.0)]
    assert _trials([*alike, *plain]) == ["eager", "step-graph"]
    unlike = [alike[0], make_candidate("step-graph", 1.1, 1.0)]
    assert _trials([*unlike, *plain]) == ["eager", "packaged", "step-graph"]


@pytest.mark.parametrize(("steps", "is_told"), [(None, True), (100_000, True), (1000, False)])
def test_only_what_could_win_the_run_is_said_to_be_untried(
    steps: int | None, is_told: bool
) -> None:
    """Compiling that a run of known length cannot earn back is no loss to it."""
    eager = make_candidate("eager", 1.0, is_measured=True)
    compiled = make_candidate("compiled", 0.9, 5000.0)
    told = left_untried(
        [compiled, eager], Room(tries=9, compile_s=100.0), device="cpu", steps=steps
    )
    assert bool(told) == is_told


def test_combined_kernels_are_for_small_steps() -> None:
    """They are tried after the compiler's own, where those take little time on a GPU."""
    for step_s, tried in ((1e-3, 2), (1e-1, 1)):
        plain = make_candidate("compiled+graph", step_s, 1.0)
        plan = Plan(execution="compiled+graph", kernels="combined")
        combined = msgspec.structs.replace(plain, plan=plan)
        assert len(_trials([combined, plain], "cuda")) == tried


@given(st.floats(0.0, 200.0), st.floats(1e-3, 2.0), st.floats(1.0, 100.0))
def test_given_seconds_are_kept(seconds: float, step_s: float, compile_s: float) -> None:
    """No trial is begun that is not expected to end within the seconds that are left."""
    candidates = [
        make_candidate("compiled", step_s, compile_s),
        make_candidate("eager", 2.0 * step_s),
    ]
    room = Room(tries=9, seconds=seconds)
    picked = next_trial(candidates, room, device="cpu")
    if picked is None:
        assert seconds < least_steps(candidates[1].plan) * 2.0 * step_s * (1 + 1e-9)
    else:
        mine = candidates[picked]
        assert mine.compile_s + least_steps(mine.plan) * mine.step_s <= seconds


@pytest.mark.parametrize(
    ("device", "has_compiled", "picked"),
    [("cuda", False, "compiled+graph"), ("cuda", True, None), ("cpu", False, None)],
)
def test_the_first_program_is_begun_though_time_may_run_out(
    device: str, has_compiled: bool, picked: str | None
) -> None:
    """On a GPU what compiling takes is guessed: half of it may do, unless this choice knows better."""
    candidates = [
        make_candidate("graph", 1.0, is_measured=True),
        make_candidate("compiled+graph", 0.6, 60.0),
    ]
    if has_compiled:
        candidates.append(make_candidate("regional+graph", 0.9, 20.0, is_measured=True))
    allowance = Allowance(9, math.inf, 40.0, None, device, clock=lambda: 0.0)
    room = allowance.room(candidates, 1, 0.0)
    index = next_trial(candidates, room, device=device)
    assert (None if index is None else candidates[index].plan.execution) == picked


@pytest.mark.parametrize(
    ("computing_s", "exchange", "tried"),
    [(0.1, "all_reduce", False), (2.0, "all_reduce", True), (0.1, "ring", True)],
)
def test_what_a_link_rules_out_is_not_tried(computing_s: float, exchange: str, tried: bool) -> None:
    """What computes otherwise is as slow where the step is its exchange; another exchange may be faster."""

    def made(memory_format: str, algorithm: str) -> Candidate:
        begin, end = round(computing_s * S), round((computing_s + 4.0) * S)
        spans = [("forward", "compute", 0, begin), ("all_reduce/0", "communication", begin, end)]
        sync = Sync(algorithm=algorithm)
        plan = Plan(workers=2, memory_format=memory_format, sync=sync)
        timeline = make_timeline(spans, origin="predicted", workers=2)
        return Candidate(plan=plan, timeline=timeline, samples=1, why="")

    plain = made("as-is", "all_reduce")
    measured = msgspec.structs.replace(plain.timeline, origin="measured")
    done = msgspec.structs.replace(plain, measured=measured)
    other = made("channels_last", exchange)
    assert could_win(other, [done, other], device="cpu") == tried


def test_what_cannot_be_captured_is_not_tried_again() -> None:
    """A mode that failed is not tried in another memory format, and after two precisions not at all."""
    plain = make_candidate("graph", 1.0)
    last = msgspec.structs.replace(
        plain, plan=Plan(execution="graph", memory_format="channels_last")
    )
    narrow = msgspec.structs.replace(plain, plan=Plan(execution="graph", precision="bf16"))
    failed = msgspec.structs.replace(plain, failure="no")
    room = Room(tries=9)
    assert next_trial([failed, last], room, device="cuda") is None
    assert next_trial([failed, last, narrow], room, device="cuda") == 2
    both = [failed, msgspec.structs.replace(narrow, failure="no"), last]
    assert next_trial(both, room, device="cuda") is None


def test_a_precision_that_fails_operator_by_operator_is_not_compiled() -> None:
    """An operator that has no bf16 has none in programs and graphs either; other precisions are tried."""
    narrow = [make_candidate(mode, 1.0) for mode in ("eager", "compiled", "graph")]
    narrow = [
        msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, precision="bf16"))
        for c in narrow
    ]
    narrow[0] = msgspec.structs.replace(narrow[0], failure="not implemented for 'BFloat16'")
    candidates = [*narrow, make_candidate("eager", 2.0), make_candidate("compiled", 1.5, 1.0)]
    assert _trials(candidates, "cuda") == ["eager", "compiled"]


def test_the_first_compiled_plan_is_the_one_that_is_replayed() -> None:
    """It has the kernels of the other, whose step may hide behind a slow host and tell nothing of it."""
    candidates = [
        make_candidate("compiled", 1.0, 5.0),
        make_candidate("compiled+graph", 1.0, 5.0),
        make_candidate("graph", 1.5, is_measured=True),
    ]
    assert next_trial(candidates, Room(tries=9), device="cuda") == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_the_compilers_defaults_come_before_one_program(threads: int) -> None:
    """On a CPU too: of Swin-T one program took all the time, and what a script would do was never tried."""
    made = [
        make_candidate("eager", 1.0, is_measured=True),
        make_candidate("step-graph", 0.8, 30.0),
        make_candidate("compiled", 0.9, 20.0),
    ]
    candidates = [
        msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, threads=threads))
        for c in made
    ]
    first = next_trial(candidates, Room(tries=9), device="cpu")
    assert first is not None
    assert candidates[first].plan.execution == "compiled"


def test_a_program_that_is_expected_to_win_comes_before_one_that_is_not() -> None:
    """Where the replayed form failed in 16 bits, the host calls that program before one in 32 is compiled."""
    narrow = make_candidate("compiled+graph", 1.0, 5.0)
    called = make_candidate("compiled", 1.2, 5.0)
    narrow, called = (
        msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, precision="bf16"))
        for c in (narrow, called)
    )
    candidates = [
        msgspec.structs.replace(narrow, failure="no"),
        make_candidate("compiled+graph", 2.0, 5.0),
        called,
        make_candidate("eager", 1.5, is_measured=True),
    ]
    assert next_trial(candidates, Room(tries=9), device="cuda") == 2
    assert next_trial(candidates[:2] + candidates[3:], Room(tries=9), device="cuda") == 1


@pytest.mark.parametrize("execution", ["compiled", "regional", "step-graph"])
@pytest.mark.parametrize("seconds", [None, 20.0])
def test_what_a_user_would_write_is_tried_though_a_program_took_all_the_time(
    execution: str, seconds: float | None
) -> None:
    """Unless the user gave the seconds: a refused program leaves eager, and `torch.compile` may beat it."""
    refused, open_ = (
        msgspec.structs.replace(c, plan=msgspec.structs.replace(c.plan, precision="bf16"))
        for c in (make_candidate("compiled+graph", 0.9, 5.0), make_candidate(execution, 1.0, 5.0))
    )
    candidates = [
        make_candidate("eager", 1.5, is_measured=True),
        make_candidate("compiled+graph", 2.0, 5.0, is_measured=True),
        msgspec.structs.replace(refused, failure="refused"),
        open_,
    ]
    allowance = Allowance(9, math.inf, seconds, None, "cuda", lambda: 60.0, first_compile_s=5.0)
    room = allowance.room(candidates, 3, 0.0)
    is_tried = execution == "compiled" and seconds is None
    assert next_trial(candidates, room, device="cuda") == (3 if is_tried else None)


def test_what_was_compiled_and_won_leaves_no_time_for_other_programs() -> None:
    """`torch.compile` in another layout, say, which is expected to be slower."""
    candidates = [
        make_candidate("eager", 1.5, is_measured=True),
        make_candidate("compiled+graph", 1.0, 5.0, is_measured=True),
        make_candidate("compiled", 1.0, 5.0),
    ]
    other = msgspec.structs.replace(candidates[2].plan, memory_format="channels_last")
    candidates[2] = msgspec.structs.replace(candidates[2], plan=other)
    allowance = Allowance(9, math.inf, None, None, "cuda", lambda: 60.0, first_compile_s=5.0)
    room = allowance.room(candidates, 2, 0.0)
    assert next_trial(candidates, room, device="cuda") is None
    assert next_trial(candidates, Room(tries=9), device="cuda") == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_host_is_not_tried_with_kernels_that_were_replayed(device: str) -> None:
    """However fast the host was found to be: what it issues is what the replay holds."""
    eager = make_candidate("eager", 4.0, is_measured=True)
    measured = msgspec.structs.replace(eager.timeline, steps_ns=(round(0.5 * S),))
    candidates = [
        msgspec.structs.replace(eager, measured=measured),
        make_candidate("compiled+graph", 1.0, 5.0, is_measured=True),
        make_candidate("compiled", 1.5, 5.0),
    ]
    assert could_win(corrected(candidates)[2], candidates, device=device) is (device == "cpu")


@pytest.mark.parametrize(("own_s", "first"), [(0.9, 1), (1.0, 0)])
def test_the_faster_way_to_draw_comes_first(own_s: float, first: int) -> None:
    """A second program may find no time any more; at equal times the one that draws eager's is tried."""
    same = make_candidate("compiled+graph", 1.0, 5.0)
    own = make_candidate("compiled+graph", own_s, 5.0)
    own = msgspec.structs.replace(own, plan=msgspec.structs.replace(own.plan, random="compiled"))
    candidates = [same, own, make_candidate("graph", 1.5, is_measured=True)]
    assert next_trial(candidates, Room(tries=9), device="cuda") == first


@pytest.mark.parametrize(
    ("knob", "tried"), [({"random": "compiled"}, True), ({"threads": 2}, False)]
)
def test_what_failed_by_its_random_numbers_may_draw_its_own(
    knob: dict[str, object], tried: bool
) -> None:
    """Another plan of a mode that failed is not tried, unless it draws otherwise."""
    failed = make_candidate("compiled", 1.0, 1.0)
    other = msgspec.structs.replace(failed, plan=msgspec.structs.replace(failed.plan, **knob))
    failed = msgspec.structs.replace(failed, failure="got a difference of 0.144")
    candidates = [failed, other, make_candidate("eager", 2.0)]
    assert _trials(candidates, "cuda") == ["eager", *(["compiled"] if tried else [])]


@pytest.mark.parametrize(
    ("compiled_s", "seconds", "picked"),
    [(0.7, math.inf, 1), (0.7, 40.0, 2), (0.9, math.inf, 2)],
    ids=["expected to rule it out", "no time for it", "expected to be close"],
)
def test_what_a_program_will_likely_rule_out_waits_for_it(
    compiled_s: float, seconds: float, picked: int
) -> None:
    """A plain plan that cannot beat what compiles is tried after it, unless compiling may not end in time."""
    last = make_candidate("graph", 1.0)
    last = msgspec.structs.replace(
        last, plan=msgspec.structs.replace(last.plan, memory_format="channels_last")
    )
    candidates = [
        make_candidate("graph", 1.0, is_measured=True),
        make_candidate("compiled+graph", compiled_s, 60.0),
        last,
    ]
    room = Room(tries=9, seconds=seconds, compile_share=0.4)
    assert next_trial(candidates, room, device="cuda") == picked
    failed = [*candidates]
    failed[1] = msgspec.structs.replace(failed[1], failure="no")
    assert next_trial(failed, room, device="cuda") == 2


@pytest.mark.parametrize(
    ("compiled_s", "seconds", "picked"),
    [(0.7, math.inf, 2), (0.7, 90.0, 0), (1.1, math.inf, 0)],
    ids=["expected to be the fastest", "seconds are limited", "expected to be slower"],
)
def test_a_step_as_written_is_first_where_a_program_is_expected_to_be_the_fastest(
    compiled_s: float, seconds: float, picked: int
) -> None:
    """A capture takes seconds, and is not needed once the program was measured."""
    candidates = [
        make_candidate("graph", 1.0),
        make_candidate("compiled+graph", compiled_s, 60.0),
        make_candidate("eager", 1.4),
    ]
    assert next_trial(candidates, Room(tries=9, seconds=seconds), device="cuda") == picked
    if math.isinf(seconds) and picked:
        assert _trials(candidates, "cuda") == ["eager", "compiled+graph"]
        without = [candidates[0], candidates[2]]
        assert _trials(without, "cuda") == ["graph"]
