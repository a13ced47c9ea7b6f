"""Compiled packages are kept for later processes, under all that their code follows from."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from ridgeline.packages import aot, kept_programs, program_trial
from ridgeline.packages.kept_programs import key_of

DIRECTORY = Path("ridgeline/programs")


class Scaled(nn.Module):
    """A product and a factor, which is a number in the graph, beside a constant."""

    def __init__(self, factor: float = 2.0, constant: float = 1.0) -> None:
        super().__init__()
        self.factor, self.constant = factor, torch.full((3,), constant)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.constant


def exported(module: nn.Module, x: Tensor):
    return torch.export.export(module, (x,), strict=False)


def key(module: nn.Module | None = None, x: Tensor | None = None, **settings) -> str | None:
    return key_of(exported(module or Scaled(), torch.zeros(4, 3) if x is None else x), settings)


def test_a_key_is_that_of_the_same_program() -> None:
    assert key() == key()
    assert key() is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(Scaled(factor=2.0000000000000004)),
        lambda: key(Scaled(constant=1.0000001)),
        lambda: key(x=torch.zeros(5, 3)),
        lambda: key(x=torch.zeros(3, 4).t()),
        lambda: key(x=torch.zeros(4, 3, dtype=torch.float64)),
        lambda: key(fallback_random=True),
    ],
    ids=["number", "constant", "shape", "strides", "dtype", "settings"],
)
def test_what_code_follows_from_is_in_the_key(other) -> None:
    assert other() not in (None, key())


def test_threads_and_precision_are_in_the_key() -> None:
    usual, threads = key(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        assert key() != usual
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
        assert key() != usual
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert key() == usual


def test_inner_graphs_have_no_key() -> None:
    """What operators hold whole graphs is not part of one text."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    assert key(Branching()) is None


def test_constants_of_all_kinds_are_read_or_have_no_key() -> None:
    """Conjugates are noted only; a sparse constant has no elements to read one by one."""

    class Added(nn.Module):
        def __init__(self, constant: Tensor) -> None:
            super().__init__()
            self.constant = constant

        def forward(self, x: Tensor) -> Tensor:
            return x + self.constant.to_dense().real.sum()

    values = torch.tensor([1 + 2j, 3 - 1j])
    keys = {key(Added(one)) for one in (values, values.conj(), torch.tensor(True))}
    assert len(keys) == 3
    assert None not in keys
    assert key(Added(torch.eye(2).to_sparse())) is None


@pytest.mark.parametrize(
    "off", [{"fx_graph_cache": False}, {"force_disable_caches": True}], ids=["cache", "all"]
)
def test_who_wants_no_caches_gets_none(off) -> None:
    with config.patch(off):
        assert key() is None


class Compiler:
    """Writes what it was given in place of code, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.calls = 0
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(aot, "aoti_compile_and_package", self)

    def __call__(self, program, package_path: str, **_: object) -> None:
        self.calls += 1
        Path(package_path).write_text(f"code {program.graph}")


def compiled(directory: Path, factor: float = 2.0) -> str:
    directory.mkdir(exist_ok=True)
    x = torch.zeros(4, 3)
    return aot.compile_program(exported(Scaled(factor), x), [x], directory).read_text()


def test_the_same_program_is_compiled_once(monkeypatch, tmp_path) -> None:
    compiler = Compiler(monkeypatch, tmp_path)
    first = compiled(tmp_path / "a")
    assert compiled(tmp_path / "b") == first
    assert compiler.calls == 1
    assert compiled(tmp_path / "b", factor=3.0) != first
    assert compiler.calls == 2


def test_a_damaged_file_is_compiled_again(monkeypatch, tmp_path) -> None:
    compiler = Compiler(monkeypatch, tmp_path)
    first = compiled(tmp_path / "a")
    (kept,) = (tmp_path / DIRECTORY).glob("*.pt2")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert compiled(tmp_path / "a") == first
    assert compiler.calls == 2
    (again,) = (tmp_path / DIRECTORY).glob("*.pt2")
    assert again.read_text() == first


def test_a_directory_that_cannot_be_written_costs_compiling_only(monkeypatch, tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    compiler = Compiler(monkeypatch, file)
    assert compiled(tmp_path / "a") == compiled(tmp_path / "a")
    assert compiler.calls == 2


def test_the_longest_unused_go_first(monkeypatch, tmp_path) -> None:
    compiler = Compiler(monkeypatch, tmp_path)
    size = len(compiled(tmp_path / "a", 1.5))
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 2 * size)
    compiled(tmp_path / "a", 2.5)
    for number, kept in enumerate(sorted((tmp_path / DIRECTORY).glob("*.pt2"))):
        is_old = "2.5" in kept.read_text()
        kept_programs.os.utime(kept, (100 if is_old else 200 + number,) * 2)
    compiled(tmp_path / "a", 3.5)
    assert compiler.calls == 3
    kept = "".join(p.read_text() for p in (tmp_path / DIRECTORY).glob("*.pt2"))
    assert ("1.5" in kept, "2.5" in kept, "3.5" in kept) == (True, False, True)


def test_a_package_that_ran_well_is_not_tried_in_a_child_again(monkeypatch, tmp_path) -> None:
    """The same bytes on inputs of the same shapes; one that could not be tried is tried again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tried: list[bytes] = []

    def ran_well(_child, asked, _inputs, _notes) -> bool:
        tried.append(Path(asked["package"]).read_bytes())
        return tried[-1] != b"no child"

    monkeypatch.setattr(program_trial, "_ran_well", ran_well)
    monkeypatch.setattr(program_trial, "_trying", [(None, [])])
    file, x, y = tmp_path / "file", torch.zeros(2), torch.zeros(3)
    for content, inputs in [(b"a", [x]), (b"a", [x]), (b"b", [x]), (b"b", [y]), (b"b", [y])]:
        file.write_bytes(content)
        program_trial.try_package(file, inputs)
    assert tried == [b"a", b"b", b"b"]
    file.write_bytes(b"no child")
    for _ in range(2):
        program_trial.try_package(file, [x])
    assert tried[3:] == [b"no child"] * 2
