"""What the networks experiment says: summary, tables on the terminal, and the page of the documentation."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec
import pytest

from printed import as_text
from ridgeline.experiments.networks.result import (
    AUTO,
    Check,
    FormRow,
    Headline,
    NetworkResult,
    NetworksExperiment,
    Starts,
    TriedPlan,
)
from ridgeline.experiments.networks.results.page import merged, page
from ridgeline.experiments.networks.results.summary import (
    errors_of,
    over_hand,
    over_plain,
    summarise,
)
from ridgeline.experiments.networks.results.text import experiment_text, network_line
from ridgeline.experiments.result_files import model_of
from ridgeline.machine import Device, Quantity
from ridgeline.planner.trials.trial_loop import NOT_TRIED
from strategies import make_host

ROOT = Path(__file__).parents[2]


def milliseconds(value: float) -> Quantity:
    return Quantity.measured([value * 1e-3], "s")


def row(form: str, kind: str, time_ms: float, auto_ms: float = 20.0) -> FormRow:
    over = Quantity.measured([auto_ms / time_ms], "x")
    return FormRow(form=form, kind=kind, step_s=milliseconds(time_ms), auto_over=over)


RESNET = NetworkResult(
    network="resnet50",
    kind="classifier",
    title="batch 128",
    forms=(
        row(AUTO, "ridgeline", 20.0),
        row("eager", "plain", 54.5),
        row("torch.compile", "plain", 25.0),
        row("eager, channels-last", "plain", 40.0),
        row("graph of torch.compile, channels-last", "by hand", 19.8),
        FormRow(form="graph of eager", kind="by hand", reason="left out of the turns"),
    ),
    headline=Headline(
        plan="rl.Plan(execution='compiled+graph')",
        execution="compiled+graph",
        before_s=24e-3,
        expected_s=20.2e-3,
        trained_s=milliseconds(20.0),
    ),
    tried=(
        TriedPlan(plan="1 worker, graph", execution="graph", before_s=50e-3, measured_s=48e-3),
        TriedPlan(
            plan="1 worker, compiled+graph",
            execution="compiled+graph",
            before_s=24e-3,
            after_s=21e-3,
            measured_s=20e-3,
        ),
        TriedPlan(
            plan="1 worker, step-graph",
            execution="step-graph",
            before_s=25e-3,
            failure="[too] slow; take another one:\n- of these",
        ),
        TriedPlan(
            plan="1 worker, packaged",
            execution="packaged",
            before_s=25e-3,
            failure=f"{NOT_TRIED} 1 worker, step-graph failed: [too] slow",
        ),
    ),
    starts=Starts(plan_s=50.0, plan_again_s=7.5, compile_s=42.0, compile_again_s=6.1),
    check=Check(
        plan="rl.Plan(execution='graph')",
        execution="graph",
        losses=1e-7,
        parameters=2e-7,
        sensitivity=3e-7,
        tolerance=1e-3,
        is_equal=True,
        is_exact=False,
    ),
    seconds=200.0,
)
MLP = NetworkResult(
    network="mlp",
    kind="perceptron",
    title="batch 4096",
    forms=(
        FormRow(form=AUTO, kind="ridgeline", reason="RuntimeError: CUDA [error] | assert"),
        FormRow(form="eager", kind="plain", step_s=milliseconds(1.0)),
    ),
    notes=("contest: ended with signal 6",),
)
ABSENT = NetworkResult(
    network="swin_t", kind="vision transformer", title="batch 64", reason="needs torchvision"
)
EXPERIMENT = NetworksExperiment(
    date="2026-11-22",
    host=make_host(),
    devices=(Device(kind="cuda", index=0, name="NVIDIA H200", memory_bytes=1 << 37),),
    versions={"ridgeline": "0.1.0", "torch": "2.11.0"},
    device="cuda",
    scale="gpu",
    allow=("bf16",),
    turns=9,
    steps=20,
    networks=(RESNET, MLP, ABSENT),
)


def driver() -> ModuleType:
    """`benchmarks/networks.py` as a module."""
    spec = importlib.util.spec_from_file_location("networks", ROOT / "benchmarks/networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_read_again(tmp_path: Path) -> None:
    """What was saved is what is loaded."""
    assert NetworksExperiment.load(EXPERIMENT.save(tmp_path / "n.json")) == EXPERIMENT


def test_a_network_that_nobody_has_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the command line: no traceback, and status 1."""
    program = driver()
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["networks.py", "--networks", "nobodys", "--device", "cpu"])
    assert program.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("networks.py: wanted networks out of ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("has_measured", [True, False])
def test_an_interrupt_says_what_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_measured: bool,
) -> None:
    """No traceback, the exit status of shells, and how to go on."""
    program = driver()
    path = tmp_path / "n.json"

    def interrupted(**given: Any) -> NetworksExperiment:
        if has_measured:
            given["publish"](EXPERIMENT)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run", interrupted)
    arguments = program.parser().parse_args(["--out", str(path)])
    assert program.measure(arguments) == 130
    said = f"what was measured is in {path}; --continue --out {path} goes on"
    assert capsys.readouterr().err == (
        f"networks.py: interrupted; {said if has_measured else 'nothing is kept'}\n"
    )
    assert path.exists() is has_measured


def test_a_network_whose_turns_were_cut_has_not_failed() -> None:
    """The plan that was chosen is told with what it took, and why there were no turns."""
    ended = "no turns: it was ended after 200 s while running the first step of torch.compile"
    cut = FormRow(form=AUTO, kind="ridgeline", first_s=1.0, reason=ended)
    told = msgspec.structs.replace(RESNET.headline, trained_s=None)
    result = msgspec.structs.replace(RESNET, forms=(cut,), headline=told)
    assert network_line(result) == (
        f"resnet50: auto chose compiled+graph, 20.2 ms in its trial; {ended}"
    )
    alone = msgspec.structs.replace(result, headline=RESNET.headline)
    assert network_line(alone) == f"resnet50: auto chose compiled+graph, 20.0 ms alone; {ended}"
    found = summarise([result])
    assert (found.timed, found.failed, found.cut) == (0, (), ("resnet50",))
    text = as_text(
        experiment_text(msgspec.structs.replace(EXPERIMENT, networks=(result,))), width=200
    )
    assert "auto chose a plan, and no turns were left, on: resnet50" in text
    assert "failed on" not in text
    assert f"resnet50: auto: {ended}" in text
    assert "no turns were left, on | resnet50" in page(
        [msgspec.structs.replace(EXPERIMENT, networks=(result,))]
    )


@pytest.mark.parametrize(
    ("label", "form", "allow", "is_same"),
    [
        ("1 worker, eager, bf16, fused optimizer", "eager", ("bf16",), True),
        ("1 worker x 2 threads, eager", "eager", (), True),
        ("1 worker, eager, bf16, channels_last", "eager, channels-last", ("bf16",), True),
        ("1 worker, eager, bf16, channels_last", "eager", ("bf16",), False),
        ("1 worker, eager, fused optimizer", "eager", ("bf16",), False),
        ("4 workers, eager, bf16, buckets 25.0 MiB", "eager", ("bf16",), False),
        ("1 worker, graph, bf16", "eager", ("bf16",), False),
    ],
)
def test_what_the_machine_does_itself_is_told(
    label: str, form: str, allow: tuple[str, ...], is_same: bool
) -> None:
    """By an eager step that was tried, and timed again in the turns."""
    execution: Any = label.split(", ")[1]
    tried = TriedPlan(plan=label, execution=execution, before_s=1e-3, measured_s=1.2e-3)
    row = FormRow(form=form, kind="plain", step_s=milliseconds(1.0))
    result = msgspec.structs.replace(RESNET, tried=(tried,), forms=(row,))
    found = summarise([result], allow).drift
    assert (found is not None) == is_same
    experiment = msgspec.structs.replace(EXPERIMENT, networks=(result,), allow=allow)
    told = "an eager step, from its trial to its turns: median 20.0 %, 90th percentile 20.0 % of 1"
    assert (told in " ".join(as_text(experiment_text(experiment), width=200).split())) == is_same
    assert (
        "| an eager step, from its trial to its turns | median" in page([experiment])
    ) == is_same


def test_summary() -> None:
    """Ratios against the best of each kind; errors by family, before over tried plans, after of headlines."""
    found = summarise(EXPERIMENT.networks)
    assert (found.timed, found.failed) == (1, ("mlp",))
    assert over_plain(RESNET) == pytest.approx(0.8)
    assert over_hand(RESNET) == pytest.approx(20.0 / 19.8)
    assert found.worst_over_plain == pytest.approx((0.8, "resnet50"))
    assert found.over_compile == pytest.approx(1.25)
    assert found.before["eager and graph"].median == pytest.approx(50 / 48 - 1)
    assert found.before["compiled"].median == pytest.approx(0.2)
    assert set(found.after) == {"compiled"}
    assert found.after["compiled"] == pytest.approx((1, 0.01, 0.01))
    assert (found.checked, found.unequal) == (1, ())
    assert found.first_start == pytest.approx((1, 50.0 - 1.5 * 42.0, 50.0 - 1.5 * 42.0, "resnet50"))
    assert found.second_start == pytest.approx((1, 1.4, 1.4, "resnet50"))
    nothing = summarise(())
    assert (nothing.first_start, nothing.second_start) == (None, None)
    assert (nothing.worst_over_plain, nothing.over_compile, nothing.before) == (None, None, {})


def test_percentiles_are_errors_that_occurred() -> None:
    """Of ten, the ninth is the 90th percentile; the sign does not count."""
    figures = [(-1) ** k * k / 100 for k in range(1, 11)]
    assert errors_of(figures) == (10, 0.05, 0.09)
    assert errors_of([]) is None


def test_lines_of_progress() -> None:
    """A network in a line, as soon as it is done."""
    assert network_line(RESNET) == (
        "resnet50: auto 20.0 ms, 0.80 x torch.compile (25.0), "
        "1.01 x graph of torch.compile, channels-last (19.8), in 200 s"
    )
    assert network_line(MLP) == "mlp: auto failed: RuntimeError: CUDA [error] | assert"
    assert network_line(ABSENT) == "swin_t: needs torchvision"


def test_terminal() -> None:
    """The tables and the lines below them, as they are printed."""
    wanted = (Path(__file__).parent / "networks_text.golden").read_text()
    got = as_text(experiment_text(EXPERIMENT), width=200)
    assert "\n".join(line.rstrip() for line in got.splitlines()) == wanted.rstrip("\n")


def test_page(tmp_path: Path) -> None:
    """The page that the driver writes from a file of results."""
    path = EXPERIMENT.save(tmp_path / "networks.json")
    driver().write_docs([path], tmp_path / "page.md")
    wanted = (Path(__file__).parent / "networks_page.golden.md").read_text()
    assert (tmp_path / "page.md").read_text() == wanted


def test_later_results_replace_earlier() -> None:
    """Of one set-up; what had no time is no result; another set-up is a section of its own."""
    again = msgspec.structs.replace(RESNET, seconds=1.0)
    skipped = msgspec.structs.replace(MLP, reason="not begun within 3 s")
    later = msgspec.structs.replace(EXPERIMENT, networks=(again, skipped), date="2026-11-23")
    [joined] = merged([EXPERIMENT, later])
    assert joined.networks == (again, MLP, ABSENT)
    assert joined.date == "2026-11-23"
    bare = msgspec.structs.replace(RESNET, forms=(), headline=None, tried=())
    checks = msgspec.structs.replace(EXPERIMENT, networks=(bare,))
    untested = msgspec.structs.replace(RESNET, check=None)
    times = msgspec.structs.replace(EXPERIMENT, networks=(untested, MLP))
    assert merged([times, checks])[0].networks[0] == RESNET, "a check joins earlier times"
    assert merged([checks, times])[0].networks[0] == RESNET, "times join an earlier check"
    cut = msgspec.structs.replace(untested, reason="ended before it was done: check")
    ended = msgspec.structs.replace(EXPERIMENT, networks=(cut,))
    assert merged([checks, ended])[0].networks[0] == RESNET, "its turns were over"
    long_run = msgspec.structs.replace(later, run_steps=1000)
    assert len(merged([EXPERIMENT, long_run])) == 2, "what compiles is chosen by another rule there"
    assert "; steps=1000 to be trained." in page([long_run])
    alone = msgspec.structs.replace(RESNET, starts=Starts(plan_s=40.0))
    unhurried = msgspec.structs.replace(EXPERIMENT, networks=(alone,))
    assert merged([times, unhurried])[0].networks[0] == RESNET, (
        "starts that nothing was timed beside"
    )
    plans = msgspec.structs.replace(RESNET, forms=(), check=None)
    slower = msgspec.structs.replace(plans, tried=plans.tried[:1])
    earlier, later = (
        msgspec.structs.replace(EXPERIMENT, networks=(row,)) for row in (plans, slower)
    )
    assert merged([earlier, later])[0].networks[0] == slower, "plans replace plans"
    four = msgspec.structs.replace(EXPERIMENT, workers=4)
    assert [one.hardware for one in merged([EXPERIMENT, four])] == [
        "1 x NVIDIA H200",
        "4 x NVIDIA H200",
    ]
    assert page([EXPERIMENT, four]).count("\n## ") == 2


@pytest.mark.parametrize("scale", ["gpu", "cpu"])
def test_the_page_says_where_networks_are_small(scale: Literal["gpu", "cpu"]) -> None:
    """Their titles have the sizes that they have on GPUs."""
    text = page([msgspec.structs.replace(EXPERIMENT, scale=scale)])
    assert ("The networks are small versions: " in text) is (scale == "cpu")


def test_file_names() -> None:
    """What, on which hardware, when."""
    assert driver().file_name(EXPERIMENT) == "networks_1xH200_20261122.json"
    h100 = "NVIDIA H100 80GB HBM3"
    names = (h100, "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA L40S")
    assert [*map(model_of, names)] == ["H100", "A100-SXM4-80GB", "4090", "L40S"]
    cpu = msgspec.structs.replace(EXPERIMENT, device="cpu", devices=())
    assert driver().file_name(cpu) == "networks_2-core-CPU_20261122.json"


def test_the_page_is_that_of_the_results() -> None:
    """docs/accuracy.md says what the committed results say."""
    files = sorted((ROOT / "benchmarks/results").glob("networks_*.json"))
    target = ROOT / "docs/accuracy.md"
    if not files:
        assert not target.exists(), "a page without results"
        return
    found = sorted((NetworksExperiment.load(file) for file in files), key=lambda one: one.date)
    assert target.read_text() == page(found)
