"""`load_task`: names and files that work, and the exact words for those that do not."""

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.errors import DataError, TaskError
from ridgeline.tasks import load_task

WORKING = """
    import torch
    from ridgeline.runtime.training.task import Task

    def task({arguments}):
        data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4))
        return Task(
            name={name},
            model=lambda: torch.nn.Linear(2, 1),
            loss_fn=lambda model, batch: model(batch[0]).mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=data,
            test_data=data,
            metric=lambda model, batch: model(batch[0]).sum(),
            batch_size=4,
        )
"""


@pytest.fixture(autouse=True)
def kept_import_path() -> Iterator[None]:
    """Loading a file makes its directory importable; a test leaves no trace of it."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def write(directory: Path, text: str, name: str = "mine.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def working(directory: Path, *, arguments: str = "", name: str = "'mine'") -> Path:
    return write(directory, WORKING.format(arguments=arguments, name=name))


def refused(name_or_path: str | Path, message: str, *, data_dir: str | None = None) -> TaskError:
    with pytest.raises(TaskError) as caught:
        load_task(name_or_path, data_dir=data_dir)
    assert str(caught.value) == message
    return caught.value


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_built_in(name: str) -> None:
    """A built-in name gives the task of that name with its default batch size."""
    task = load_task(name)
    assert (task.name, task.batch_size) == (name, 64)


def test_batch_size(tmp_path: Path) -> None:
    """The batch size of the caller replaces that of the task, built-in or not."""
    assert load_task("mlp", batch_size=48).batch_size == 48
    assert load_task(working(tmp_path), batch_size=2).batch_size == 2
    assert load_task(working(tmp_path)).batch_size == 4


def test_batch_size_of_zero() -> None:
    """A batch holds at least one sample."""
    with pytest.raises(TaskError) as caught:
        load_task("mlp", batch_size=0)
    assert str(caught.value) == "wanted batch_size >= 1, got 0 for mlp; raise it"


def test_file(tmp_path: Path) -> None:
    """A file gives what its `task` returns."""
    assert load_task(working(tmp_path)).name == "mine"


def test_data_dir_reaches_the_file(tmp_path: Path) -> None:
    """`data_dir` becomes the argument of that name, positional, keyword-only or in **kwargs."""
    for arguments, name in (
        ("data_dir", "data_dir"),
        ("*, data_dir=None", "data_dir"),
        ("**options", "options['data_dir']"),
    ):
        path = working(tmp_path, arguments=arguments, name=name)
        assert load_task(path, data_dir="here").name == "here"


def test_neighbours_are_importable(tmp_path: Path) -> None:
    """A task file imports the modules beside it, as a script does."""
    write(tmp_path, "NAME = 'from the neighbour'", name="ridgeline_test_neighbour.py")
    path = working(tmp_path, name="__import__('ridgeline_test_neighbour').NAME")
    try:
        assert load_task(path).name == "from the neighbour"
    finally:
        sys.modules.pop("ridgeline_test_neighbour", None)


@pytest.mark.parametrize("name", ["ridgeline_test_task", "code", "two-words"])
def test_classes_of_a_file_are_found_by_the_name_of_their_module(tmp_path: Path, name: str) -> None:
    """As dataclasses need for annotations that are text, and pickle; no other module is hidden."""
    lines = """
        from __future__ import annotations
        import dataclasses
        import pickle

        @dataclasses.dataclass
        class Sizes:
            width: int = 4

        assert pickle.loads(pickle.dumps(Sizes())) == Sizes()
    """
    path = working(tmp_path)
    own = tmp_path / f"{name}.py"
    own.write_text(textwrap.dedent(lines) + path.read_text())
    for _ in range(2):
        assert load_task(own).name == "mine"
    assert importlib.import_module("code").__file__ != str(own)


def test_unknown_name() -> None:
    """An unknown name is answered with the nearest one, if any is near."""
    refused(
        "resnet81",
        "wanted a built-in task (mlp, resnet18, gpt2) or a path to a .py file, got 'resnet81'; "
        "did you mean resnet18?",
    )
    refused(
        "zebra",
        "wanted a built-in task (mlp, resnet18, gpt2) or a path to a .py file, got 'zebra'; "
        "or give the path of a task file",
    )


def test_missing_file(tmp_path: Path) -> None:
    """What looks like a path is looked for as one."""
    for path in (tmp_path / "none.py", tmp_path / "mlp"):
        refused(
            path,
            f"wanted a task file, got no file at {path}; write one with `def task() -> rl.Task`, "
            "or use a built-in task (mlp, resnet18, gpt2)",
        )


def test_file_without_task(tmp_path: Path) -> None:
    """A file must define `task`, and as a function."""
    path = write(tmp_path, "other = 1")
    refused(path, f"wanted `def task() -> rl.Task`, got no `task` in {path}; define it there")
    path = write(tmp_path, "task = 1")
    refused(
        path,
        f"wanted `def task() -> rl.Task`, got `task` of type int in {path}; define it there",
    )


def test_not_a_python_name(tmp_path: Path) -> None:
    """A file that Python cannot import says so."""
    path = write(tmp_path, "", name="mine.txt")
    refused(
        path,
        f"wanted a Python file, got a name that Python cannot import: {path}; end it in .py",
    )


def test_exception_at_import(tmp_path: Path) -> None:
    """An exception while the file runs names its line in the file and keeps the cause."""
    path = write(tmp_path, "import math\n\nmath.sqrt(-1)\n")
    error = refused(
        path,
        f"wanted a task from {path}, got ValueError: math domain error at {path}:3; fix the file",
    )
    assert isinstance(error.__cause__, ValueError)


def test_exception_in_task(tmp_path: Path) -> None:
    """An exception inside `task` names the line in the file, not the one deep in a library."""
    path = write(
        tmp_path,
        """\
        import json

        def task():
            return json.loads("{")
        """,
    )
    with pytest.raises(TaskError, match=r"mine\.py:4; fix the file$") as caught:
        load_task(path)
    assert isinstance(caught.value.__cause__, ValueError)


def test_syntax_error(tmp_path: Path) -> None:
    """A file that is not Python names the line that is not."""
    path = write(tmp_path, "x = 1\ndef task(:\n")
    with pytest.raises(TaskError, match=r"got SyntaxError: .* at .*mine\.py:2; fix the file$"):
        load_task(path)


def test_own_errors_pass(tmp_path: Path) -> None:
    """A Ridgeline error from the file says already what to do, and is not wrapped."""
    path = write(
        tmp_path,
        """\
        from ridgeline.errors import DataError

        def task():
            raise DataError("no data")
        """,
    )
    with pytest.raises(DataError, match=r"^no data$"):
        load_task(path)


def test_not_a_task(tmp_path: Path) -> None:
    """`task` must return a Task."""
    path = write(tmp_path, "def task():\n    return 3\n")
    refused(
        path,
        f"wanted a Task from `task()`, got int in {path}; return rl.Task(name=..., model=..., ...)",
    )


@pytest.mark.parametrize(("arguments", "shown"), [("", "()"), ("data_dir, /", "(data_dir, /)")])
def test_data_dir_not_taken(tmp_path: Path, arguments: str, shown: str) -> None:
    """`--data` for a file whose `task` cannot take it is refused, never dropped."""
    path = working(tmp_path, arguments=arguments)
    refused(
        path,
        f"wanted a `task` that takes data_dir, got `task{shown}` in {path} and --data there; "
        "write `def task(data_dir=None) -> rl.Task`, or leave out --data",
        data_dir="there",
    )


def test_built_in_with_missing_data(tmp_path: Path) -> None:
    """A built-in task checks its data when it is loaded, before anything is measured or started."""
    with pytest.raises(DataError, match="got no directory at"):
        load_task("mlp", data_dir=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "batch_size=4",
            "batch_size=0",
            "wanted batch_size as a whole number >= 1, got 0 in {path}; correct it",
        ),
        (
            "batch_size=4",
            "batch_size='4'",
            "wanted batch_size as a whole number >= 1, got '4' in {path}; correct it",
        ),
        (
            "model=lambda: torch.nn.Linear(2, 1)",
            "model=torch.nn.Linear(2, 1)",
            (
                "wanted model as a function, got Linear in {path}; write for example "
                "model=lambda: torch.nn.Linear(16, 1)"
            ),
        ),
        *(
            (
                "batch_size=4",
                f"batch_size=4, clip_norm={norm}",
                f"wanted clip_norm as a finite number above 0 or None, got {shown} in {{path}}; correct it",
            )
            for norm, shown in (
                ("-1.0", "-1.0"),
                ("0", "0"),
                ("float('nan')", "nan"),
                ("float('inf')", "inf"),
                ("True", "True"),
                ("'1'", "'1'"),
            )
        ),
    ],
)
def test_fields_are_checked(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Before anything uses them."""
    path = working(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    refused(path, message.format(path=path))


def test_a_file_that_leaves_the_interpreter(tmp_path: Path) -> None:
    """`sys.exit` in a task file is a mistake like any other, not the end of the command."""
    path = write(tmp_path, "import sys\n\nsys.exit(5)\n")
    refused(path, f"wanted a task from {path}, got SystemExit: 5 at {path}:3; fix the file")
