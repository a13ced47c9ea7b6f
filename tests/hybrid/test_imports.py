"""Programs that import modules while they run: what these hold now is what counts, as in Python."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.guards.reading import read_program
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches.added import with_guards
from ridgeline.reach.undo import undone

NAME = "ridgeline_test_settings"


def _put(factor: float) -> None:
    """Another module under the name, and another inside of it."""
    module, inner = types.ModuleType(NAME), types.ModuleType(f"{NAME}.inner")
    module.__dict__.update(factor=factor, inner=inner, __path__=[])
    inner.__dict__["factor"] = factor
    sys.modules[NAME], sys.modules[f"{NAME}.inner"] = module, inner


def _set(factor: float) -> None:
    sys.modules[NAME].__dict__["factor"] = factor
    sys.modules[f"{NAME}.inner"].__dict__["factor"] = factor


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The module is there, and gone afterwards."""
    from torch._inductor import config

    _put(2.0)
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    del sys.modules[NAME], sys.modules[f"{NAME}.inner"]


def _whole(x: Tensor) -> Tensor:
    import ridgeline_test_settings  # type: ignore[import-not-found]

    return x * ridgeline_test_settings.factor


def _part(x: Tensor) -> Tensor:
    from ridgeline_test_settings import factor  # type: ignore[import-not-found]

    return x * factor


def _inner(x: Tensor) -> Tensor:
    import ridgeline_test_settings.inner as inner  # type: ignore[import-not-found]

    return x * inner.factor


reads = pytest.mark.parametrize("read", [_whole, _part, _inner])
changes = pytest.mark.parametrize("change", [_set, _put])


class Net(nn.Module):
    """Imports in its forward pass."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        """Of a linear layer."""
        return self.read(self.linear(x))


@reads
@changes
def test_what_is_compiled_follows(read: Any, change: Any) -> None:
    """And is compiled anew for a change only."""
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    run, x = torch.compile(read, backend=with_guards(backend), dynamic=False), torch.randn(3)
    with many_variants():
        for factor, count in ((None, 1), (None, 1), (3.0, 2), (4.0, 3)):
            if factor is not None:
                change(factor)
            assert torch.equal(run(x), read(x))
            assert len(compiled) == count


@reads
@changes
def test_a_reading_holds_until_then(read: Any, change: Any) -> None:
    """Read again, it is about what is there now."""

    def program(read: Any, x: Any) -> Any:
        return read(x)

    arguments = {"read": read, "x": torch.randn(3)}
    for factor in (3.0, 4.0):
        manager = read_program(program, arguments).manager
        assert manager.check(arguments)
        change(factor)
        assert not manager.check(arguments)


@reads
@changes
@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_calls_follow(read: Any, change: Any, mode: Any) -> None:
    """By themselves they would give the results of before."""
    model, x = Net(read), torch.randn(2, 3)
    call = hybridize(model, x, mode=mode)
    for factor in (None, 3.0, 4.0):
        if factor is not None:
            change(factor)
        torch.testing.assert_close(call(x), model(x).detach())


def test_what_is_imported_is_in_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that counts in a module of the user's has not counted once it is undone."""
    (tmp_path / "ridgeline_test_counts.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    scope: dict[str, Any] = {}
    text = "def step():\n    import ridgeline_test_counts\n    ridgeline_test_counts.count += 1\n"
    exec(compile(text, str(tmp_path / "step.py"), "exec"), scope)
    step = scope["step"]
    step()
    with undone(step):
        step()
        assert sys.modules["ridgeline_test_counts"].count == 2
    assert sys.modules["ridgeline_test_counts"].count == 1
    del sys.modules["ridgeline_test_counts"]
