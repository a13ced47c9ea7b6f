"""Native code for a GPU is loaded in a child process first, so that a crash is an error and not the end."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import PackageError
from ridgeline.lint.child_trial import TrialOutcome
from ridgeline.packages import package


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The child always dies; whatever is loaded here all the same is listed."""
    loaded: list[Path] = []
    died = TrialOutcome("failed", "died of SIGSEGV", 1.0)
    monkeypatch.setattr(package, "_survived", [])
    monkeypatch.setattr(package, "try_in_child", lambda *_args, **_options: died)
    monkeypatch.setattr(package, "aoti_load_package", lambda path, **_: loaded.append(Path(path)))
    return loaded


def test_a_crash_of_the_child_is_an_error(loads: list[Path]) -> None:
    """The message says what died and what to use instead; nothing is loaded in this process."""
    message = r"got a process that failed in a child process: died of SIGSEGV; torch \S+ as installed here"
    with pytest.raises(PackageError, match=message):
        package.load_compiled(Path("model.pt2"), torch.device("cuda", 0))
    assert loads == []


def test_a_survivor_is_asked_once(loads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After one program survived, others are loaded without another child; on a CPU there is none.

    Loading sets the current GPU, so each is loaded where it is put back.
    """
    children: list[Any] = []
    kept: list[torch.device] = []

    def keep(device: torch.device) -> contextlib.AbstractContextManager[None]:
        kept.append(device)
        return contextlib.nullcontext()

    def survive(*args: Any, **_options: Any) -> TrialOutcome:
        children.append(args)
        return TrialOutcome("ok", "", 1.0)

    monkeypatch.setattr(package, "try_in_child", survive)
    monkeypatch.setattr(torch.cuda, "device", keep)
    with pytest.raises(AttributeError):  # the stand-in for a loaded program has no loader
        package.load_compiled(Path("cpu.pt2"), torch.device("cpu"))
    assert children == []
    for name in ("first.pt2", "second.pt2"):
        with pytest.raises(AttributeError):
            package.load_compiled(Path(name), torch.device("cuda", 0))
    assert len(children) == 1
    assert [path.name for path in loads] == ["cpu.pt2", "first.pt2", "second.pt2"]
    assert kept == [torch.device("cuda", 0)] * 2
