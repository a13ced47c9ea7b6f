"""The experiment `hybrid`: who takes part, on which models, and results that can be read again."""

from typing import Any

import pytest
import torch
from rows import row_of
from tiny_cases import contest, tiny

from made_host import HOST
from printed import as_text
from ridgeline.errors import TaskError
from ridgeline.experiments.hybrid.calls import call_contenders
from ridgeline.experiments.hybrid.cases import MODELS, HybridCase, cases, left_out
from ridgeline.experiments.hybrid.experiment import run
from ridgeline.experiments.hybrid.result import CaseResult, HybridExperiment, HybridRow
from ridgeline.experiments.hybrid.steps import step_contenders
from ridgeline.experiments.hybrid.text import experiment_text
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.ways.result import LowerBound
from ridgeline.machine import Quantity


@pytest.mark.parametrize("purpose", ["callable", "step"])
def test_contenders(purpose: str) -> None:
    """The peers are there, and every mode that a device offers, with `auto`."""
    make = call_contenders if purpose == "callable" else step_contenders
    names = [contender.name for contender in make(tiny(purpose))]
    assert {"eager", "torch.jit.script", "torch.compile", "reduce-overhead"} < set(names)
    assert {"ridgeline eager", "ridgeline compiled", "ridgeline packaged", "ridgeline auto"} < set(
        names
    )
    assert len(set(names)) == len(names)
    on_gpu = [contender.name for contender in make(tiny(purpose, device="cuda"))]
    assert {"ridgeline graph", "ridgeline compiled+graph"} < set(on_gpu)
    assert ("bare graph replay" in on_gpu) is (purpose == "callable")
    assert ("torch.compile + fused" in on_gpu) is (purpose == "step")


@pytest.mark.parametrize("purpose", ["callable", "step"])
def test_real_contenders(purpose: str) -> None:
    """Contenders that need no compiler run, with the same results."""
    case = tiny(purpose)
    found = call_contenders(case) if purpose == "callable" else step_contenders(case)
    chosen = [contender for contender in found if not contender.compilations]
    result = contest(case, *chosen)
    assert {row.status for row in result.rows} == {"measured"}
    assert max(row.difference or 0.0 for row in result.rows) < 1e-5


def test_cases() -> None:
    """Every model is called and trained; the quick ones are fewer; a GPU gets the sizes of the seeds."""
    on_cpu = [(case.model, case.purpose) for case in cases("cpu", quick=False)]
    assert on_cpu == [(model, purpose) for model in MODELS for purpose in ("callable", "step")]
    assert len(cases("cpu", quick=True)) == 3
    assert [case.model for case in cases("cpu", quick=False, only=("gpt2",))] == ["gpt2", "gpt2"]
    titles = [case.title for case in cases("cuda", quick=False)]
    assert "28x28x1, batch 1024, SGD with momentum, bf16, channels_last" in titles
    assert "124M, 8 x 1024 tokens, AdamW, bf16" in titles
    assert left_out("cpu", quick=True) == (
        "gpt2: left out of the quick experiment on a CPU, where it compiles for minutes",
    )
    assert left_out("cpu", quick=True, only=("mlp",)) == left_out("cuda", quick=True) == ()


@pytest.mark.parametrize("case", cases("cpu", quick=False), ids=lambda c: f"{c.model}-{c.purpose}")
def test_cases_run(case: HybridCase) -> None:
    """The model of a case takes its batches, and its loss is a scalar that trains."""
    model, batch = case.model_on_device(), case.batches()[0]
    if case.purpose == "callable":
        assert not model.training
        with torch.no_grad():
            assert model(*batch).isfinite().all()
        return
    step = PlainStep(model, model, case.loss_fn, case.make_optimizer(model))
    before = [p.detach().clone() for p in model.parameters()]
    assert step(batch).dim() == 0
    assert all(
        not torch.equal(a, b)
        for a, b in zip(before, model.parameters(), strict=True)
        if b.dim() >= 2
    )


def test_unknown_models() -> None:
    """A model that is not there is named, with those that are."""
    for only, got in ((("mlp", "vgg"), "vgg"), ((), "none")):
        with pytest.raises(TaskError) as caught:
            run(only=only)
        assert str(caught.value) == (
            f"wanted models out of mlp, resnet18, gpt2, got {got} for the experiment hybrid; name some of those"
        )


def test_unknown_contenders() -> None:
    """One that no chosen case has is named before anything is measured, with those that there are."""
    with pytest.raises(TaskError) as caught:
        run(only=("mlp",), device="cpu", contenders=("torch.compile", "compiled+graph"))
    assert str(caught.value).startswith("wanted contenders out of eager, torch.jit.script, ")
    assert str(caught.value).endswith(
        ", ridgeline step-graph, got compiled+graph; name some of those"
    )


def test_whole_experiment(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time to compile the experiment is its eager rows, on this machine; saved, it reads back equal."""
    lines: list[str] = []
    experiment = run(quick=True, only=("mlp",), limit_s=2.0, device="cpu", progress=lines.append)
    assert [case.purpose for case in experiment.cases] == ["callable", "step"]
    assert all(row_of(case, "eager").seconds is not None for case in experiment.cases)
    assert all(row_of(case, "torch.compile").status == "skipped" for case in experiment.cases)
    assert lines[0] == "mlp inference: preparing eager"
    assert HybridExperiment.load(experiment.save(tmp_path / "hybrid.json")) == experiment
    assert "mlp training" in as_text(experiment_text(experiment))


def quantity(value: float, unit: str = "s") -> Quantity:
    return Quantity.measured([value * 0.9, value, value * 1.1], unit)


def measured(name: str, kind: str, seconds: float, eager_s: float, **more: Any) -> HybridRow:
    return HybridRow(
        name=name,
        kind=kind,
        seconds=quantity(seconds),
        prepare_s=more.pop("prepare_s", 0.5),
        difference=more.pop("difference", 0.0),
        times_faster={"eager": quantity(eager_s / seconds, "x")},
        **more,
    )


def test_text() -> None:
    """The table: peers, ours, the bound; times, ratios, break-even, difference, reasons; then what it means."""
    case = CaseResult(
        model="mlp",
        purpose="callable",
        title="512-256-128-2, batch 1",
        rows=(
            measured("eager", "peer", 100e-6, 100e-6),
            measured("bare graph replay", "bound", 10e-6, 100e-6),
            measured("ridgeline graph", "ridgeline", 20e-6, 100e-6, break_even=6250, is_warm=True),
            measured(
                "ridgeline auto",
                "ridgeline",
                25e-6,
                100e-6,
                prepare_s=12.0,
                difference=1.2e-7,
                chosen="packaged",
            ),
            HybridRow(
                name="ridgeline script", kind="ridgeline", status="failed", reason="no source"
            ),
            HybridRow(name="torch.compile", kind="peer", status="skipped", reason="no time left"),
            HybridRow(name="reduce-overhead", kind="peer", status="skipped", reason="no time left"),
            measured("ridgeline static", "ridgeline", 5e-6, 100e-6, overwrites=True),
        ),
        calls=1000,
        turns=15,
        limit=LowerBound(seconds=4e-6, reason="328 kFLOP"),
    )
    experiment = HybridExperiment(
        host=HOST,
        devices=(),
        versions={"torch": "2.13.0"},
        is_quick=True,
        limit_s=100.0,
        cases=(case,),
        notes=("gpt2: left out",),
    )
    text = as_text(experiment_text(experiment))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    assert lines[0] == "Hybrid execution Processor, 2 cores; torch 2.13.0"
    assert lines[1] == "mlp inference 512-256-128-2, batch 1; 15 turns of 1000 calls"
    assert lines[2] == "Per call Quartiles x eager Ready after Break-even Difference"
    assert lines[4:] == [
        "eager 100 us 95.0 us .. 105 us 1.00 500 ms 0",
        "ridgeline graph 20.0 us 19.0 us .. 21.0 us 5.00 500 ms 6250 0 warm cache",
        "ridgeline auto 25.0 us 23.8 us .. 26.3 us 4.00 12.0 s 1.2e-07 chose packaged",
        "ridgeline script failed no source",
        "ridgeline static 5.00 us 4.75 us .. 5.25 us 20.00 500 ms 0 a later call overwrites the output",
        "bare graph replay 10.0 us 9.50 us .. 10.5 us 10.00 500 ms 0",
        "warm cache: break-even counts the seconds of the first that compiled, if those were more",
        "ridgeline graph: 5.00 times eager, 5.00 times the fastest peer (eager)",
        "50.0 % of bare graph replay, which copies no inputs and keeps no outputs",
        "20.0 % of the limit, 4.00 us: 328 kFLOP",
        "! no time left: torch.compile, reduce-overhead",
        "! gpt2: left out",
    ]
