"""The documentation holds: its programs compile and run, its commands exist, its links lead somewhere."""

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ridgeline as rl
from warm import WARM

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^(<!-- run -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PROMISED = (ROOT / "docs/images/report.png",)
"""Pictures that are made from a run, after the code that they show."""


class Block(NamedTuple):
    """A fenced block of a page; `runs` tells those that are whole programs."""

    where: str
    language: str
    text: str
    runs: bool


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in FENCE.finditer(content):
            line = content.count("\n", 0, match.start()) + 1
            where = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(where, match[2], match[3], match[1] is not None))
    return [block for block in found if block.language == language]


def commands() -> list[tuple[str, list[str]]]:
    """Every `ridgeline` command of the pages: where it stands, and its words after the name."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["ridgeline"]:
                found.append((f"{block.where}: {line}", words[1:]))
    return found


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.where)
def test_python_compiles(block: Block) -> None:
    """Every Python block is valid Python."""
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.where)
def test_imports_exist(block: Block) -> None:
    """Every name that a Python block imports of the package is there."""
    for statement in ast.walk(ast.parse(block.text)):
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            if statement.module.partition(".")[0] != "ridgeline":
                continue
            module = importlib.import_module(statement.module)
            missing = [name.name for name in statement.names if not hasattr(module, name.name)]
            assert not missing, f"{statement.module} has no {missing}"


@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if block.runs], ids=lambda block: block.where
)
def test_program_runs(block: Block, tmp_path: Path) -> None:
    """Every block that is marked as a program runs as it stands, and prints something."""
    program = tmp_path / "program.py"
    program.write_text(block.text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        WARM.command(program, environment=environment),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@contextlib.contextmanager
def example_file(words: str, path: Path) -> Iterator[Path]:
    """The one Python block with these words as a file; what reading it adds to `sys.path` goes again."""
    (example,) = (block for block in blocks("python") if words in block.text)
    path.write_text(example.text)
    before = list(sys.path)
    yield path
    sys.path[:] = before


def test_plan_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's plan written by hand is saved and read back as it says."""
    monkeypatch.chdir(tmp_path)
    examples = [block for block in blocks("python") if "rl.Plan.load" in block.text]
    assert len(examples) == 1
    exec(compile(examples[0].text, examples[0].where, "exec"), {})
    assert (tmp_path / "plan.json").is_file()


def test_task_example(tmp_path: Path) -> None:
    """The guide's task file loads, and its loss and metric take a batch of its data."""
    from torch.utils.data import default_collate

    from ridgeline.tasks import load_task

    with example_file("def task(", tmp_path / "my_task.py") as path:
        task = load_task(path, data_dir=tmp_path)
    batch = default_collate([task.train_data[index] for index in range(4)])
    model = task.model()
    assert task.loss_fn(model, batch).dim() == 0
    assert task.metric(model, batch).dim() == 0


def test_networks_example(tmp_path: Path) -> None:
    """The guide's file of networks goes into the catalog, and its network trains."""
    from ridgeline.experiments.networks.catalog import networks_in

    with example_file("NETWORKS = (", tmp_path / "mine.py") as path:
        (network,) = networks_in(str(path))
    setup = network.build("cpu", "cpu")
    first = setup.loss_fn(setup.model, setup.batch)
    first.backward()
    setup.optimizer.step()
    assert setup.loss_fn(setup.model, setup.batch) < first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_are_public(page: Path) -> None:
    """Every `rl.NAME` of a page is a public name of the package."""
    names = set(re.findall(r"(?<![\w.])rl\.(\w+)", page.read_text()))
    assert names <= set(rl.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link leads to a file, and its fragment to a heading there."""
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists() or target in PROMISED, link
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings
            ]
            assert fragment in anchors, link


@pytest.mark.parametrize(("where", "words"), commands(), ids=[where for where, _ in commands()])
def test_commands_exist(where: str, words: list[str]) -> None:
    """Every command of the pages is a verb of the command line, and its options are in that verb's help."""
    from ridgeline.cli.main import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([words[0], "--help"])
    assert words[0] in text.getvalue(), where
    for word in words[1:]:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text.getvalue()), where
