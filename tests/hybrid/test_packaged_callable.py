"""Packaged functions and modules: how they are traced, called, saved and loaded."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from ridgeline.capture.flat_program import flatten_program
from ridgeline.errors import BatchError, CaptureError, PackageError
from ridgeline.packages.aot import compile_program
from ridgeline.packages.callables import PackagedCallable, package_callable
from ridgeline.runtime.steps.load import LoadedCallable, load
from warm import WARM

CPU = torch.device("cpu")


# Tracing: state becomes inputs.


def test_all_state_becomes_inputs() -> None:
    """Parameters, buffers and tensors closed over are inputs of the program; tracing changes none of them."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    x, scale = torch.randn(4, 3), torch.tensor(2.0)
    before, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()

    def fn(x: Tensor) -> Tensor:
        return net(x) * scale + net[0].weight.data.sum() + torch.tensor([1.0, 2.0, 3.0])

    program = flatten_program(fn, x)
    given = {id(tensor) for tensor in program.state.values()}
    assert given == {id(tensor) for tensor in (*net.parameters(), *net.buffers(), scale)}
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert torch.equal(generator, torch.get_rng_state())


def test_names_and_ties_of_a_module_are_kept() -> None:
    """State of a module has its names; a tied parameter is one input."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert list(flatten_program(net, torch.randn(2, 3)).state) == ["0.weight", "1.bias"]


def test_inputs_given_twice_are_two_inputs() -> None:
    """The same tensor as two example inputs, or also closed over, stands for different tensors."""
    x = torch.ones(2)
    program = flatten_program(lambda a, b: a + 2 * b + 4 * x, (x, x))
    (out,) = program.graph(
        torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    )
    assert out.tolist() == [7.0, 14.0]


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (
            lambda x: x if x.sum() > 0 else -x,
            "DataDependentOutputException: aten._local_scalar_dense.default",
        ),
        (
            lambda x: x * x.sum().item(),
            "DataDependentOutputException: aten._local_scalar_dense.default",
        ),
        (lambda x: x[x > 0], "DynamicOutputShapeException: aten.nonzero.default"),
    ],
    ids=["branch", "item", "mask"],
)
def test_dependence_on_values_is_refused(fn: Callable[[Tensor], Tensor], operator: str) -> None:
    """A branch or shape that depends on values cannot be packaged; operator and line are named."""
    with pytest.raises(CaptureError) as caught:
        flatten_program(fn, torch.ones(3))
    line = fn.__code__.co_firstlineno
    assert str(caught.value) == (
        f"wanted to trace <lambda> into a program, got {operator} (test_packaged_callable.py:{line} in "
        "<lambda>); shapes and control flow must not depend on the values of tensors (.item(), if tensor: "
        "..., x[mask])"
    )


def test_functions_that_do_not_fit_are_refused() -> None:
    """Inputs that are no tensors, updated inputs, other outputs and arrays made in each call are named."""
    x = torch.ones(3)

    def message(fn: Callable[..., Any], inputs: Any) -> str:
        with pytest.raises(CaptureError) as caught:
            flatten_program(fn, inputs)
        return str(caught.value)

    assert message(lambda a, b: a * b, (x, 3)) == (
        "wanted example inputs made of tensors, got 3 as leaf 1; fix what is not a tensor with "
        "functools.partial or a lambda"
    )
    assert message(lambda a, b: a + b.mul_(2), (x, x)) == (
        "wanted a function that leaves its inputs as they are, got one that updates input 1 in place; clone "
        "the input first, or close over a tensor that is to be updated"
    )
    assert message(lambda a: {"a": a + 1, "b": object()}, x) == (
        "wanted <lambda> to return tensors, numbers, texts or None in tuples, lists and dicts, got object; "
        "return its tensors"
    )
    supply = iter([torch.ones(3), torch.zeros(3)])
    assert message(lambda a: a + next(supply), x) == (
        "wanted a function that uses the same tensors in every call, got one that used a new (3,) tensor in "
        "its second; keep one tensor, and write new values into it"
    )
    meta = torch.ones(3, device="meta")
    assert message(lambda a: (a + 1, meta + 1), x) == (
        "wanted all tensors of a program on one device, got input 0 on cpu, tensor_0 on meta; move them with "
        ".to(device) first"
    )


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the message says what to install."""
    program = flatten_program(nn.Linear(2, 2), torch.ones(1, 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    # Torch reads CXX when it is imported.
    with config.patch({"cpp.cxx": (None, "g++")}), pytest.raises(CaptureError) as caught:
        compile_program(program.graph, [*program.state.values(), *program.inputs], tmp_path)
    assert str(caught.value) == (
        "wanted a C++ compiler to package a program, got none (g++ is not on PATH); install one (apt "
        "install g++, or dnf install gcc-c++) or set CXX to its path"
    )


# Compiled programs: two compilations serve all tests.

MODEL = '''
import torch
from torch import nn

class Model(nn.Module):
    """Batch norm and dropout in training mode: state is updated, random numbers are drawn."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x, extra):
        y = self.drop(self.norm(self.first(x))) * extra["scale"]
        return {"scores": y + extra["bias"], "best": (y.argmax(-1), None)}, 3
'''


class Case:
    """A model in its own module, packaged and saved, with inputs and the plain results."""

    def __init__(self, folder: Path) -> None:
        (folder / "source").mkdir()
        (folder / "source" / "users_model.py").write_text(MODEL)
        sys.path.insert(0, str(folder / "source"))
        try:
            import users_model
        finally:
            sys.path.remove(str(folder / "source"))
            sys.modules.pop("users_model", None)
        torch.manual_seed(0)
        self.model = users_model.Model()
        self.fresh = copy.deepcopy(self.model)
        self.inputs = (
            torch.randn(4, 6),
            {"scale": torch.tensor(2.0), "bias": torch.randn(5, 4).t()},
        )
        self.packaged = package_callable(self.model, self.inputs)
        self.path = self.packaged.save(folder / "model.pt2")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(tmp_path_factory.mktemp("case"))
    yield made
    made.packaged.close()


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[nn.Module, PackagedCallable]]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with package_callable(net, torch.randn(1, 8)) as packaged:
        yield net, packaged


def plain(model: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return model(*inputs)


def assert_same(got: Any, wanted: Any) -> None:
    assert got[1] == wanted[1] == 3
    assert list(got[0]) == ["scores", "best"]
    torch.testing.assert_close(got[0]["scores"], wanted[0]["scores"])
    assert torch.equal(got[0]["best"][0], wanted[0]["best"][0])
    assert got[0]["best"][1] is None


def test_a_packaged_module_does_what_the_module_does(case: Case) -> None:
    """Same structure, values, dropout and batch statistics as the plain module, call after call."""
    twin = copy.deepcopy(case.model)
    for seed in range(3):
        torch.manual_seed(seed)
        got = case.packaged(*case.inputs)
        torch.manual_seed(seed)
        assert_same(got, plain(twin, *case.inputs))
    for mine, theirs in zip(case.model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert case.packaged.mode == "packaged"


def test_a_loaded_module_goes_on_where_it_was_saved(case: Case) -> None:
    """The file holds the state of the moment of saving, its own, and gives the same results."""
    loaded = load(case.path)
    assert isinstance(loaded, LoadedCallable)
    twin = copy.deepcopy(case.fresh)
    for seed in range(2):
        torch.manual_seed(seed)
        got = loaded(*case.inputs)
        torch.manual_seed(seed)
        assert_same(got, plain(twin, *case.inputs))
    assert int(loaded.state["norm.num_batches_tracked"]) == 2
    assert loaded.mode == "packaged"
    assert repr(loaded).startswith(f"LoadedCallable({case.path}: ")
    assert repr(loaded).endswith(
        f" -> (4, 5) float32, (4,) int64, cpu {loaded.metadata.capability}, 7 tensors)"
    )


def test_a_fresh_process_needs_no_source(case: Case, tmp_path: Path) -> None:
    """A process that cannot import the model loads and runs it, and imports nothing of the user's."""
    x, extra = case.inputs
    script = tmp_path / "script.py"
    script.write_text("""
import importlib.util, json, sys
import torch
from ridgeline.runtime.steps.load import load
assert importlib.util.find_spec("users_model") is None
before = set(sys.modules)
loaded = load(sys.argv[1])
given = json.loads(sys.stdin.read())
inputs = torch.tensor(given["x"]), {k: torch.tensor(v) for k, v in given["extra"].items()}
torch.manual_seed(5)
out, three = loaded(*inputs)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([out["scores"].tolist(), out["best"][0].tolist(), three, sorted(new)]))
""")
    given = {"x": x.tolist(), "extra": {k: v.tolist() for k, v in extra.items()}}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = WARM.command(script, case.path, environment=environment)
    how = {"cwd": tmp_path, "env": environment, "input": json.dumps(given), "text": True}
    done = subprocess.run(command, **how, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    scores, best, three, imported = json.loads(done.stdout)
    torch.manual_seed(5)
    wanted = plain(copy.deepcopy(case.fresh), *case.inputs)
    assert_same(
        ({"scores": torch.tensor(scores), "best": (torch.tensor(best), None)}, three), wanted
    )
    assert not [name for name in imported if "model" in name]


def test_torch_opens_a_package(case: Case) -> None:
    """The file is a torch archive as well: torch's own loader runs it, given the state."""
    model = torch._inductor.aoti_load_package(str(case.path))
    loaded = load(case.path)
    torch.manual_seed(0)
    flat = model.loader.run(
        [*copy.deepcopy(loaded.state).values(), case.inputs[0], *case.inputs[1].values()]
    )
    torch.manual_seed(0)
    torch.testing.assert_close(flat[0], loaded(*case.inputs)[0]["scores"])


def test_inputs_are_checked(case: Case) -> None:
    """Another structure, shape, type or leaf is an error that names the input, before anything runs."""
    loaded = load(case.path)
    x, extra = case.inputs

    def message(*inputs: Any) -> str:
        with pytest.raises(BatchError) as caught:
            loaded(*inputs)
        return str(caught.value)

    remedy = (
        "the program was compiled for the former: convert the input, or package it for such inputs"
    )
    assert message(x[:3], extra) == (
        f"wanted input 0 as (4, 6) float32 on cpu, got (3, 6) float32 on cpu; {remedy}"
    )
    assert message(x.double(), extra) == (
        f"wanted input 0 as (4, 6) float32 on cpu, got (4, 6) float64 on cpu; {remedy}"
    )
    assert message(x, {**extra, "scale": 2.0}) == (
        f"wanted input 1['scale'] as () float32 on cpu, got 2.0; {remedy}"
    )
    assert message(x.to("meta"), extra) == (
        f"wanted input 0 as (4, 6) float32 on cpu, got (4, 6) float32 on meta; {remedy}"
    )
    assert message(x) == (
        "wanted inputs of structure (..., {'scale': ..., 'bias': ...}), got (...,); call it as the function "
        "that it was made from"
    )
    assert int(loaded.state["norm.num_batches_tracked"]) == 0


def test_gradients_are_refused_where_they_would_be_lost(case: Case) -> None:
    """A live callable runs such a call eagerly; a loaded one says that it cannot."""
    loaded = load(case.path)
    x, extra = case.inputs
    wanting = x.clone().requires_grad_()
    with pytest.raises(
        BatchError, match=r"got tensor 0 of shape \(4, 6\) that requires them; give it"
    ):
        loaded(wanting, extra)
    with torch.no_grad():
        loaded(wanting, extra)


def test_updated_parameters_are_seen(network: tuple[nn.Module, PackagedCallable]) -> None:
    """What is written into a parameter counts for the next call, down to a bias of two elements."""
    net, packaged = network
    x = torch.randn(1, 8)
    for parameter in net.parameters():
        with torch.no_grad():
            parameter.add_(0.5)
        torch.testing.assert_close(packaged(x), plain(net, x))
    net[2].bias.data = torch.tensor([5.0, 6.0])
    torch.testing.assert_close(packaged(x), plain(net, x))
    net.load_state_dict({name: torch.ones_like(value) for name, value in net.state_dict().items()})
    torch.testing.assert_close(packaged(x), plain(net, x))


def test_an_exchanged_parameter_is_caught(network: tuple[nn.Module, PackagedCallable]) -> None:
    """A parameter of another type would be read as garbage; it is refused."""
    net, packaged = network
    x = torch.randn(1, 8)
    weight = net[0].weight.data
    net[0].weight.data = weight.bfloat16()
    with pytest.raises(PackageError) as caught:
        packaged(x)
    assert str(caught.value) == (
        "wanted 0.weight as (6, 8) float32 on cpu, as it was packaged, got (6, 8) bfloat16 on cpu; package "
        "the model again after such a change"
    )
    net[0].weight.data = weight.t().contiguous().t()
    with pytest.raises(PackageError, match=r"got \(6, 8\) float32 on cpu with strides \(1, 6\)"):
        packaged(x)
    net[0].weight.data = weight
    torch.testing.assert_close(packaged(x), plain(net, x))


def test_strides_and_gradient_modes_do_not_matter(
    network: tuple[nn.Module, PackagedCallable],
) -> None:
    """Views, inputs that want gradients and inference mode all give the plain result, without gradients."""
    net, packaged = network
    wide = torch.randn(1, 16)
    for x in (wide[:, ::2], wide[:, 3:11], wide.t()[:8].t(), wide[:, :8].clone().requires_grad_()):
        torch.testing.assert_close(packaged(x), plain(net, x))
        assert not packaged(x).requires_grad
        with torch.inference_mode():
            torch.testing.assert_close(packaged(x), net(x))
    first = packaged(wide[:, :8])
    kept = first.clone()
    packaged(wide[:, 8:])
    assert torch.equal(first, kept)


def test_a_closed_callable_says_so(
    network: tuple[nn.Module, PackagedCallable], tmp_path: Path
) -> None:
    """Closing removes the compiled file, once; use afterwards is an error."""
    program = flatten_program(network[0], torch.randn(1, 8))
    folder = tmp_path / "own"
    folder.mkdir()
    copied = folder / "program.pt2"
    copied.write_bytes(network[1]._path.read_bytes())
    packaged = PackagedCallable(program, network[1].metadata, copied)
    packaged.close()
    packaged.close()
    assert not folder.exists()
    with pytest.raises(
        PackageError, match=r"^wanted to call a packaged callable, got one that was closed; "
    ):
        packaged(torch.randn(1, 8))
    with pytest.raises(
        PackageError, match=r"^wanted to save a packaged callable, got one that was closed; "
    ):
        packaged.save(tmp_path / "late.pt2")
