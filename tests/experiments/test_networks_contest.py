"""The networks experiment: its tasks in small, what a child that fails costs, and how answers are joined."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compiled_trials import never_chosen
from ridgeline.errors import CaptureError, TaskError
from ridgeline.experiments.networks import process
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.experiment import WITHOUT_BYTECODE, run
from ridgeline.experiments.networks.process import Children, ChildReply, last_error
from ridgeline.experiments.networks.request import (
    NetworkAnswer,
    NetworkRequest,
    NetworkSettings,
    Task,
)
from ridgeline.experiments.networks.result import (
    AUTO,
    FormRow,
    Headline,
    NetworksExperiment,
    TriedPlan,
)
from ridgeline.experiments.networks.results.combine import best_by_hand, combined
from ridgeline.experiments.networks.settings import settings_for
from ridgeline.experiments.networks.sides import check, contest
from ridgeline.experiments.networks.sides.forms import (
    NetworkForm,
    NetworkSubject,
    plain_forms,
)
from ridgeline.experiments.ways.case import WayRunner
from ridgeline.machine import Quantity, Setting
from ridgeline.workers.world import World
from strategies import make_machine

NAMES = ("small_mlp", "message_passing")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A machine of round numbers for the threads that torch has here, so that nothing is measured."""
    setting = Setting(device="cpu", workers=1, threads=torch.get_num_threads())
    return make_machine(settings=[setting]).save(tmp_path / "machine.json")


def subject_of(name: str) -> NetworkSubject:
    world = World(0, 1, 0, torch.device("cpu"))
    return NetworkSubject(network=catalog()[name], world=world, scale="cpu")


def request_for(task: Task, name: str, folder: Path, **changes: Any) -> NetworkRequest:
    by_hand = changes.pop("by_hand", None)
    settings: dict[str, Any] = {"device": "cpu", "scale": "cpu", "turns": 2, "steps": 1}
    return NetworkRequest(
        task=task,
        network=name,
        how=NetworkSettings(**(settings | changes)),
        by_hand=by_hand,
        plan_cache=str(folder / "plan"),
        peer_cache=str(folder / "peer"),
        answer=str(folder / "answer.json"),
    )


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain forms but those that compile, which would take half a minute; the last one fails."""

    def fail(subject: NetworkSubject) -> WayRunner:
        raise RuntimeError("no compiler here")

    def forms(subject: NetworkSubject) -> list[NetworkForm]:
        fine = [form for form in plain_forms(subject) if "compile" not in form.name]
        return [*fine, NetworkForm("torch.compile", "plain", fail)]

    monkeypatch.setattr(contest, "plain_forms", forms)
    monkeypatch.setattr(contest, "use_cache", lambda folder: None)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", NAMES)
def test_contest_has_a_row_for_every_form(name: str, profile: Path, tmp_path: Path) -> None:
    """Those that run have times and ratios, the one that fails its reason; predictions stand beside."""
    answers: list[NetworkAnswer] = []
    request = request_for("contest", name, tmp_path, machine=str(profile))
    contest.contest(request, subject_of(name), answers.append)
    assert len(answers) > 1  # what is known early is written early
    rows = {row.form: row for row in answers[-1].forms}
    assert list(rows) == [AUTO, "eager", "torch.compile"]
    assert rows["torch.compile"].reason == "RuntimeError: no compiler here"
    assert (rows["torch.compile"].step_s, rows["torch.compile"].auto_over) == (None, None)
    assert rows["eager"].step_s is not None
    assert rows["eager"].step_s.n == 2
    assert rows[AUTO].auto_over is not None
    assert rows[AUTO].auto_over.value == 1.0
    told = answers[-1].headline
    assert told is not None
    assert told.trained_s is not None
    assert told.trained_s.n == 2  # measured before there was any other form
    early = next(one for one in answers if one.headline and one.headline.trained_s)
    assert [row.form for row in early.forms] == [AUTO]
    assert (early.headline, early.forms[0].step_s) == (told, None)
    doing = list(dict.fromkeys(answer.doing for answer in answers))
    assert doing == [
        "choosing a plan",
        "training the chosen plan alone",
        "running the first step of eager",
        "running the first step of torch.compile",
        "taking turns",
        "",
    ]
    assert told.before_s is not None
    assert [plan.execution for plan in answers[-1].tried] == ["eager"]
    assert answers[-1].first_s is not None


def test_a_form_that_trains_otherwise_is_left_out() -> None:
    subject = subject_of("heat_equation")
    with pytest.raises(CaptureError, match="computes no gradients of gradients: heat_loss"):
        plain_forms(subject)[-1].make(subject)


@pytest.mark.usefixtures("without_compiler")
def test_by_hand_the_slower_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form by hand a tenth slower than another, roughly timed, gives its memory back and says why."""
    subject = subject_of("small_mlp")
    eager = plain_forms(subject)[0]
    names = ["slow", "fast", "near", "slower"]
    rough_s = dict(zip(names, (2.0, 1.0, 1.05, 3.0), strict=True))
    figures = iter(rough_s.values())
    monkeypatch.setattr(contest, "rough_s", lambda *arguments: next(figures))
    by_hand = [NetworkForm(name, "by hand", eager.make) for name in names]
    monkeypatch.setattr(contest, "forms_by_hand", lambda subject: by_hand)
    answers: list[NetworkAnswer] = []
    contest.first_step(request_for("compile", "small_mlp", tmp_path), subject, answers.append)
    assert answers[0].notes == ("torch.compile: RuntimeError: no compiler here",)
    assert len(answers) == 1 + len(names)
    reasons = {row.form: row.reason for row in answers[-1].forms}
    assert reasons == {
        "slow": "left out of the turns: roughly 2.00 times the time of fast",
        "fast": "",
        "near": "",
        "slower": "left out of the turns: roughly 3.00 times the time of fast",
    }
    assert best_by_hand(answers[-1]) == ("fast",)


@pytest.mark.usefixtures("without_compiler")
def test_turns_are_kept_one_by_one(profile: Path, tmp_path: Path) -> None:
    """Whenever the contest ends, the turns that were taken count."""
    answers: list[NetworkAnswer] = []
    request = request_for("contest", "small_mlp", tmp_path, machine=str(profile), turns=3)
    contest.contest(request, subject_of("small_mlp"), answers.append)
    counts = [
        row.step_s.n
        for answer in answers
        if answer.doing == "taking turns"
        for row in answer.forms
        if row.form == AUTO and row.step_s is not None
    ]
    assert counts == [1, 2, 3]


def test_ratios_are_taken_turn_by_turn() -> None:
    """The time of `auto` over another's, each turn by itself; a form without times keeps its reason."""
    rows = {name: FormRow(form=name, kind="plain") for name in (AUTO, "eager", "lost")}
    samples = {AUTO: [1.0, 2.0, 3.0], "eager": [2.0, 8.0, 3.0]}
    found = {row.form: row for row in contest.rows_with_times(rows, samples)}
    assert found["eager"].auto_over == Quantity.measured([0.5, 0.25, 1.0], "x")
    assert found["eager"].step_s == Quantity.measured([2.0, 8.0, 3.0], "s")
    assert found["lost"] == rows["lost"]


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_equal_the_plain_loop(
    name: str, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` trains with the bits of the plain loop where it chose no compiler."""
    never_chosen(monkeypatch)
    answers: list[NetworkAnswer] = []
    request = request_for("check", name, tmp_path, machine=str(profile))
    check.check(request, subject_of(name), answers.append)
    found = answers[-1].check
    assert found is not None
    assert (found.losses, found.parameters, found.is_exact) == (0.0, 0.0, True)
    assert found.is_equal
    assert found.sensitivity > 0.0


def test_a_difference_is_told_by_its_size() -> None:
    """Relative to losses and to the norm of all parameters; what the last bits do by themselves is no fault."""
    wanted = check.TrainedSteps([2.0, 1.0], [torch.tensor([3.0, 4.0])])
    got = check.TrainedSteps([2.0, 1.5], [torch.tensor([3.0, 4.5])])
    assert check.differences(got, wanted) == (0.5, 0.1)
    assert not check.is_close(0.5, 0.1, 1e-3, 1e-6)
    assert check.is_close(0.5, 0.1, 0.2, 1e-6)
    broken = check.TrainedSteps([float("nan")], [torch.tensor([float("inf")])])
    assert min(check.differences(broken, check.TrainedSteps([1.0], [torch.ones(1)]))) == 1e30


def test_training_is_repeated_by_its_seed() -> None:
    """The same steps twice have the same bits, dropout included."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    data = torch.ones(2, 4)
    subject = subject_of("small_mlp")
    first, again = (check.train(lambda: model(data).sum(), model, subject) for _ in range(2))
    assert first.losses == again.losses
    assert len(set(first.losses)) > 1


@pytest.mark.parametrize(
    ("network", "limit_s", "reason"),
    [
        ("ends well", 200.0, ""),
        ("dies", 200.0, "ended with signal 9: nothing in its log"),
        ("raises", 200.0, "ended with status 1: RuntimeError: CUDA error: device-side assert"),
        ("hangs", 0.0, "it was ended after 0 s while taking turns"),
    ],
)
def test_a_child_costs_itself_alone(
    network: str, limit_s: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does, what it had written is kept, and the reason is told; nothing is left running."""
    monkeypatch.setattr(process, "CHILD", "unruly_child")
    request = request_for("plan", network, tmp_path)
    wait = subprocess.Popen.wait

    def wait_once_it_has_answered(self: Any, timeout: float | None = None) -> int:
        while not Path(request.answer).exists():  # a busy host may take long to start it
            threading.Event().wait(0.01)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_has_answered)
    reply = Children().ask(request, tmp_path, workers=1, environment={}, limit_s=limit_s)
    assert reply.answer.first_s == 1.0
    assert reply.reason.startswith(reason)
    assert bool(reply.reason) == bool(reason)


def test_a_child_that_begins_behind_the_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may come while it starts: nobody waits for its limit then."""
    monkeypatch.setattr(process, "CHILD", "unruly_child")
    children = Children()
    children.end()
    request = request_for("plan", "hangs", tmp_path)
    reply = children.ask(request, tmp_path, workers=1, environment={}, limit_s=10.0)
    assert reply.reason == "the experiment was ended"


def test_the_last_error_of_a_log() -> None:
    """The last line that names an error, else the last that says anything."""
    log = (
        "Traceback:\n  raise ValueError\n    ^^^^^\nValueError: too small\nsome warning after it\n"
    )
    assert last_error(log) == "ValueError: too small"
    assert last_error("Killed\n\n") == "Killed"
    assert last_error("") == "nothing in its log"


def test_the_experiment_asks_children(profile: Path) -> None:
    """From the request in a file to the result: a network that is checked, and one that gets no time."""
    settings = settings_for("cpu", tasks=("check",), machine=str(profile), limit_s=100.0)
    published: list[NetworksExperiment] = []
    lines: list[str] = []
    found = run(
        names=["small_mlp"], settings=settings, publish=published.append, progress=lines.append
    )
    assert published == [found]
    [row] = found.networks
    assert (row.network, row.reason) == ("small_mlp", "")
    assert row.check is not None, row.notes
    assert row.check.is_exact
    assert lines[0] == "small_mlp: check"
    late = settings_for("cpu", stop_after_s=-1.0, machine=str(profile))
    found = run(names=["small_mlp", "vae"], settings=late, earlier=found)
    reasons = {one.network: one.reason for one in found.networks}
    assert reasons == {"vae": "not begun within -1 s", "small_mlp": ""}


def test_an_end_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the network in hand, which a later call begins anew."""
    starts = {"compile": 7.0, "plan": 9.0}

    def ask(self: Children, request: NetworkRequest, *rest: Any, **more: Any) -> ChildReply:
        if request.task not in starts:
            raise KeyboardInterrupt
        return ChildReply(NetworkAnswer(first_s=starts[request.task]), "")

    published: list[NetworksExperiment] = []
    settings = settings_for(
        "cpu", is_warm=True, tasks=("compile", "plan", "contest", "check"), machine="none"
    )
    monkeypatch.setattr(Children, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        run(names=["vae"], settings=settings, publish=published.append)
    [row] = published[-1].networks
    assert (row.starts.compile_s, row.starts.plan_s) == (7.0, 9.0)
    assert row.reason == "ended before it was done: contest, check"
    starts |= {"contest": 2.0, "check": 1.0}
    found = run(names=["vae"], settings=settings, earlier=published[-1])
    [row] = found.networks
    assert (row.starts.plan_again_s, row.reason) == (2.0, "")


def test_more_networks_at_a_time_than_gpus_are_refused() -> None:
    """At once, before anything is measured."""
    with pytest.raises(TaskError, match=r"wanted a GPU for each of 9 networks .* run fewer"):
        run(names=["vae"], settings=settings_for("cpu", parallel=9))


def test_answers_become_one_result() -> None:
    """The first start of `auto` is that of `plan`; a form by hand that lost the rough timing is named."""
    network = catalog()["mlp"]
    tried = TriedPlan(plan="eager", execution="eager", before_s=1.0)
    hand = [
        FormRow(form=name, kind="by hand", step_s=Quantity.measured([figure], "s"))
        for name, figure in (("slow", 3.0), ("fast", 2.0))
    ]
    failed = FormRow(form="broken", kind="by hand", reason="it waits for the device")
    compiled = NetworkAnswer(first_s=9.0, forms=(*hand, failed))
    assert best_by_hand(compiled) == ("fast",)
    rows = (FormRow(form=AUTO, kind="ridgeline"), FormRow(form="fast", kind="by hand"))
    replies = {
        "compile": ChildReply(compiled, ""),
        "compile again": ChildReply(NetworkAnswer(), "it was ended after 3 s"),
        "plan": ChildReply(NetworkAnswer(first_s=20.0, tried=(tried,), notes=("a",)), ""),
        "contest": ChildReply(NetworkAnswer(first_s=2.0, forms=rows, notes=("a",)), ""),
    }
    found = combined(network, replies, 60.0)
    assert (found.starts.plan_s, found.starts.plan_again_s) == (20.0, 2.0)
    assert (found.starts.compile_s, found.starts.compile_again_s) == (9.0, None)
    assert [(row.form, row.reason) for row in found.forms] == [
        (AUTO, ""),
        ("fast", ""),
        ("slow", "left out of the turns: fast was faster"),
        ("broken", "it waits for the device"),
    ]
    assert found.notes == ("compile again: it was ended after 3 s", "a")
    alone = combined(network, {"contest": replies["contest"]}, 60.0)
    assert (alone.starts.plan_s, alone.starts.plan_again_s) == (2.0, None)
    lost = combined(network, {"contest": ChildReply(NetworkAnswer(), "it died")}, 60.0)
    assert [(row.form, row.reason) for row in lost.forms] == [(AUTO, "it died")]


def test_a_contest_that_was_ended_keeps_what_was_known() -> None:
    """Forms that ran have the end of the contest as their reason; those that failed have their own."""
    rows = (
        FormRow(form=AUTO, kind="ridgeline", first_s=1.0),
        FormRow(form="eager", kind="plain", step_s=Quantity.measured([1.0], "s")),
        FormRow(form="torch.compile", kind="plain", reason="RuntimeError: no compiler here"),
    )
    told = Headline(plan="rl.Plan()", execution="eager", before_s=1.0, expected_s=2.0)
    ended = "it was ended after 200 s while taking turns"
    reply = ChildReply(NetworkAnswer(forms=rows, headline=told), ended)
    found = combined(catalog()["mlp"], {"contest": reply}, 200.0)
    assert [row.reason for row in found.forms] == [
        f"no turns: {ended}",
        "",
        "RuntimeError: no compiler here",
    ]
    assert [row.was_cut for row in found.forms] == [True, False, False]
    assert found.headline == told
    assert found.notes == (f"contest: {ended}",)


@pytest.mark.parametrize("is_without", [False, True])
def test_starts_without_bytecode_are_noted(
    is_without: bool, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would compile Ridgeline's sources, which the peers' starts need not."""
    monkeypatch.setattr(sys, "dont_write_bytecode", is_without)
    how = settings_for("cpu", scale="cpu", stop_after_s=0.0, machine=str(profile))
    found = run(names=["mlp"], settings=how).notes
    assert found == ((WITHOUT_BYTECODE,) if is_without else ())


def test_measuring_the_machine_keeps_what_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sets the starts of a run apart, then why the machine was not measured."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    reply = ChildReply(NetworkAnswer(first_s=2.0), "it was ended after 600 s")
    monkeypatch.setattr(Children, "ask", lambda *given, **settings: reply)
    found = run(names=["mlp"], settings=settings_for("cpu", scale="cpu", stop_after_s=0.0))
    assert found.machine_s == 2.0
    assert found.notes == (
        WITHOUT_BYTECODE,
        "the machine was not measured ahead: it was ended after 600 s",
    )
