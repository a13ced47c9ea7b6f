"""A trial that compiles brings what the compiler made, and a step is predicted from that."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.compiled_program import product_sizes
from ridgeline.decision.memory import remembered
from ridgeline.decision.trial import Script, run_trial
from ridgeline.machine import Setting
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.simulator.pricing.dataflow import operator_name
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.workers.world import World
from strategies import make_machine

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
PRODUCT_S = 1.0
"""Far longer than all loops together."""


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """A small network, its optimizer and a batch, with an empty cache of the compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 8))
    yield model, torch.optim.SGD(model.parameters(), 0.1), (torch.rand(64, 16), torch.rand(64, 8))
    torch._dynamo.reset()


def test_a_step_is_predicted_from_what_its_trial_compiled(trained: Any, tmp_path: Path) -> None:
    """Products take as long as the trace's, loops as long as their bytes.

    The trial of an eager plan brings no programs. Remembered choices leave programs out.
    """
    model, optimizer, batch = trained
    workload = rl.trace(model, loss_fn, optimizer, batch)
    products = [op for op in workload.ops if operator_name(op) in ("mm", "addmm")]
    setting = Setting(device="cpu", workers=1, threads=torch.get_num_threads())
    machine = make_machine(settings=[setting], timings={op.key: PRODUCT_S for op in products})

    def trial(plan: Plan) -> Timeline:
        return run_trial(
            make,
            plan,
            Script(model, loss_fn, optimizer),
            [batch],
            ALONE,
            watch=ProgramWatch(),
        )

    def make(plan: Plan) -> PlannedStep:
        return PlannedStep(model, loss_fn, optimizer, plan, device="cpu")

    assert trial(Plan()).programs == ()
    plan = Plan(execution="compiled", threads=setting.threads)
    measured = trial(plan)
    forward, backward = measured.programs
    calls = [*forward.calls, *backward.calls]
    assert sum(product_sizes(k) is not None for k in calls if k.is_library) == len(products) == 5
    predicted = simulate(machine, workload, plan, programs=measured.programs)
    loops_s = sum(k.num_bytes for k in calls if not k.is_library) * 1e-9
    optimizer_s = sum(op.bytes_moved for op in workload.phase("optimizer")) * 1e-9
    assert predicted.step_ns * 1e-9 == pytest.approx(
        5 * PRODUCT_S + loops_s + optimizer_s, rel=1e-6
    )
    ranking = choose(
        machine,
        workload,
        world_size=1,
        fixed={"execution": "compiled", "threads": setting.threads},
        trial=lambda _: measured,
        seconds=1e6,
    )
    assert ranking.best.reading is not None
    assert ranking.best.reading.step_s == predicted.step_ns * 1e-9
    assert remembered.keep(tmp_path, "key", ranking) == ""
    kept = remembered.recall(tmp_path, "key")
    assert kept is not None
    best = kept.ranking.best
    assert best.reading == ranking.best.reading
    assert best.measured is not None
    assert best.measured.programs == ()
