"""The public TrainStep: the loop closed around a user's own script, alone and with two workers."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ports import free_port
from ridgeline.errors import PlanError
from strategies import make_machine
from torchrun import torchrun
from warm import WARM

SCRIPT = Path(__file__).parent / "auto_worker.py"
ONE_THREAD = [rl.machine.Setting(device="cpu", workers=n, threads=1) for n in (1, 2)]


def run_script(*prefixes: list[str], directory: Path) -> list[dict[str, Any]]:
    """What each worker of a user's script wrote, of processes that are started side by side."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(directory),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *prefix, str(SCRIPT), str(directory)]
            if prefix
            else WARM.command(SCRIPT, directory, environment=environment),
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix in prefixes
    ]
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
    return written(directory)


def run_workers(workers: int, name: str, directory: Path) -> list[dict[str, Any]]:
    """What each of so many workers of another script wrote."""
    torchrun(workers, SCRIPT.with_name(name), directory, XDG_CACHE_HOME=str(directory))
    return written(directory)


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("?.json"))]


def losses_by_hand() -> list[float]:
    """The plain loop on worker 0's data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(0)
    losses = []
    # The batches are drawn first, as the script does, from a generator of their own.
    batches = [
        (torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator))
        for _ in range(12)
    ]
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_choosing_leaves_no_trace_in_the_maths(tmp_path: Path) -> None:
    """After measuring, tracing and trials the losses have the bits of the plain loop, but for a compiler's."""
    [alone] = run_script([], directory=tmp_path)
    is_compiled = "compiled" in alone["plan"]
    assert alone["losses"] == pytest.approx(
        losses_by_hand(), rel=1e-5 if is_compiled else 0.0, abs=0.0
    )
    assert alone["plan"].startswith("rl.Plan(")
    assert "execution" in alone["reasons"]
    assert alone["predicted_ns"] > 0
    assert alone["measured_ns"] > 0


def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    """Two workers choose the same plan and end with the same parameters, on one host as on two."""
    agent = ["-m", "torch.distributed.run"]
    on_one, on_two = tmp_path / "one", tmp_path / "two"
    on_one.mkdir()
    on_two.mkdir()
    launch = [*agent, "--standalone", "--nproc-per-node", "2"]
    first, second = run_script(launch, directory=on_one)
    assert first["plan"] == second["plan"]
    assert "workers=2" in first["plan"]
    assert first["parameters"] == second["parameters"]
    assert first["losses"] != second["losses"]
    # Two agents are two hosts to the workers, wherever they run.
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    hosts = [[*agent, *where, "--node-rank", str(rank)] for rank in (0, 1)]
    third, fourth = run_script(*hosts, directory=on_two)
    assert third["plan"] == fourth["plan"]
    assert third["parameters"] == fourth["parameters"]
    assert third["parameters"] == pytest.approx(first["parameters"], rel=1e-5)
    for one, other in ((first, third), (second, fourth)):  # whose plans may differ
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    names = sorted(path.name.partition("-")[2][16:] for path in on_two.glob("ridgeline/machine-*"))
    assert names == ["-2-hosts.json"]


def test_workers_train_alone_where_that_is_allowed_and_pays(tmp_path: Path) -> None:
    """By a profile with a slow link: tried over a period, undone, and then the rhythm in force; else it is not.

    At the end of a period's exchanges nothing but the outer parameters is common, so that workers differ.
    """
    slow = make_machine(settings=ONE_THREAD, bandwidth=1e2, rate=1e12)
    slow.save(tmp_path / "machine.json")
    first, second = run_workers(2, "rhythm_worker.py", tmp_path)
    alone, other = first["allowed"], second["allowed"]
    assert alone["plan"] == other["plan"]
    assert alone["every"] > 1
    assert alone["options"]["outer"] == "nesterov"  # they train with AdamW
    assert alone["periods"] >= 1
    assert alone["undone"]
    assert other["undone"]
    assert alone["notes"][0].startswith(
        f"workers train alone and exchange parameters every {alone['every']} steps, which is another"
    )
    assert all(a != b for a, b in zip(alone["sums"], other["sums"], strict=True))
    exact, again = (found["not allowed"] for found in (first, second))
    assert exact["every"] == 1
    assert exact["sums"] == again["sums"]


def test_what_one_of_two_workers_does_not_bear_all_leave_out(tmp_path: Path) -> None:
    """A memory format that the code does not allow fails its plans; a log that one worker writes ends all trials."""
    make_machine(settings=ONE_THREAD).save(tmp_path / "machine.json")
    results = run_workers(2, "stranger_worker.py", tmp_path)
    assert (tmp_path / "log").read_text() == "x" * 5
    for result in results:
        expected = pytest.approx(result["by hand"]["losses"], rel=1e-5)
        assert result["viewing"]["losses"] == expected
        assert len(result["viewing"]["failures"]) >= 1
        for failure in result["viewing"]["failures"]:
            assert "RuntimeError: view size is not compatible" in failure
            assert failure.endswith("on rank 0; other plans are tried instead")
        assert result["writing"]["losses"] == expected
    notes = [result["writing"]["notes"][0] for result in results]
    begin = "the step runs as it was written, since a trial could not be taken back: "
    assert notes[0].startswith(f"{begin}wanted a step that can be run again, got open of '")
    assert notes[0].endswith(
        "which cannot be taken back; write to files and sockets after the step"
    )
    assert notes[1] == f"{begin}another worker could not trace the step"


def test_groups_of_one_job_choose_each_for_themselves(tmp_path: Path) -> None:
    """Ranks 1 and 2 measure, trace and try together while rank 0, in a group of its own, does so alone."""
    alone, first, second = run_workers(3, "group_worker.py", tmp_path)
    assert alone["workers"] == 1
    assert first["workers"] == 2
    assert first["plan"] == second["plan"]
    assert first["parameters"] == second["parameters"]
    assert first["losses"] != second["losses"]
    assert first["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-5)
    assert set(first["measured"]) == {2}
    assert min(told["predicted_ns"] for told in (alone, first, second)) > 0


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def test_a_given_plan_runs_without_measuring() -> None:
    """A plan by hand is in force at once; an automatic one only after a batch."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, loss_fn, optimizer, rl.Plan(), device="cpu") as step:
        assert step.plan == rl.Plan()
        step(torch.ones(8, 4))
        assert step.machine is None
    with (
        rl.TrainStep(model, loss_fn, optimizer, device="cpu") as step,
        pytest.raises(
            PlanError, match=r"got a step that has seen no batch yet; call step\(batch\)"
        ),
    ):
        _ = step.plan


def test_a_closed_step_is_refused_by_name() -> None:
    """Calls and `prepare`, whether it has run or not; what it measured can still be read."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    planned = rl.TrainStep(model, loss_fn, optimizer, rl.Plan(), device="cpu")
    planned(torch.ones(8, 4))
    unused = rl.TrainStep(model, loss_fn, optimizer, device="cpu")
    for step in (planned, unused):
        step.close()
        for call in (step, step.prepare):
            with pytest.raises(PlanError) as caught:
                call(torch.ones(8, 4))
            assert str(caught.value) == (
                "wanted an open step, got one that was closed; make a new TrainStep to train on"
            )
    assert planned.timeline().frames


def test_choosing_leaves_no_trace_in_other_networks() -> None:
    """A teacher that the loss updates, and a norm that is not in the model, are as before `prepare`."""
    model, teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    norm = nn.BatchNorm1d(2, affine=False)

    def follow(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (norm(model(batch)) - norm(teacher(batch))).square().mean()

    before = copy.deepcopy((teacher.state_dict(), norm.state_dict()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, follow, optimizer, machine=make_machine(), device="cpu") as step:
        step.prepare(torch.randn(8, 4))
    for network, state in zip((teacher, norm), before, strict=True):
        assert all(torch.equal(state[name], now) for name, now in network.state_dict().items())


def test_what_is_no_plan_is_refused() -> None:
    """At once, with what to write instead."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    message = (
        r"got 'eager'; an execution goes into a plan, for example rl.Plan\(execution='eager'\)"
    )
    with pytest.raises(PlanError, match=message):
        rl.TrainStep(model, loss_fn, optimizer, "eager", device="cpu")


class Scheduled:
    """Sets the learning rate, and steps the optimizer that it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step_and_update_lr(self) -> None:
        self.inner.step()


def test_a_wrapper_around_an_optimizer_is_refused_with_the_one_inside() -> None:
    """Such a class has other names for what it does; both kinds of step say what to give."""
    model = nn.Linear(4, 2)
    wrapper: Any = Scheduled(torch.optim.SGD(model.parameters(), 0.1))
    message = "wanted a torch.optim.Optimizer, got Scheduled; give the one in its attribute 'inner'"
    with pytest.raises(PlanError, match=message):
        rl.TrainStep(model, loss_fn, wrapper, device="cpu")
    with pytest.raises(PlanError, match=message):
        rl.TrainStep(model, loss_fn, wrapper, rl.Plan(), device="cpu")
    with pytest.raises(PlanError, match="give the one that it wraps, if any"):
        rl.TrainStep(model, loss_fn, object(), device="cpu")  # type: ignore[arg-type]


def test_a_plan_without_threads_is_predicted_with_those_that_run() -> None:
    """Not with a share of the cores: torchrun gives each process one thread."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    machine = make_machine()
    threads = torch.get_num_threads()
    step = rl.TrainStep(model, loss_fn, optimizer, rl.Plan(), machine=machine, device="cpu")
    with step:
        step(torch.ones(8, 4))
        here = rl.Plan(threads=threads)
        assert step.workload is None
        predicted = step.predicted()
        assert step.workload is not None
        assert predicted.spans == rl.simulate(machine, step.workload, here).spans


def test_a_saved_profile_that_trials_contradict_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One old and a thousand times too slow is replaced; one that the user gave is not questioned."""
    asked: list[bool] = []
    threads = torch.get_num_threads()
    here = [rl.machine.Setting(device="cpu", workers=1, threads=threads)]
    saved = make_machine(rate=1e3, settings=here)

    def measured(*, refresh: bool, **_: object) -> rl.Machine:
        asked.append(refresh)
        return saved

    monkeypatch.setattr("ridgeline.decision.profiling.measure", measured)
    for given, wanted in ((None, [False, True]), (saved, [])):
        asked.clear()
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with rl.TrainStep(model, loss_fn, optimizer, machine=given, device="cpu") as step:
            step.prepare(torch.ones(8, 4))
        assert asked == wanted
