"""`ridgeline bench`: its flags, what it runs, and where the result goes."""

import importlib
import json
import subprocess
import sys

import pytest

from made_host import HOST
from ridgeline.cli.bench import EXPERIMENTS
from ridgeline.experiments.allreduce import sweep
from ridgeline.experiments.hybrid.cases import MODELS
from ridgeline.experiments.hybrid.result import CaseResult, HybridExperiment, HybridRow
from ridgeline.experiments.memory import experiment as memory
from ridgeline.experiments.networks.result import NetworksExperiment
from ridgeline.experiments.sync import steps
from ridgeline.experiments.ways.result import WayCase, WayExperiment, WayRow
from ridgeline.machine import Quantity

EMPTY = HybridExperiment(
    host=HOST,
    devices=(),
    versions={"torch": "2.13.0"},
    is_quick=True,
    limit_s=100.0,
    cases=(
        CaseResult(
            model="mlp",
            purpose="callable",
            title="512-256-128-2",
            rows=(
                HybridRow(
                    name="eager",
                    kind="peer",
                    seconds=Quantity.measured([1e-4, 1e-4], "s"),
                    prepare_s=0.1,
                ),
            ),
        ),
    ),
)

WAYS = WayExperiment(
    name="overlap",
    host=EMPTY.host,
    devices=(),
    versions={"torch": "2.13.0"},
    is_quick=True,
    limit_s=60.0,
    cases=(
        WayCase(
            name="batches",
            title="20 batches",
            rows=(
                WayRow(
                    name="one by one", kind="sequential", seconds=Quantity.measured([1e-3], "s")
                ),
            ),
        ),
    ),
)

NETWORKS = NetworksExperiment(
    date="2026-11-22",
    host=EMPTY.host,
    devices=(),
    versions={"torch": "2.13.0"},
    device="cpu",
    scale="cpu",
    turns=3,
    steps=0,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the experiment is asked for, instead of running it."""
    calls: list[dict[str, object]] = []

    def replace(package: str, result: object) -> None:
        def run(**arguments: object) -> object:
            calls.append({key: value for key, value in arguments.items() if key != "progress"})
            arguments["progress"]("preparing")
            return result

        monkeypatch.setattr(f"ridgeline.experiments.{package}.run", run)

    replace("hybrid", EMPTY)
    for package in ("asynchronous", "parallel", "overlap", "allreduce", "sync"):
        replace(package, WAYS)
    replace("networks", NETWORKS)
    return calls


def test_flags_are_frozen(run) -> None:
    """The verb has exactly these flags, and explains itself."""
    ran = run("bench", "--help")
    assert ran.status == 0
    flags = {word.strip(",]") for word in ran.out.split() if word.lstrip("[").startswith("--")}
    assert {flag.lstrip("[") for flag in flags} == {
        "--help", "--quick", "--rates", "--from", "--only", "--output", "--json", "--quiet",
    }  # fmt: skip
    assert "what compiling costs and when it is earned back" in " ".join(ran.out.split())


def test_it_runs_what_was_asked(run, asked) -> None:
    """Flags reach the experiment; progress goes to stderr, the table to stdout."""
    ran = run("bench", "hybrid", "--quick", "--only", "mlp,gpt2")
    assert (ran.status, ran.err) == (0, "preparing\n")
    assert asked == [{"quick": True, "only": ("mlp", "gpt2")}]
    assert "mlp inference" in ran.out
    assert run("bench", "hybrid", "-q").err == ""
    assert asked[1] == {"quick": False, "only": MODELS}


def test_json_and_file(run, asked, tmp_path) -> None:
    """`--json` prints the value as its file has it; `-o` writes that file."""
    path = tmp_path / "hybrid.json"
    ran = run("bench", "hybrid", "--json", "-q", "-o", path)
    assert json.loads(ran.out)["kind"] == "hybrid-experiment"
    assert HybridExperiment.load(path) == EMPTY


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "the following arguments are required: NAME"),
        (["bench", "hybrids"], "invalid choice: 'hybrids'"),
        (["bench", "hybrid", "--only", "mlp,vgg"], "wanted some of mlp,resnet18,gpt2, got 'vgg'"),
        (
            ["bench", "overlap", "--only", "mlp"],
            "wanted some of results,batches, got 'mlp' for --only",
        ),
        (
            ["bench", "overlap", "--rates", "none"],
            "wanted --rates with sync only, got it with overlap; leave it out",
        ),
        (
            ["bench", "sync", "--from", "mine.py"],
            "wanted --from with networks only, got it with sync; leave it out",
        ),
    ],
)
def test_wrong_usage(run, words: list[str], message: str) -> None:
    """An unknown experiment or model is refused before anything runs."""
    ran = run(*words)
    assert ran.status == 2
    assert message in ran.err


def test_names_agree() -> None:
    """The verb, which imports no torch, knows the parts of every experiment and its package."""
    assert tuple(EXPERIMENTS) == (
        "hybrid", "async", "parallel", "overlap", "memory", "allreduce", "sync", "kvstore", "networks",
    )  # fmt: skip
    assert EXPERIMENTS["hybrid"].parts == MODELS
    assert EXPERIMENTS["allreduce"].parts == sweep.CASES
    assert EXPERIMENTS["memory"].parts == memory.PARTS
    assert EXPERIMENTS["sync"].parts == steps.CASES
    for name in ("async", "parallel", "overlap"):
        home = importlib.import_module(f"ridgeline.experiments.{EXPERIMENTS[name].package}")
        assert EXPERIMENTS[name].parts == home.CASES
        for device in ("cpu", "cuda"):
            for quick in (True, False):
                assert tuple(case.name for case in home.cases(device, quick)) == home.CASES


def test_networks(run, asked) -> None:
    """Kinds reach the experiment of networks, and its tables come back."""
    ran = run("bench", "networks", "--only", "graph,speech", "-q")
    assert ran.status == 0
    assert "networks timed: 0\n" in ran.out
    assert asked == [{"quick": False, "only": ("graph", "speech")}]


def test_networks_of_a_users_file(run, asked) -> None:
    """Its path reaches the experiment, and no kinds that leave its networks out."""
    assert run("bench", "networks", "--from", "mine.py", "-q").status == 0
    assert asked == [{"quick": False, "only": (), "sources": ("mine.py",)}]


def test_rates(run, asked) -> None:
    """They reach the experiment that has links."""
    assert run("bench", "sync", "-q", "--rates", "100mbit, none", "--only", "mlp").status == 0
    assert asked == [{"quick": False, "only": ("mlp",), "rates": ("100mbit", "none")}]


@pytest.mark.parametrize("name", ["async", "parallel", "overlap", "allreduce", "sync"])
def test_other_experiments(run, asked, name: str) -> None:
    """Each experiment is run by its package, with all its parts or those asked for, and shown as a table."""
    first = EXPERIMENTS[name].parts[0]
    ran = run("bench", name, "--quick", "-q")
    assert ran.status == 0
    assert "one by one" in ran.out
    assert json.loads(run("bench", name, "-q", "--json", "--only", first).out)["kind"] == (
        "way-experiment"
    )
    assert asked == [
        {"quick": True, "only": EXPERIMENTS[name].parts},
        {"quick": False, "only": (first,)},
    ]


def test_help_needs_no_torch() -> None:
    """Neither the verb nor the values and text of its result import torch."""
    code = (
        "import sys; from ridgeline.cli.main import main; status = main(['bench', '--help']); "
        "sys.exit(status or ('torch' in sys.modules) * 9)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ran.returncode == 0
