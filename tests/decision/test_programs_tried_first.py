"""What torch's compiler made for a CPU runs in a child first: what it does to memory costs the plan, never the run."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision.trial import Script, run_trial
from ridgeline.errors import CaptureError
from ridgeline.lint.fences import Fences
from ridgeline.machine import Setting
from ridgeline.packages import program_trial
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World
from strategies import make_machine

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
KILLS = "wanted a compiled program that leaves the memory of others alone, got one that "


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the compiler, for all these tests: compiling takes most of their time."""
    return tmp_path_factory.mktemp("compiler")


@pytest.fixture(autouse=True)
def _nothing_ran(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    shutil.rmtree(cache / "ridgeline-ran", ignore_errors=True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def step_of(scale: float = 1.0) -> tuple[Any, ...]:
    """A network, a loss that no other process could import, an optimizer and a batch."""
    model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 8))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return scale * nn.functional.mse_loss(model(batch[0]), batch[1])

    batch = torch.rand(64, 16), torch.rand(64, 8)
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), batch


def tried(execution: str, subject: tuple[Any, ...]) -> Any:
    model, loss_fn, optimizer, batch = subject

    def make(plan: Plan) -> PlannedStep:
        return PlannedStep(model, loss_fn, optimizer, plan, device="cpu")

    return run_trial(
        make, Plan(execution=execution), Script(model, loss_fn, optimizer), [batch], ALONE
    )


def change_programs(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Have the child run programs that do something else first: a stand-in for a compiler's error."""
    plain = program_trial._Child.run

    def run(self: Any, asked: dict[str, Any]) -> tuple[str, str]:
        head = "        args.clear()\n"
        source = asked.get("source", head)
        assert head in source
        return plain(self, {**asked, "source": source.replace(head, f"{head}        {line}\n")})

    monkeypatch.setattr(program_trial._Child, "run", run)


def test_good_programs_run_in_a_child_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial starts one child for forward and backward; the next process knows them by the cache."""
    started: list[Any] = []
    plain = program_trial._Child._start

    def start(self: Any) -> Any:
        started.append(self)
        return plain(self)

    monkeypatch.setattr(program_trial._Child, "_start", start)
    first = tried("compiled", step_of())
    assert first.steps_ns
    assert not [note for note in first.notes if "child" in note]
    assert len(started) == 1
    torch._dynamo.reset()
    assert tried("compiled", step_of()).steps_ns
    assert len(started) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("os.abort()", "ended its process with SIGABRT"),
        ("os.kill(os.getpid(), 11)", "ended its process with SIGSEGV"),
        ("os._exit(3)", "ended its process with status 3"),
    ],
)
def test_a_program_that_ends_its_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    """The signal is named, and the process that trains never runs the program."""
    change_programs(monkeypatch, line)
    with pytest.raises(CaptureError) as caught:
        tried("compiled", step_of())
    assert str(caught.value).startswith(KILLS + words)
    assert "use execution='eager', or another release of torch" in str(caught.value)


def test_a_program_that_writes_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element behind a tensor is found every time, though nothing crashes."""
    change_programs(
        monkeypatch,
        "import ctypes; keep = empty_strided_cpu((4,), (1,), torch.float32);"
        " ctypes.memset(keep.data_ptr() + 16, 0, 4)",
    )
    with pytest.raises(CaptureError) as caught:
        tried("compiled", step_of())
    assert str(caught.value).startswith(
        KILLS + "wrote 4 bytes after a tensor torch.float32 of shape [4]"
    )


def test_what_python_raises_in_a_child_keeps_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception does no harm here either; it is noted."""
    change_programs(monkeypatch, "raise RuntimeError('on purpose')")
    notes = tried("compiled", step_of()).notes
    assert "a compiled program could not be tried in a child: RuntimeError: on purpose" in notes


def test_packaged_programs_run_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled ahead of time is tried as well."""
    asked: list[dict[str, Any]] = []
    plain = program_trial._Child.run

    def run(self: Any, what: dict[str, Any]) -> tuple[str, str]:
        asked.append(what)
        return plain(self, what)

    monkeypatch.setattr(program_trial._Child, "run", run)
    made = tried("packaged", step_of())
    assert [Path(what["package"]).suffix for what in asked] == [".pt2"]
    assert not [note for note in made.notes if "child" in note]


def test_auto_goes_on_with_another_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan stands last with its reason, and the step trains as plain PyTorch does."""
    died = "ended its process with SIGABRT", ""
    monkeypatch.setattr(program_trial._Child, "run", lambda *_: died)
    model, loss_fn, optimizer, batch = step_of()
    before = copy.deepcopy(model.state_dict())
    threads = torch.get_num_threads()
    # Dispatching an operator is dear here, so that what compiles is tried first.
    machine = make_machine(
        settings=[Setting(device="cpu", workers=1, threads=threads)], dispatch_s=1e-3
    )
    with rl.TrainStep(
        model, loss_fn, optimizer, machine=machine, device="cpu", steps=10_000_000
    ) as step:
        step.prepare(batch)
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        assert step.ranking is not None
        failures = [c.failure for c in step.ranking.candidates if c.failure]
        assert any("ended its process with SIGABRT" in failure for failure in failures)
        assert step.plan.execution == "eager"
        step(batch)


class Scattered(nn.Module):
    """An embedding whose gradient arrives transposed, dropped out, and from two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(97, 20)
        self.first = nn.Conv1d(20, 30, 3, padding=1)
        self.second = nn.Conv1d(20, 30, 1)

    def forward(self, text: Tensor) -> Tensor:
        taken = nn.functional.dropout(self.encoder(text), 0.1, self.training).transpose(1, 2)
        return self.first(taken) + self.second(taken)


def test_a_program_of_torch_that_corrupts_the_heap() -> None:
    """Torch 2.13 scatters the embedding's gradient over the heap; a release that does not trains compiled.

    Source: https://github.com/pytorch/pytorch/issues/191837
    """
    model = Scattered()
    batch = (torch.randint(0, 97, (4, 40)),)
    batch[0][:, ::4] = 96  # behind this row there is no other
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    try:
        tried("compiled", (model, loss_fn, optimizer, batch))
    except CaptureError as error:
        assert "wrote" in str(error)  # noqa: PT017 - either is right: it depends on torch and processor
        assert "of shape [97, 20]" in str(error)  # noqa: PT017


def test_fences_hand_out_what_the_compiler_asks_for() -> None:
    """Sizes, strides and types are right, memory is aligned, and inputs that share memory share it again."""
    fences = Fences()
    made = fences.empty_strided((3, 4), (1, 3), torch.float64)
    assert (made.shape, made.stride(), made.dtype) == ((3, 4), (1, 3), torch.float64)
    assert made.data_ptr() % 64 == 0
    assert fences.empty_strided((0, 4), (4, 1), torch.bool).numel() == 0
    base = torch.arange(12.0)
    first, second, number = fences.copies([base, base[3:].view(3, 3).t(), 5])
    assert torch.equal(first, base)
    assert torch.equal(second, base[3:].view(3, 3).t())
    assert second.stride() == (1, 3)
    first.zero_()
    assert not second.any()
    assert base.any()
    assert number == 5
    del made, first, second
    fences.check()
    assert fences.broken == []
