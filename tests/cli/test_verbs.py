"""The verbs: what they write, what they print, as text and as JSON."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ridgeline.codec import decode
from ridgeline.machine import Machine
from ridgeline.machine.microarchitecture import Microarchitecture, Nodes
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.planner.trials.expectation import expected
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict
from ridgeline.workload import Workload


def test_what_a_task_prints_is_no_part_of_the_json(run, machine_file, task_file) -> None:
    """Neither while its file is loaded nor while its step is traced; it goes to stderr."""
    path = Path(task_file)
    text = path.read_text().replace(
        "    return nn.functional", "    print('step')\n    return nn.functional"
    )
    path.write_text(f"print('loading')\n{text}")
    ran = run("trace", task_file, "--machine", machine_file, "--json")
    assert ran.status == 0
    assert decode(Workload, ran.out.encode(), where="stdout").samples == 8
    assert {"loading", "step"} <= set(ran.err.splitlines())


def test_measure_passes_its_flags_on(run, monkeypatch, machine_file, tmp_path) -> None:
    """`--full`, `--quick` and `--refresh` reach the probe; the profile is written and printed."""
    machine = Machine.load(machine_file)
    asked = []

    def measure(**given: object) -> Machine:
        given.pop("progress")("probing")
        asked.append(given)
        return machine

    monkeypatch.setattr("ridgeline.probe.measure.measure", measure)
    ran = run("measure", "--full", "--refresh", "-o", tmp_path / "out.json")
    assert asked == [{"quick": False, "refresh": True}]
    assert ran.status == 0
    assert "matmul float32" in ran.out
    assert ran.err == f"probing\nwrote {tmp_path / 'out.json'}\n"
    assert Machine.load(tmp_path / "out.json") == machine
    ran = run("measure", "-q", "--json")
    assert run("measure", "--quick", "-q", "--json").out
    assert asked[1] == asked[2] == {"quick": True, "refresh": False}
    assert ran.err == ""
    assert decode(Machine, ran.out.encode(), where="stdout") == machine


def test_measure_shows_what_a_full_measurement_found(run, monkeypatch, machine_file) -> None:
    """Also when a later one, that is not full, takes it from the cache."""
    known = Microarchitecture(nodes=Nodes(nodes=(), reason="the system describes no nodes"))
    machine = msgspec.structs.replace(Machine.load(machine_file), microarchitecture=known)
    monkeypatch.setattr("ridgeline.probe.measure.measure", lambda **_: machine)
    ran = run("measure", "-q")
    assert "Nodes of memory (NUMA)" in ran.out
    assert "The system describes no nodes." in ran.out


def test_trace_shows_and_writes_the_workload(run, task_file, tmp_path) -> None:
    """The operator table of one worker's share of the batch; JSON is the file's content."""
    ran = run("trace", task_file, "--workers", "2", "-o", tmp_path / "w.json")
    assert ran.status == 0
    assert "Workload tiny  4 samples" in ran.out
    assert "Bound by" not in ran.out
    workload = Workload.load(tmp_path / "w.json")
    assert workload.samples == 4
    again = run("trace", task_file, "--batch-size", "12", "--json", "-q")
    assert decode(Workload, again.out.encode(), where="stdout").samples == 12
    assert again.err == ""


def test_trace_tells_bounds_on_a_machine(run, task_file, machine_file) -> None:
    """With a profile every operator has a time there and what bounds it."""
    ran = run("trace", task_file, "--machine", machine_file)
    assert "Bound by" in ran.out
    assert "Operator time" in ran.out


def test_trace_of_too_small_a_batch(run, task_file) -> None:
    """A batch that cannot be shared is the user's to mend."""
    ran = run("trace", task_file, "--workers", "9", "-q")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("ridgeline: wanted at least one sample per worker, got batch_size=8")


def test_plan_ranks_without_measuring(run, task_file, machine_file, tmp_path) -> None:
    """On a given profile plans are ranked with reasons; the best one is written."""
    path = tmp_path / "plan.json"
    ran = run("plan", task_file, "--machine", machine_file, "-o", path, "-q")
    assert (ran.status, ran.err) == (0, "")
    assert "Chosen" in ran.out
    best = Plan.load(path)
    printed = run("plan", task_file, "--machine", machine_file, "--json", "-q").out
    ranking = decode(Ranking, printed.encode(), where="stdout")
    assert ranking.best.plan == best
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1, 2}


def test_plan_keeps_to_the_devices(run, task_file, machine_file) -> None:
    """`--devices 1` compares only plans of one worker."""
    words = ("plan", task_file, "--machine", machine_file, "--devices", "1", "--json", "-q")
    ranking = decode(Ranking, run(*words).out.encode(), where="stdout")
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1}


@pytest.mark.parametrize(
    ("name", "is_changed"),
    [
        ("bf16", lambda plan: plan.precision == "bf16"),
        ("compression", lambda plan: plan.sync.compression != "none"),
        ("local-steps", lambda plan: plan.sync.every > 1),
    ],
)
def test_plan_compares_what_is_allowed(
    run, task_file, machine_file, name: str, is_changed: Callable[[Plan], bool]
) -> None:
    """Plans that change the maths are ranked where `--allow` names the change, and nowhere else."""
    words = ("plan", task_file, "--machine", machine_file, "--json", "-q")

    def compared(*more: str) -> bool:
        ranking = decode(Ranking, run(*words, *more).out.encode(), where="stdout")
        return any(is_changed(candidate.plan) for candidate in ranking.candidates)

    others = {"bf16", "random", "compression", "local-steps"} - {name}
    assert not compared(*(word for other in sorted(others) for word in ("--allow", other)))
    assert compared("--allow", name)


def test_plan_explains_exchanges_by_what_is_allowed(run, task_file, machine_file) -> None:
    """The table of exchanges asks for a permission only where it was not given."""
    words = ("plan", task_file, "--machine", machine_file, "--explain", "sync", "-q")
    wanted = "needs allow='local-steps'"
    assert wanted in " ".join(run(*words).out.split())
    allowed = run(*words, "--allow", "local-steps")
    assert allowed.status == 0
    assert wanted not in " ".join(allowed.out.split())


def test_most_devices_need_not_share_the_batch(run, task_file, machine_file) -> None:
    """`plan --devices 3` is a limit: what shares the batch of 8 below it is compared."""
    words = ("plan", task_file, "--machine", machine_file, "--devices", "3", "--json", "-q")
    ranking = decode(Ranking, run(*words).out.encode(), where="stdout")
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1, 2}


def test_plan_explains_a_knob(run, task_file, machine_file) -> None:
    """`--explain` prints one knob with its reason; an unknown knob is named with the known ones."""
    ran = run("plan", task_file, "--machine", machine_file, "--explain", "workers", "-q")
    assert ran.status == 0
    assert ran.out.splitlines()[1].startswith("workers = ")
    words = ("plan", task_file, "--machine", machine_file, "--explain", "workers", "--json", "-q")
    assert json.loads(run(*words).out)["choice"]["knob"] == "workers"
    wrong = run("plan", task_file, "--machine", machine_file, "--explain", "colour", "-q")
    assert wrong.status == 1
    assert "got 'colour'; name one of them" in wrong.err


@pytest.mark.parametrize(("tolerance", "status"), [("0.15", 0), ("0.05", 3)])
def test_verify_exits_with_3_when_off(run, run_dir: Path, tolerance: str, status: int) -> None:
    """The status says whether prediction and measurement agree; the verdict is printed either way."""
    words = (
        "verify",
        run_dir / "predicted.json",
        run_dir / "measured.json",
        "--tolerance",
        tolerance,
    )
    ran = run(*words)
    assert ran.status == status
    assert "(-9.1 %)" in " ".join(ran.out.replace("│", "").split())
    assert ran.err == ""
    printed = run(*words, "--json")
    assert printed.status == status
    assert decode(Verdict, printed.out.encode(), where="stdout").passed is (status == 0)


def test_verify_says_that_steps_differ(run, run_dir: Path, tmp_path: Path) -> None:
    """Another task or number of workers can be compared, but not without a word."""
    measured = Timeline.load(run_dir / "measured.json")
    other = tmp_path / "other.json"
    msgspec.structs.replace(measured, workers=measured.workers + 1).save(other)
    ran = run("verify", run_dir / "predicted.json", other)
    title = measured.title
    assert ran.err == (
        f"! two different steps are compared: {title} with 1 worker, and {title} with 2 workers\n"
    )


def test_verify_says_what_the_causes_lack(run, run_dir: Path, machine_file: str) -> None:
    """A profile alone, or a workload alone, tells no causes."""
    files = [run_dir / "predicted.json", run_dir / "measured.json"]
    assert run("verify", *files, "--machine", machine_file).err == (
        "! --machine shows no causes without --workload: only the steps are compared\n"
    )


def test_verify_says_what_a_run_lacks(run, run_dir: Path, machine_file: str) -> None:
    """Nobody gave an option there: the file that is missing is named."""
    shutil.copy(machine_file, run_dir / "machine.json")
    assert run("verify", run_dir).err == (
        f"! no causes without a workload.json in {run_dir}: only the steps are compared\n"
    )


@pytest.mark.parametrize("step_ns", [None, 1_089_000])
def test_verify_judges_a_run(run, run_dir: Path, step_ns: int | None) -> None:
    """By what was expected when training began; the directories of earlier releases hold no such file."""
    if step_ns is not None:
        trial = msgspec.structs.replace(
            Timeline.load(run_dir / "measured.json"), steps_ns=(step_ns,)
        )
        after = expected(Timeline.load(run_dir / "predicted.json"), trial)
        after.save(run_dir / "expected.json")
    ran = run("verify", run_dir, "--tolerance", "0.05", "--json")
    verdict = decode(Verdict, ran.out.encode(), where="stdout")
    assert verdict.passed is (step_ns is not None)
    assert ran.status == (0 if verdict.passed else 3)
    assert verdict.expected_ns == step_ns
    assert verdict.predicted_ns == 1_000_000
    before = 100 * (verdict.error if step_ns is None else verdict.error_before)
    assert f"{before:+.1f} %" == "-9.1 %"
    words = " ".join(run("verify", run_dir).out.replace("│", "").split())
    assert "1.00 ms" in words
    assert ("expected 1.09 ms when training began" in words) is (step_ns is not None)


def test_verify_wants_two_files_or_a_directory(run, run_dir: Path) -> None:
    """One timeline has nothing to be compared with."""
    file = run_dir / "measured.json"
    assert run("verify", file).err == (
        f"ridgeline: wanted two timeline files or the directory of a run, got {file} alone; name the "
        "measured timeline as well\n"
    )
    assert run("verify", run_dir, run_dir).err == (
        f"ridgeline: wanted two timeline files, got the directory {run_dir}; name the measured.json or "
        "predicted.json in it, or one directory alone to judge that run\n"
    )
    assert run("verify", run_dir / "nothing").err == (
        f"ridgeline: wanted two timeline files or the directory of a run, got {run_dir / 'nothing'}, which "
        "does not exist; check the path\n"
    )


def test_verify_wants_a_finished_run(run, run_dir: Path) -> None:
    """Of one that was interrupted there is no measurement yet."""
    file = run_dir / "measured.json"
    file.unlink()
    assert run("verify", run_dir).err == (
        f"ridgeline: wanted the directory of a finished run, got no measured.json in {run_dir}; name "
        "another, or finish that run with `ridgeline train --resume`\n"
    )


def test_verify_wants_timelines(run, machine_file, run_dir) -> None:
    """Another kind of file is refused by name."""
    ran = run("verify", run_dir / "predicted.json", machine_file)
    assert ran.status == 1
    assert ran.err == (
        f"ridgeline: wanted a timeline file, got kind 'machine' in {machine_file}; "
        "give the path of a file written as timeline\n"
    )


def test_report_writes_page_and_trace(run, run_dir: Path) -> None:
    """Both files are made from what the directory holds, and named."""
    ran = run("report", run_dir, "--json")
    assert ran.status == 0
    files = [str(run_dir / "trace.json.gz"), str(run_dir / "report.html")]
    assert json.loads(ran.out) == {"files": files, "outages": []}
    page = (run_dir / "report.html").read_text()
    assert '<section id="timeline"' in page
    assert '<section id="plan"' not in page
    assert 'href="trace.json.gz"' in page


def test_report_shows_what_was_expected(run, run_dir: Path) -> None:
    """A trial's correction stands between prediction and measurement, and is what frames are held against."""
    predicted = Timeline.load(run_dir / "predicted.json")
    trial = msgspec.structs.replace(Timeline.load(run_dir / "measured.json"), steps_ns=(1_089_000,))
    expected(predicted, trial).save(run_dir / "expected.json")
    assert run("report", run_dir).status == 0
    page = (run_dir / "report.html").read_text()
    assert page.index(">Predicted<") < page.index(">Expected after a trial<")
    assert page.index(">Expected after a trial<") < page.index(">Measured<")
    predicted.save(run_dir / "expected.json")
    assert run("report", run_dir).status == 0
    assert "Expected after a trial" not in (run_dir / "report.html").read_text()


def test_report_shows_a_given_plan(run, run_dir: Path) -> None:
    """A run whose plan was given has no ranking; its plan is shown all the same."""
    Plan(workers=1, threads=2).save(run_dir / "plan.json")
    assert run("report", run_dir).status == 0
    page = (run_dir / "report.html").read_text()
    assert "The plan was given: nothing was searched or tried." in page
    assert "Tick: measured step of the run." in page


def test_report_of_an_empty_directory(run, tmp_path) -> None:
    """A directory without a run is refused, and nothing is written there."""
    ran = run("report", tmp_path)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "ridgeline: wanted the directory of a run, got none of machine.json, workload.json, plan.json, "
        f"predicted.json, measured.json, verdict.json, history.json in {tmp_path}; give the directory "
        "that `ridgeline train -o` wrote\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_report_names_the_damaged_file(run, run_dir: Path) -> None:
    """A damaged file stops the report with its path."""
    (run_dir / "verdict.json").write_text("{")
    ran = run("report", run_dir)
    assert ran.status == 1
    assert str(run_dir / "verdict.json") in ran.err


def test_timelines_survive_the_round_trip(run_dir: Path) -> None:
    """What train writes is what verify and report read."""
    assert Timeline.load(run_dir / "measured.json").step_ns == 1_100_000


def test_seeds_have_64_bits(run, tmp_path) -> None:
    """A larger one is wrong usage."""
    ran = run("train", "mlp", "--seed", 10**30, "-o", tmp_path / "run")
    assert ran.status == 2
    assert f"wanted a number of 64 bits, got {10**30}" in ran.err
