"""`load_task`: the task of a name or of a Python file.

A task file is a program that its user runs on purpose; it is executed, not inspected.
"""

import dataclasses
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ridgeline.errors import RidgelineError, TaskError
from ridgeline.optimizers.given import is_clip_norm
from ridgeline.runtime.training.task import Task
from ridgeline.tasks.gpt2 import gpt2
from ridgeline.tasks.mlp import mlp
from ridgeline.tasks.resnet18 import resnet18

BUILT_IN: dict[str, Callable[..., Task]] = {"mlp": mlp, "resnet18": resnet18, "gpt2": gpt2}
_EXAMPLES = {
    "model": "model=lambda: torch.nn.Linear(16, 1)",
    "loss_fn": "loss_fn=lambda model, batch: model(batch).mean()",
    "optimizer": "optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1)",
    "metric": "metric=lambda model, batch: model(batch).sum()",
}
_TASK_FILE = "`def task() -> rl.Task`"


def load_task(
    name_or_path: str | Path, *, data_dir: str | Path | None = None, batch_size: int | None = None
) -> Task:
    """The task of a built-in name, or of a Python file with `def task() -> rl.Task`.

    Args:
        name_or_path: `mlp`, `resnet18`, `gpt2`, or a path; what ends in `.py` or has a directory is a path.
        data_dir: Where the task finds its data; None: the task's default. A file's `task` gets it
            as the argument `data_dir`.
        batch_size: Samples per step over all workers together; None: the task's default.

    Raises:
        TaskError: The name is unknown, or the file is missing, fails, has no `task`, takes no `data_dir`
            although one is given, or returns something else than a `Task`; or the batch size is below 1.
        DataError: The data of a built-in task is missing or damaged.
    """
    if batch_size is not None and batch_size < 1:
        raise TaskError(f"wanted batch_size >= 1, got {batch_size} for {name_or_path}; raise it")
    text = str(name_or_path)
    if is_path(text):
        task = _from_file(Path(text), data_dir)
    elif text in BUILT_IN:
        task = BUILT_IN[text](data_dir=data_dir)
    else:
        raise TaskError(_unknown_name(text))
    if batch_size is not None:
        task = dataclasses.replace(task, batch_size=batch_size)
    _check(task, text)
    return task


def _check(task: Task, where: str) -> None:
    """What a task's fields must be before anything uses them."""
    size = task.batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(
            f"wanted batch_size as a whole number >= 1, got {size!r} in {where}; correct it"
        )
    if not is_clip_norm(task.clip_norm):
        raise TaskError(
            f"wanted clip_norm as a finite number above 0 or None, got {task.clip_norm!r} in {where}; "
            "correct it"
        )
    for name in ("model", "loss_fn", "optimizer", "metric"):
        made = getattr(task, name)
        # A module can be called as well, but it is a model and not what makes one.
        if not callable(made) or isinstance(made, nn.Module):
            raise TaskError(
                f"wanted {name} as a function, got {type(made).__name__} in {where}; write for example "
                f"{_EXAMPLES[name]}"
            )


def is_path(text: str) -> bool:
    """Whether a task is named by its file, not by a built-in name."""
    return text.endswith(".py") or len(Path(text).parts) > 1


def _unknown_name(name: str) -> str:
    nearest = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "or give the path of a task file"
    return f"wanted a built-in task ({', '.join(BUILT_IN)}) or a path to a .py file, got {name!r}; {hint}"


def _from_file(path: Path, data_dir: str | Path | None) -> Task:
    if not path.is_file():
        raise TaskError(
            f"wanted a task file, got no file at {path}; write one with {_TASK_FILE}, "
            f"or use a built-in task ({', '.join(BUILT_IN)})"
        )
    make = getattr(_execute(path), "task", None)
    if not callable(make):
        found = "no `task`" if make is None else f"`task` of type {type(make).__name__}"
        raise TaskError(f"wanted {_TASK_FILE}, got {found} in {path}; define it there")
    arguments: dict[str, Any] = {}
    if data_dir is not None:
        if not _takes_data_dir(make):
            raise TaskError(
                f"wanted a `task` that takes data_dir, got `task{inspect.signature(make)}` in {path} and "
                f"--data {data_dir}; write `def task(data_dir=None) -> rl.Task`, or leave out --data"
            )
        arguments["data_dir"] = data_dir
    task = _guarded(lambda: make(**arguments), path)
    if not isinstance(task, Task):
        raise TaskError(
            f"wanted a Task from `task()`, got {type(task).__name__} in {path}; "
            "return rl.Task(name=..., model=..., ...)"
        )
    return task


def _takes_data_dir(make: Callable[..., Any]) -> bool:
    parameters = inspect.signature(make).parameters
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return ("data_dir" in parameters and parameters["data_dir"].kind in by_keyword) or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _execute(path: Path) -> ModuleType:
    """Run a task file as a module of its own name, with its directory importable as for a script."""
    resolved = path.resolve()
    name = _module_name(resolved)
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise TaskError(
            f"wanted a Python file, got a name that Python cannot import: {path}; end it in .py"
        )
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    directory = str(resolved.parent)
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that the file's neighbours never hide a package
    # Dataclasses, pickle and torch's compiler look up by name the module that a class or function is of.
    sys.modules[name] = _EXECUTED[name] = module
    try:
        _guarded(lambda: loader.exec_module(module), path)
    except BaseException:  # a part of a module is none
        del sys.modules[name], _EXECUTED[name]
        raise
    return module


_EXECUTED: dict[str, ModuleType] = {}
"""Name to the task file that was executed under it last."""


def _module_name(path: Path) -> str:
    """A file's own name, or one like it where that is a module's, which the file must not hide."""
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        is_free = known is _EXECUTED.get(name)
    else:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
        is_free = found is None or found.origin == str(path)
    return name if is_free else f"ridgeline_task_{name}"


def _guarded(act: Callable[[], Any], path: Path) -> Any:
    """What `act` returns; an exception becomes a `TaskError` that names the line of the user's file."""
    try:
        return act()
    except RidgelineError:
        raise  # says already what to do
    except (Exception, SystemExit) as error:  # a user's program may raise anything; it is chained
        raise TaskError(
            f"wanted a task from {path}, got {type(error).__name__}: {error} at "
            f"{path}:{_line_in(path, error)}; fix the file"
        ) from error


def _line_in(path: Path, error: BaseException) -> int:
    """The last line of the file that the exception passed through."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    # Frames name the file by the path that it was executed under.
    lines = [
        f.lineno for f in frames if Path(f.filename) == path.resolve() and f.lineno is not None
    ]
    return lines[-1] if lines else 1
