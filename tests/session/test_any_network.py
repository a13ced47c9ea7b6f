"""Whatever trains with a plan by hand trains with a chosen one: ten steps have the bits of the plain loop."""

import contextlib
import importlib
import inspect
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from everyday_networks import NETWORKS, Experts, Network, adam, classify, many, mlp, rows, simple
from stateful_networks import STATEFUL
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ridgeline as rl
from compiled_trials import never_chosen
from ridgeline.errors import SideEffectError
from ridgeline.planner.trials import trial_steps
from ridgeline.reach.side_effects import refusing_writes, streams
from ridgeline.tracing.opaque import PHASES, opaque_timings
from strategies import make_machine

RECORDED = "recorded from a real step, which was taken back: "
OPAQUE = "each phase counts as one operator, as long as the phase took, and activations are not counted: "
REASONS = {
    "packed lstm": "aten._pack_padded_sequence.default in loss_fn (everyday_networks.py:",
    "mixture of experts": "aten.nonzero.default in loss_fn (everyday_networks.py:",
    "mixture of experts, split": "aten.bincount.default in loss_fn (everyday_networks.py:",
    "ctc": "aten._ctc_loss.Tensor in loss_fn (everyday_networks.py:",
    "distributions": "aten._local_scalar_dense.default (.item(), .tolist(), bool() or an if on a tensor) in",
    "metric": "aten._local_scalar_dense.default (.item(), .tolist(), bool() or an if on a tensor) in loss_fn",
    "asgd": "the optimizer ASGD cannot be traced without data (it reads the value of a tensor)",
    "own optimizer": "the optimizer Counting cannot be traced without data (it reads the value of a",
    "lazy cache": "the step keeps tensors that it makes outside of the model",
    "cached table": "the step keeps tensors that it makes outside of the model",
    "gradient scaler": "the step keeps tensors that it makes outside of the model",
    "proxies": "1 others, the first of shape (7, 5)",
    "lazily shaped": "0.weight of type UninitializedParameter",
    "averaging": "the step keeps tensors that it makes outside of the model",
    "momentum teacher": "RuntimeError: Unhandled FakeTensor Device Propagation for aten.mm.default"
    if torch.__version__ < "2.12"
    else "FakeTensorDeviceMismatchError: Expected all tensors to be on the same device",
    "scripted": "RuntimeError: post accumulate grad hooks cannot be registered on non-leaf tensors",
    "nested": "RuntimeError: Internal error: NestedTensorImpl doesn't support sizes.",
    "jagged": "AssertionError: self.shape_env must not be None",
    "uncopyable": "cannot pickle '_thread.lock' object",
}
"""Why a network is recorded while it runs; all others are traced without running."""


EVERY = NETWORKS | STATEFUL


@pytest.fixture(autouse=True)
def small_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Networks this small gain nothing from threads, and a trial of few steps leaves the traces of a long one."""
    never_chosen(monkeypatch)
    monkeypatch.setattr(trial_steps, "MOST_STEPS", trial_steps.LEAST_STEPS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def own_machine() -> rl.Machine:
    """A machine of round numbers for a worker with one thread."""
    return make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=1)])


def seeded(make: Callable[[], Network]) -> Network:
    torch.manual_seed(0)
    made = make()
    torch.manual_seed(1)
    return made


def plain_losses(network: Network) -> list[float]:
    losses = []
    for batch in network.batches:
        network.optimizer.zero_grad()
        loss = network.loss_fn(network.model, batch)
        loss.backward()
        network.optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("name", EVERY)
def test_trains_as_the_plain_loop(name: str) -> None:
    """Losses and state, whatever was traced, recorded or tried before; and the notes say how."""
    make = EVERY[name]
    plain = seeded(make)
    losses = plain_losses(plain)
    mine = seeded(make)
    machine = own_machine()
    with rl.TrainStep(
        mine.model, mine.loss_fn, mine.optimizer, machine=machine, device="cpu"
    ) as step:
        assert [step(batch).item() for batch in mine.batches] == losses
        assert step.workload is not None
        said = [note for note in step.workload.notes if note.startswith((RECORDED, OPAQUE))]
    assert_equal(plain.model, mine.model)
    if name == "watchful":
        assert "modes are not for this network (stateful_networks.py:" in said[0]
        assert [op.name for op in step.workload.ops] == [f"ridgeline.opaque.{p}" for p in PHASES]
        assert len(opaque_timings(step.workload, machine.ceilings[0].setting)) == 3
    else:
        reason = REASONS.get(name)
        begins = (f"{RECORDED}{reason}", f"{OPAQUE}{reason}")
        assert [note.startswith(begins) for note in said] == [True] * bool(reason)


def counted() -> Network:
    counts = itertools.count(1)
    return simple(mlp(), lambda m, b: classify(m, b) / next(counts))


def drawing() -> Network:
    model = mlp()
    model.scales = iter([0.5] * 5 + [2.0] * 5)
    return simple(model, lambda m, b: classify(m, b) * next(m.scales))


def loading() -> Network:
    other = DataLoader(torch.randn(20, 6), 2)
    parts = iter(other)
    return simple(mlp(), lambda m, b: classify(m, b) + m(next(parts)).square().mean())


def noting(path: Path) -> Network:
    file = path.open("a")

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        file.write("x")
        file.flush()
        return classify(m, b)

    loss_fn.close = file.close
    return simple(mlp(), loss_fn)


def opening(path: Path) -> Network:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        with contextlib.suppress(Exception), path.open("a") as file:
            file.write("x")
        return classify(m, b)

    return simple(mlp(), loss_fn)


def moving(path: Path) -> Network:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        (path.parent / f"{len(list(path.parent.iterdir()))}").mkdir()
        return classify(m, b)

    return simple(mlp(), loss_fn)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (counted, "counts (a count) within its reach"),
        (drawing, "scales (a list_iterator) within its reach"),
        (loading, "parts (a _SingleProcessDataLoaderIter) within its reach"),
        (noting, "file (a TextIOWrapper) within its reach"),
        (opening, "which cannot be taken back; write to files and sockets after the step"),
        (moving, "which cannot be taken back; write to files and sockets after the step"),
    ],
)
def test_what_cannot_be_taken_back_is_not_tried(make: Any, what: str, tmp_path: Path) -> None:
    """Iterators that go on, files that grow, directories that are there: each step leaves one trace."""
    parts = inspect.signature(make).parameters

    def made(where: Path) -> Network:
        where.mkdir()
        return make(where / "log") if parts else make()

    plain = seeded(lambda: made(tmp_path / "plain"))
    losses = plain_losses(plain)
    mine = seeded(lambda: made(tmp_path / "mine"))
    with rl.TrainStep(
        mine.model, mine.loss_fn, mine.optimizer, machine=own_machine(), device="cpu"
    ) as step:
        assert [step(batch).item() for batch in mine.batches] == losses
        begin = "the step runs as it was written, since a trial could not be taken back: wanted a step that"
        assert step.notes[0].startswith(begin)
        assert what in step.notes[0]
        assert step.plan.execution == "eager"
        with pytest.raises(SideEffectError, match="wanted a step that can be run again"):
            step.verdict()
    assert_equal(plain.model, mine.model)
    for network in (plain, mine):
        getattr(network.loss_fn, "close", bool)()
    traces = [
        sorted(
            (path.name, path.is_file() and path.read_text()) for path in (tmp_path / name).iterdir()
        )
        for name in ("plain", "mine")
    ]
    assert traces[0] == traces[1]
    assert bool(traces[0]) == bool(parts)


class Trainer:
    """Holds the loader that it draws from beside the loss that it computes."""

    def __init__(self) -> None:
        self.batches = iter(DataLoader(torch.randn(20, 6), 2))
        self.log = io.StringIO()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scaled(classify(model, batch))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * 2.0

    def train(self) -> None:
        self.log.write(str(next(self.batches)))


class Drawing(Trainer):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss * next(self.batches).mean()


@pytest.mark.parametrize(("kind", "found"), [(Trainer, []), (Drawing, ["batches"])])
def test_what_no_code_of_the_step_names_does_not_count(kind: Any, found: list[str]) -> None:
    """The methods that the loss calls count, and those that override them."""
    network = simple(mlp())
    named = streams(network.model, kind().loss, network.optimizer, network.batches[0])
    assert [text.partition(" ")[0] for text in named] == found


def test_caches_of_libraries_are_no_side_effects(tmp_path: Path) -> None:
    """What a compiler writes while the step runs, or an import, does not end the choice."""
    (tmp_path / "fresh_module.py").write_text("SCALE = 2.0\n")

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        sys.path.insert(0, str(tmp_path))
        try:
            return classify(m, b) * importlib.import_module("fresh_module").SCALE
        finally:
            sys.path.remove(str(tmp_path))

    network = simple(mlp(), loss_fn)
    with (
        mock.patch.object(sys, "dont_write_bytecode", False),
        rl.TrainStep(
            network.model, network.loss_fn, network.optimizer, machine=own_machine(), device="cpu"
        ) as step,
    ):
        step(network.batches[0])
        assert step.workload is not None
    assert (tmp_path / "__pycache__").is_dir()


@pytest.mark.parametrize("is_installed", [True, False])
def test_whose_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """Packages that pip put into any folder write on their own account, a user's own folder does not."""
    name = f"writer_{is_installed}".lower()
    (tmp_path / f"{name}.py").write_text("def write(path): path.write_text('')\n")
    if is_installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    write, out = importlib.import_module(name).write, tmp_path / "out"
    refused = contextlib.nullcontext() if is_installed else pytest.raises(SideEffectError)
    with refused, refusing_writes():
        write(out)
    assert out.exists() is is_installed


def train_adversaries(first: Any, second: Any) -> list[float]:
    """Ten rounds of two steps over shared networks."""
    torch.manual_seed(1)
    losses = []
    for _ in range(10):
        real, noise = torch.randn(4, 6), torch.randn(4, 3)
        losses.append(first((real, noise)).item())
        losses.append(second((real, noise)).item())
    return losses


def adversaries() -> tuple[Any, ...]:
    """Two networks, the losses of each against the other, and their optimizers."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.1)), nn.Linear(6, 1)

    def judged(m: nn.Module, b: Any) -> Tensor:
        return F.softplus(-m(b[0])).mean() + F.softplus(m(maker(b[1]).detach())).mean()

    def made(m: nn.Module, b: Any) -> Tensor:
        return F.softplus(-judge(m(b[1]))).mean()

    return maker, judge, made, judged, adam(maker), adam(judge)


def test_adversaries_train_as_the_plain_loop() -> None:
    """Each of two steps reads the other's network, and leaves in it the gradients that a plain step leaves."""
    maker, judge, made, judged, makers, judges = adversaries()

    def by_hand(model: nn.Module, loss_fn: Any, optimizer: Any) -> Callable[[Any], Tensor]:
        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            return loss

        return step

    losses = train_adversaries(by_hand(judge, judged, judges), by_hand(maker, made, makers))
    others = adversaries()
    machine = own_machine()
    with (
        rl.TrainStep(others[0], others[2], others[4], machine=machine, device="cpu") as maker_step,
        rl.TrainStep(others[1], others[3], others[5], machine=machine, device="cpu") as judge_step,
    ):
        assert train_adversaries(judge_step, maker_step) == losses
        assert maker_step.workload is not None
        assert "requires grad and is not in that model" in maker_step.workload.notes[0]
    assert_equal(maker, others[0])
    assert_equal(judge, others[1])


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_routed", [False, True])
def test_a_distributed_model_trains_as_the_plain_loop(is_routed: bool) -> None:
    """Traced without its process group, or recorded without sending anything."""

    def make() -> Network:
        inner = nn.Sequential(Experts() if is_routed else mlp(), nn.BatchNorm1d(5))
        model = DistributedDataParallel(inner, find_unused_parameters=is_routed)
        return Network(model, classify, adam(model), many(rows))

    plain = seeded(make)
    losses = plain_losses(plain)
    mine = seeded(make)
    with rl.TrainStep(
        mine.model, mine.loss_fn, mine.optimizer, machine=own_machine(), device="cpu"
    ) as step:
        assert [step(batch).item() for batch in mine.batches] == losses
        assert step.workload is not None
        assert {op.name.split(".")[0] for op in step.workload.ops} == {"aten"}
        assert any(note.startswith(RECORDED) for note in step.workload.notes) == is_routed
        assert step.workload.ready_order[0] == "module.1.weight"
    assert_equal(plain.model, mine.model)


def test_a_batch_may_be_nothing() -> None:
    """What is trained is the input itself, so the loss needs no other."""

    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pixels = nn.Parameter(torch.ones(1, 3, 4, 4))

        def forward(self) -> Tensor:
            return self.pixels

    model = Picture()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with rl.TrainStep(
        model, lambda m, _: m().square().sum() / 2, optimizer, machine=own_machine(), device="cpu"
    ) as step:
        assert [step(None).item() for _ in range(3)] == [24.0, 6.0, 1.5]
