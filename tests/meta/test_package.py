"""The package as a whole: what importing it costs, what it exports, and where torch may live."""

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline as rl

PACKAGE = Path(rl.__file__).parent
TORCH_FREE = (
    "cli.command",
    "cli.main",
    "cli.report",
    "cli.verify",
    "codec",
    "errors",
    "execution",
    "history",
    "laws",
    "machine",
    "plan",
    "planner",
    "reporting",
    "simulator",
    "synchronisation",
    "timeline",
    "units",
    "verdict",
    "workload",
)
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "tools"}


def run_python(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, check=True
    )


def modules_of(name: str) -> list[str]:
    """A module of the package and all modules below it, by full name."""
    folder = PACKAGE / name
    if not folder.is_dir():
        return [f"ridgeline.{name}"]
    below = pkgutil.walk_packages([str(folder)], prefix=f"ridgeline.{name}.")
    return [f"ridgeline.{name}", *(module.name for module in below)]


def import_us(module: str) -> int:
    """Microseconds that importing a module takes with everything below it, as Python counts them."""
    report = run_python(f"import {module}", "-X", "importtime").stderr
    rows = [line.removeprefix("import time:").split("|") for line in report.splitlines()]
    totals = {row[2].strip(): row[1] for row in rows if len(row) == 3}
    return int(totals[module])


def test_import_is_light() -> None:
    """`import ridgeline` imports neither torch nor any other heavy package."""
    loaded = json.loads(
        run_python("import ridgeline, sys, json; print(json.dumps(list(sys.modules)))").stdout
    )
    heavy = {
        *("torch", "numpy", "plotly", "rich", "psutil", "sklearn", "pynvml", "safetensors"),
        "cloudpickle",
    }
    assert heavy.isdisjoint(loaded)


def test_a_server_imports_nothing_that_draws() -> None:
    """Nor what searches or simulates plans: a job may start many, and one in the place of one that died."""
    program = (
        "import json, sys; from ridgeline.cli.main import make_parser; make_parser('kvserver'); "
        "print(json.dumps(list(sys.modules)))"
    )
    loaded = {".".join(name.split(".")[:2]) for name in json.loads(run_python(program).stdout)}
    assert "ridgeline.cli" in loaded
    assert loaded.isdisjoint({"rich", "torch", "ridgeline.planner", "ridgeline.simulator"})


def test_import_is_quick() -> None:
    """`import ridgeline` takes less than a fifth of what `import torch` takes, whoever else uses the cores."""
    assert min(import_us("ridgeline") for _ in range(3)) < import_us("torch") / 5


def test_public_names_resolve() -> None:
    """Every name in `__all__` is there."""
    missing = [name for name in rl.__all__ if getattr(rl, name, None) is None]
    assert missing == []


def test_public_names_lead_to_ridgeline() -> None:
    """What is exported is Ridgeline's own, under its own name, and nothing that it only imports."""
    for name in set(rl.__all__) - {"__version__"}:
        value = getattr(rl, name)
        home = value.__name__ if name in ("kvstore", "laws", "tasks") else value.__module__
        assert home.startswith("ridgeline."), name
        assert value.__name__.rpartition(".")[2] == name


def test_public_names_are_typed() -> None:
    """What is exported at run time and what type checkers see are the same names."""
    tree = ast.parse(Path(rl.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in ast.walk(blocks[0]) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname for node in imports for alias in node.names}
    assert seen == set(rl.__all__) - {"__version__"}


def test_unknown_name() -> None:
    """A name that is not public is an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match=r"^module 'ridgeline' has no attribute 'nothing'$"):
        rl.nothing  # noqa: B018 - the access is the test


def test_dir_lists_public_names() -> None:
    """Completion offers names before their first use."""
    assert set(rl.__all__) <= set(dir(rl))


def test_torch_stays_out() -> None:
    """The nouns, the laws, the planner, the simulator, the report and the command line they need load no torch."""
    names = [module for name in TORCH_FREE for module in modules_of(name)]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_names_say_something() -> None:
    """No module or package has a name that says nothing about what is in it."""
    vague = [path for path in PACKAGE.rglob("*") if path.stem in VAGUE_NAMES]
    assert vague == []


def test_versions_agree() -> None:
    """The version is told in one place."""
    from importlib.metadata import version

    assert rl.__version__ == version("ridgeline")
