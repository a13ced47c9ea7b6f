"""What the command line says while it chooses a plan, and what it learns from that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline import units
from ridgeline.cli.arguments import inputs
from ridgeline.cli.arguments.wishes import Wishes
from ridgeline.cli.training import decision as choosing
from ridgeline.cli.training import profiles
from ridgeline.cli.training.apart import PHASES
from ridgeline.cli.training.decision import Decision, decide, decide_in_group
from ridgeline.cli.training.worker import Job, TrialRequest
from ridgeline.codec import decode
from ridgeline.decision.heartbeat import EVERY_S, Heartbeat
from ridgeline.decision.memory import compile_times
from ridgeline.errors import MachineError
from ridgeline.execution import MODES
from ridgeline.machine import Machine
from ridgeline.machine.host_load import HostLoad
from ridgeline.plan import Execution, Plan
from ridgeline.planner import Ranking
from ridgeline.planner.labels import label
from ridgeline.simulator.compiler.compile_time import compile_seconds
from ridgeline.timeline import Timeline

STEP_NS = 40_000_000
COMPILED_S = 25.0
LONG = 10**9
"""Steps of a run in which compiling is cheap."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which knows that compiling the task took twice as long here as is assumed."""
    from ridgeline.probe.measure import known_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = known_machine().directory
    known = (compile_times.CompileTime(step="tiny", ratio=2.0),)
    compile_times.CompileTimes(known=known).save(directory / "compile-times.json")
    return directory


def learned(cache: Path) -> list[tuple[str, float]]:
    """What the cache knows of compiling: of which step, and what it took over what is assumed."""
    return [(entry.step, entry.ratio) for entry in compile_times.load(cache).known]


@pytest.fixture
def images_file(task_file: str) -> str:
    """The task, with images that are convolved."""
    path = Path(task_file)
    text = path.read_text()
    text = text.replace("torch.zeros(16, 8)", "torch.zeros(16, 3, 8, 8)")
    path.write_text(
        text.replace("nn.Linear(8, 32)", "nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 32)")
    )
    return task_file


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Takes what is tried; every step takes as long, and the compiler too."""
    tried: list[Plan] = []

    def run(target: str, request: bytes, **_: object) -> bytes:
        if target == PHASES:
            return b"{}"  # nothing to hold operators against
        plan = msgspec.json.decode(request, type=TrialRequest).plan
        tried.append(plan)
        return msgspec.json.encode(measured(plan))

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", run)
    return tried


def measured(plan: Plan) -> Timeline:
    counters = {} if plan.execution == "eager" else {"compile_s": COMPILED_S}
    return Timeline(
        origin="measured",
        title="tiny",
        workers=plan.workers,
        spans=(),
        steps_ns=(STEP_NS,) * 3,
        counters=counters,
    )


def chosen(task: str, said: list[str], steps: int = 100, **wishes: Any) -> Decision:
    job = Job(task=task)
    return decide(job.load(0), job, Wishes(**wishes), seed=0, steps=steps, say=said.append)


def test_trials_are_told_and_learned_from(
    task_file: str, machine_file: str, cache: Path, trials: list[Plan]
) -> None:
    """In the words of every choice, with the seconds that compiling takes here, which are learned."""
    said: list[str] = []
    decision = chosen(
        task_file, said, LONG, workers=1, threads=2, machine_file=Path(machine_file), tries=2
    )
    mode = trials[1].execution
    assert MODES[mode].is_compiled
    assumed_s = compile_seconds(decision.workload, mode)
    takes = units.seconds(2.0 * assumed_s)
    assert said == [
        "tracing a step of tiny for 1 worker",
        "trying 1 worker x 2 threads, eager",
        "  40.0 ms a step",
        f"trying 1 worker x 2 threads, {mode}, compiling it first for about {takes}",
        "  40.0 ms a step, after 25.0 s of preparing it",
    ]
    assert decision.ranking is not None
    predicted = {c.plan.execution: c.timeline.counters for c in decision.ranking.candidates}
    assert predicted[mode]["compile_s"] == pytest.approx(2.0 * assumed_s)
    assert learned(cache) == [("tiny", 2.0), ("tiny", pytest.approx(COMPILED_S / assumed_s))]


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_second_start_tries_what_the_first_one_chose(
    slower: float,
    task_file: str,
    machine_file: str,
    cache: Path,
    trials: list[Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else, unless it is not what it was; other wishes are another choice."""
    from ridgeline.probe import measure

    machine = Machine.load(machine_file)
    monkeypatch.setattr(measure, "known_machine", lambda: measure.Known(machine, cache))
    monkeypatch.setattr(profiles, "measured", lambda *_, **__: machine)
    wishes = {"workers": 1, "threads": 2, "tries": 2}
    first = chosen(task_file, [], LONG, **wishes)
    assert len(trials) == 2
    monkeypatch.setattr(f"{__name__}.STEP_NS", round(STEP_NS * slower))
    said: list[str] = []
    second = chosen(task_file, said, LONG, **wishes)
    name = label(first.plan)
    assert said[1] == f"trying {name}, which an earlier start chose for this step"
    assert second.plan.settings == first.plan.settings
    assert (second.workload, second.predicted.step_ns) == (first.workload, first.predicted.step_ns)
    if slower == 1.0:
        assert said[2:] == ["  40.0 ms a step, as remembered"]
        assert second.expected.step_ns == first.expected.step_ns
        assert second.ranking is not None
        assert second.ranking.notes[0].endswith(
            "and tried again; reasons name what was measured then"
        )
    else:
        assert said[2] == "it takes 80.0 ms now, where it took 40.0 ms: choosing again"
        assert len(trials) == 5
    for other in ({"tries": 1}, {"tries": 1, "allow": ("bf16",)}):
        del trials[:]
        chosen(task_file, [], LONG, **{**wishes, **other})
        assert len(trials) == 1

    def lost(*_: object, **__: object) -> Timeline:
        raise MachineError("no rates")

    del trials[:]
    monkeypatch.setattr(choosing, "simulate", lost)
    chosen(task_file, [], LONG, **wishes)
    assert len(trials) == 2


def test_training_may_change_the_maths_where_that_is_allowed(
    task_file: str, machine_file: str, cache: Path
) -> None:
    """Precisions are traced, exchanges and rhythms are compared: those that are named, and no others."""
    allowed = {
        "bf16": lambda plan: plan.precision == "bf16",
        "compression": lambda plan: plan.sync.compression != "none",
        "local-steps": lambda plan: plan.sync.every > 1,
    }
    for name in allowed:
        made = chosen(
            task_file, [], LONG, machine_file=Path(machine_file), workers=2, tries=0, allow=(name,)
        )
        assert made.ranking is not None
        plans = [candidate.plan for candidate in made.ranking.candidates]
        changed = {other for other, is_changed in allowed.items() if any(map(is_changed, plans))}
        assert changed == {name}


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_silence_while_compiling_is_announced(
    execution: Execution, task_file: str, machine_file: str, cache: Path
) -> None:
    """Before training with a given plan it is said that compiling comes first, and about how long here."""
    said: list[str] = []
    plan = Plan(threads=2, execution=execution)
    decision = chosen(task_file, said, plan=plan, machine_file=Path(machine_file))
    seconds = 2.0 * compile_seconds(decision.workload, execution)
    line = (
        f"compiled compiles before the first step: about {units.seconds(seconds)}, less where torch has it "
        "in its cache"
    )
    assert said == [
        "tracing a step of tiny for 1 worker",
        *([line] if execution == "compiled" else []),
    ]
    assert decision.predicted.counters.get("compile_s", 0.0) == pytest.approx(seconds)
    assert learned(cache) == [("tiny", 2.0)], "nothing was tried"


def test_a_given_profile_that_was_disturbed_is_doubted(
    task_file: str, machine_file: str, cache: Path, tmp_path: Path
) -> None:
    """Before anything is chosen by it: nothing measures it again."""
    load = HostLoad(others=0.5)
    machine = msgspec.structs.replace(Machine.load(machine_file), host_load=load)
    file = machine.save(tmp_path / "disturbed.json")
    said: list[str] = []
    chosen(task_file, said, workers=1, machine_file=file, tries=0)
    assert said[1] == (
        f"{file}: the profile was measured while {load}: what is predicted from it may be far off"
    )


def test_images_are_traced_in_channels_last_memory(
    images_file: str, machine_file: str, run: Callable[..., Any]
) -> None:
    """Wherever a plan may have them, so that none of its predictions is that of another layout."""
    formats = {"as-is": (), "channels_last": ("channels_last",)}
    for memory_format, traced in formats.items():
        plan = Plan(threads=2, memory_format=memory_format)
        found = chosen(images_file, [], plan=plan, machine_file=Path(machine_file))
        assert tuple(load.memory_format for load in found.workload.variants) == traced
    found = chosen(images_file, [], machine_file=Path(machine_file), tries=0)
    assert [load.memory_format for load in found.workload.variants] == ["channels_last"]
    printed = run("plan", images_file, "--machine", machine_file, "--json", "-q").out
    for ranking in (found.ranking, decode(Ranking, printed.encode(), where="stdout")):
        assert ranking is not None
        compared = [c for c in ranking.candidates if c.plan.memory_format == "channels_last"]
        assert {c.plan.workers for c in compared} == {1, 2}
        assert not any("was not traced" in note for note in ranking.notes)


def test_plan_weighs_what_compiling_takes_here(
    task_file: str,
    machine_file: str,
    cache: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by a profile that may be of another machine what is assumed."""
    monkeypatch.setattr("ridgeline.probe.measure.measure", lambda **_: Machine.load(machine_file))
    found = []
    for words in ((), ("--machine", machine_file)):
        printed = run("plan", task_file, "--devices", "1", "--json", "-q", *words).out
        ranking = decode(Ranking, printed.encode(), where="stdout")
        (compiled,) = (c for c in ranking.candidates if c.plan.execution == "compiled")
        found.append(compiled.compile_s)
    assert found[0] == pytest.approx(2.0 * found[1])


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has whatever is under way be told, as after ten seconds of silence, by a clock that stands still."""
    made: list[Heartbeat] = []

    class Watched(Heartbeat):
        def __init__(self, say: Any) -> None:
            super().__init__(say, clock=lambda: 0.0)
            made.append(self)

    def beat() -> None:
        made[-1]._spoken_s = -EVERY_S
        made[-1].beat()

    monkeypatch.setattr(choosing, "Heartbeat", Watched)
    monkeypatch.setattr(inputs, "Heartbeat", Watched)
    return beat


@pytest.fixture
def watched(beat: Callable[[], None], machine_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and measurements during which that happens."""
    from ridgeline.tasks import step

    right = step.trace

    def traced(*arguments: Any, **more: Any) -> Any:
        beat()
        return right(*arguments, **more)

    def profiled(*, workload: object = None, **_: object) -> Machine:
        if workload is not None:
            beat()
        return Machine.load(machine_file)

    monkeypatch.setattr(step, "trace", traced)
    monkeypatch.setattr("ridgeline.probe.measure.measure", profiled)
    monkeypatch.setattr("ridgeline.probe.measure.missing_seconds", lambda *_, **__: 6.0)


SIGNS = [
    "  still tracing the step (0 s so far)",
    "  still measuring (0 s so far, about 6.00 s expected)",
]


def test_a_choice_gives_signs_of_life(
    task_file: str,
    cache: Path,
    watched: None,
    beat: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the step is traced, the machine measured, a step timed, and a plan tried."""
    said: list[str] = []

    def run(target: str, request: bytes, **_: object) -> bytes:
        beat()
        if target == PHASES:
            return b"{}"
        return msgspec.json.encode(measured(msgspec.json.decode(request, type=TrialRequest).plan))

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", run)
    chosen(task_file, said, LONG, workers=1, threads=2, tries=2)
    still = {line for line in said if line.startswith("  still")}
    assert still >= {*SIGNS, "  still timing a step (0 s so far)", "  still trying it (0 s so far)"}
    assert any("  still compiling and trying it (0 s so far, about " in line for line in still)


def test_plan_gives_signs_of_life(task_file: str, watched: None, run: Callable[..., Any]) -> None:
    """While the step is traced and the machine measured."""
    said = run("plan", task_file, "--devices", "1").err.splitlines()
    assert said == ["tracing a step of tiny for 1 worker", *SIGNS, "comparing plans"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_tells_the_same_on_rank_0(
    rank: int, task_file: str, machine_file: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what compiles is tried by a worker alone, it is stopped in whatever it does."""
    import torch

    from ridgeline.workers.world import World

    tried: list[Plan] = []

    def try_plan(task: object, plan: Plan, *_: object, **more: object) -> Timeline:
        tried.append(plan)
        assert more == {"seed": 0, "compile_limit_s": 0.5}
        while plan.execution != "eager":
            pass
        return measured(plan)

    monkeypatch.setattr("ridgeline.runtime.training.plan_trial.try_plan", try_plan)
    monkeypatch.setattr("ridgeline.decision.trial.LONGEST_S", 0.5)
    monkeypatch.setattr("ridgeline.capture.deadline.LATE_S", float("inf"))  # a host may be busy
    world = World(rank, 1, 0, torch.device("cpu"))
    said: list[str] = []
    decision = decide_in_group(
        Job(task=task_file).load(0),
        world,
        Wishes(machine_file=Path(machine_file), tries=2),
        seed=0,
        steps=LONG,
        say=said.append,
    )
    assert decision.plan.execution == "eager"
    compiled = tried[1]
    seconds = 2.0 * compile_seconds(decision.workload, compiled.execution)
    failed = (
        f"wanted a trial of {label(compiled)} within 500 ms, got no result: it was stopped; allow more "
        "seconds, or use execution='eager'"
    )
    expected = [
        "tracing a step of tiny for 1 worker",
        f"trying {label(tried[0])}",
        "  40.0 ms a step",
        f"trying {label(compiled)}, compiling it first for about {units.seconds(seconds)}",
        f"  failed: {failed}",
    ]
    assert said == (expected if rank == 0 else [])
    assert learned(cache) == [("tiny", 2.0)]
