"""`rl.hybridize` on the CPU: the same results in every form, followed through every change, and said so."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.calls.dispatch import REPLACED
from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.calls.search import search
from ridgeline.callables.hybridize import Hybrid, hybridize
from ridgeline.errors import BatchError, CaptureError, PlanError
from ridgeline.plan import Execution

pytestmark = pytest.mark.usefixtures("compiled_in_this_process")

FORMS: tuple[Execution, ...] = ("eager", "script", "compiled")


def mlp(features: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).sum(1)


class Scaled(nn.Module):
    """Reads a Python number and a submodule's training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.scale)


def counting() -> Any:
    calls = [0]

    def count(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    return count


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[nn.Module, Hybrid]]:
    module = mlp()
    with hybridize(module, torch.randn(1, 8), "compiled") as hybrid:
        yield module, hybrid


def same(hybrid: Hybrid, fn: Any, *args: Any) -> None:
    with torch.no_grad():
        expected = fn(*args)
    torch.testing.assert_close(hybrid(*args), expected)


@pytest.mark.parametrize("mode", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_form_gives_the_results_of_eager(mode: Execution, rows: int) -> None:
    """One tensor in, one out, with the difference in the report, and no gradients."""
    module = mlp()
    with hybridize(module, torch.randn(rows, 8), mode) as hybrid:
        for _ in range(3):
            same(hybrid, module, torch.randn(rows, 8))
        assert not hybrid(torch.randn(rows, 8)).requires_grad
        assert hybrid.mode == mode
        row = hybrid.report.row(mode)
        assert row is not None
        assert hybrid.report.counters["eager_calls"] == 0
        assert mode == "eager" or 0.0 <= (row.difference or 0.0) < 1e-5


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_nests_constants_and_closures(mode: Execution) -> None:
    """Dictionaries, lists, constants and None pass through; what a closure holds is read by reference."""
    module, shift = mlp(), torch.tensor([1.0, 2.0])

    def fn(x: Tensor, more: dict[str, Any]) -> dict[str, Any]:
        return {"y": module(x) + shift, "k": 3, "z": [more["q"] * more["n"], None]}

    args = (torch.randn(1, 8), {"q": torch.randn(2, 3), "n": 2})
    with hybridize(fn, args, mode) as hybrid:
        same(hybrid, fn, *args)
        with torch.no_grad():
            shift.mul_(3)
            next(module.parameters()).mul_(2)
        same(hybrid, fn, torch.randn(1, 8), {"q": torch.randn(2, 3), "n": 2})
        assert hybrid.report.counters["eager_calls"] == 0


def test_several_tensors_take_the_quick_way() -> None:
    """Two arguments, one given twice, are two inputs and not one."""
    x = torch.randn(4)
    with hybridize(lambda a, b: a - 2 * b, (x, x), "compiled") as hybrid:
        same(hybrid, lambda a, b: a - 2 * b, torch.randn(4), torch.randn(4))


def test_weights_updated_in_place_are_seen(compiled: tuple[nn.Module, Hybrid]) -> None:
    """An optimizer's step, `load_state_dict` and a write through `.data` all reach the next call."""
    module, hybrid = compiled
    x = torch.randn(1, 8)
    before = hybrid(x)
    module.load_state_dict({k: v * 1.5 for k, v in module.state_dict().items()})
    same(hybrid, module, x)
    assert not torch.equal(hybrid(x), before)
    for parameter in module.parameters():
        parameter.data.add_(0.1)
    same(hybrid, module, x)
    assert hybrid.report.counters["rebuilds"] == 0


@pytest.mark.parametrize("mode", ["script", "compiled"])
def test_replaced_weights_are_captured_again(mode: Execution) -> None:
    """New parameter objects, new memory or another dtype lead to a new capture, counted and noted."""
    module = mlp()
    x = torch.randn(1, 8)
    with hybridize(module, x, mode) as hybrid:
        state = {k: v * 2 for k, v in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        same(hybrid, module, x)
        module[0].weight.data = module[0].weight.data * 3  # type: ignore[union-attr]
        same(hybrid, module, x)
        assert hybrid.report.counters["rebuilds"] == 2
        assert REPLACED in hybrid.report.notes


def test_the_memory_layout_of_an_argument_does_not_matter(
    compiled: tuple[nn.Module, Hybrid],
) -> None:
    """A strided, expanded or offset argument gives the same result; one on another device is an error."""
    module, hybrid = compiled
    before = hybrid.report.counters["eager_calls"]  # of other tests
    wide = torch.randn(4, 16)
    for x in (wide[1:2, ::2], wide[:1, 3:11], torch.randn(1, 1).expand(1, 8)):
        same(hybrid, module, x)
    assert hybrid.report.counters["eager_calls"] == before
    with pytest.raises(
        BatchError, match="wanted argument leaf 0 on cpu, as in the example, got it on meta"
    ):
        hybrid(torch.empty(1, 8, device="meta"))


def test_results_are_fresh(compiled: tuple[nn.Module, Hybrid]) -> None:
    """A later call does not overwrite an earlier result."""
    _, hybrid = compiled
    first = hybrid(torch.randn(1, 8))
    kept = first.clone()
    hybrid(torch.randn(1, 8))
    assert torch.equal(first, kept)


def test_other_shapes_up_to_the_limit_then_eager() -> None:
    """A second shape is captured, a third runs eagerly: counted, and noted once."""
    module = mlp()
    with hybridize(module, torch.randn(1, 8), "script", max_shapes=2) as hybrid:
        for rows in (1, 2, 3, 3, 2, 1):
            same(hybrid, module, torch.randn(rows, 8))
        counters = hybrid.report.counters
        assert (counters["shapes"], counters["eager_calls"]) == (2, 2)
        assert hybrid.report.notes == (
            "calls with further shapes or settings ran eagerly: max_shapes=2 are captured",
        )


def test_what_could_not_be_read_is_noted_by_its_reason_alone() -> None:
    """Shapes that a branch on values keeps from being captured are none beyond the limit."""

    def branching(x: Tensor) -> Tensor:
        return x * 2 if len(x) < 3 or x.sum() > 0 else x * 3

    with hybridize(branching, torch.ones(2, 8), "compiled", max_shapes=8) as hybrid:
        for _ in range(3):
            same(hybrid, branching, torch.ones(4, 8))
        (note,) = hybrid.report.notes
        assert note.startswith("another shape or setting ran eagerly: ")
        assert hybrid.report.counters["eager_calls"] == 3


@pytest.mark.parametrize("mode", ["script", "compiled", "packaged"])
@interpreted()
def test_shapes_that_no_result_shows_have_programs_of_their_own(mode: str) -> None:
    """A number comes of any batch, by operators of the same names."""
    module = mlp()

    def total(x: Tensor) -> Tensor:
        return module(x).square().sum()

    with hybridize(total, torch.randn(2, 8), mode, max_shapes=4) as hybrid:
        for shape in ((2, 8), (5, 8), (1, 8), (1, 2, 8), (2, 8)):
            x = torch.randn(shape)
            with torch.no_grad():
                torch.testing.assert_close(hybrid(x), total(x))
        assert hybrid.report.counters["shapes"] == 4


def test_another_dtype_or_structure_runs_eagerly() -> None:
    """The function's own result for a dtype that was not captured, counted."""

    def double(x: Any) -> Any:
        return x * 2

    with hybridize(double, torch.randn(3), "compiled") as hybrid:
        assert hybrid(torch.arange(3)).tolist() == [0, 2, 4]
        assert hybrid(3) == 6
        assert hybrid.report.counters["eager_calls"] == 2


def test_gradients_asked_for_are_given(compiled: tuple[nn.Module, Hybrid]) -> None:
    """An argument that requires gradients makes its call eager, with gradients; under no_grad it does not."""
    _, hybrid = compiled
    before = hybrid.report.counters["eager_calls"]
    x = torch.randn(1, 8, requires_grad=True)
    hybrid(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        hybrid(x)
    assert hybrid.report.counters["eager_calls"] == before + 1
    assert "calls whose arguments require gradients ran eagerly" in hybrid.report.notes


def test_python_values_that_the_code_reads_are_followed() -> None:
    """A number on the module and the training flag of a submodule change the next call."""
    module = Scaled().eval()
    x = torch.randn(1, 4)
    with hybridize(module, x, "compiled", max_shapes=3) as hybrid:
        torch.testing.assert_close(hybrid(x), 2 * x)
        module.scale = 5.0
        torch.testing.assert_close(hybrid(x), 5 * x)
        module.drop.train()
        torch.manual_seed(3)
        dropped = hybrid(x)
        torch.manual_seed(3)
        torch.testing.assert_close(dropped, module(x))
        module.drop.eval()
        torch.testing.assert_close(hybrid(x), 5 * x)
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 3, "rebuilds": 0}


def test_a_module_in_training_mode_keeps_its_random_numbers_and_statistics() -> None:
    """Dropout draws what eager draws; batch norm's statistics move as in eager, and not before the first call."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    start = {k: v.clone() for k, v in module.state_dict().items()}
    x = torch.randn(8, 4)
    with hybridize(module, x, "compiled") as hybrid:
        for key, value in module.state_dict().items():
            assert torch.equal(value, start[key]), key
        torch.manual_seed(1)
        got = hybrid(x)
        after = {k: v.clone() for k, v in module.state_dict().items()}
        module.load_state_dict(start)
        torch.manual_seed(1)
        same_as = module(x)
        torch.testing.assert_close(got, same_as.detach())
        torch.testing.assert_close(after, module.state_dict())
        assert module.training


def test_by_region_works_on_a_copy_that_shares_the_weights() -> None:
    """The module itself stays as it was; in-place updates are seen; a model without blocks is refused."""
    module, x = Blocks(), torch.randn(2, 4)
    with hybridize(module, x, "regional") as hybrid:
        same(hybrid, module, x)
        with torch.no_grad():
            next(module.parameters()).mul_(2)
        same(hybrid, module, x)
        assert all(block._compiled_call_impl is None for block in module.modules())
        assert hybrid.report.notes == ("compiled by region: 2 x Block",)
    with pytest.raises(CaptureError, match="wanted a model with repeated blocks"):
        hybridize(mlp(), torch.randn(1, 8), "regional")
    with pytest.raises(CaptureError, match="wanted a module with repeated blocks"):
        hybridize(torch.relu, torch.randn(4), "regional")


@pytest.mark.parametrize("mode", ["eager", "script"])
def test_static_io_reads_its_own_inputs(mode: Execution) -> None:
    """Without arguments a call reads `.inputs`; with arguments it writes them first; other shapes are errors."""
    module = mlp()
    with hybridize(module, torch.randn(1, 8), mode, static_io=True) as hybrid:
        hybrid.inputs[0].copy_(torch.ones(1, 8))
        torch.testing.assert_close(hybrid(), module(torch.ones(1, 8)).detach())
        same(hybrid, module, torch.randn(1, 8))
        with pytest.raises(
            BatchError, match=r"wanted arguments like the example, \(float32\[1, 8\]\)"
        ):
            hybrid(torch.randn(2, 8))


def test_auto_keeps_an_equivalent_mode_inside_the_budget() -> None:
    """Rows say what was measured, refused, skipped and why; the counter leaves nothing but eager."""
    with hybridize(mlp(), torch.randn(1, 8), budget_s=15.0) as hybrid:
        report = hybrid.report
        assert [row.mode for row in report.rows][:2] == ["eager", "script"]
        assert report.row(hybrid.mode).status == "measured"  # type: ignore[union-attr]
        for mode in ("compiled", "regional", "packaged"):
            row = report.row(mode)  # type: ignore[arg-type]
            assert row is not None
            assert row.status == "skipped"
            assert "to compile" in row.reason
    with hybridize(counting(), torch.randn(4), budget_s=15.0) as hybrid:
        assert hybrid.mode == "eager"
        row = hybrid.report.row("script")
        assert row is not None
        assert row.status == "refused"
        assert "got one that writes calls (a list)" in row.reason


def test_auto_does_not_compile_for_a_few_calls() -> None:
    """With the number of calls known, compiling that all calls together cannot earn back is not begun."""
    with hybridize(mlp(), torch.randn(1, 8), calls=100) as hybrid:
        row = hybrid.report.row("compiled")
        assert row is not None
        assert "and all 100 calls take only" in row.reason


def test_the_search_leaves_batch_norm_as_it_was() -> None:
    """Timing in training mode moves statistics; afterwards they are bitwise as before."""
    module = nn.BatchNorm1d(4)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    args = (torch.randn(8, 4),)
    found = search(
        module, module, args, CallReads(module, args), torch.device("cpu"),
        calls=None, budget_s=0.0, static_io=False,
    )  # fmt: skip
    assert found.decision.mode == "eager"
    for key, value in module.state_dict().items():
        assert torch.equal(value, start[key]), key


def test_a_closed_hybrid_says_so() -> None:
    """Calls after close are errors that say what to do."""
    hybrid = hybridize(mlp(), torch.randn(1, 8), "eager")
    hybrid.close()
    with pytest.raises(PlanError, match=r"got one after close\(\); make another one"):
        hybrid(torch.randn(1, 8))
    with pytest.raises(PlanError, match="static_io=False"):
        _ = hybrid.inputs


def test_wrong_requests_are_refused() -> None:
    """A mode for other devices or purposes, and numbers out of range, name what was got."""
    for mode in ("graph", "step-graph"):
        with pytest.raises(PlanError, match=f"got '{mode}'"):
            hybridize(mlp(), torch.randn(1, 8), mode)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="wanted max_shapes >= 1"):
        hybridize(mlp(), torch.randn(1, 8), max_shapes=0)


def test_a_search_leaves_no_trace_of_calls_that_write() -> None:
    """What counts in Python is not called where nothing can run it, and counts on where the compiler may."""
    calls, kept = [0], {"mean": torch.zeros(4)}

    def count(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    def branches(x: Tensor) -> Tensor:
        calls[0] += 1
        kept["mean"] = kept["mean"] * 0.9 + x.mean(0) * 0.1
        return x * 2 if bool(x.sum() > 0) else x * 3

    for fn in (count, branches):
        with hybridize(fn, torch.ones(2, 4), budget_s=3.0) as hybrid:
            assert hybrid.report.chosen in ("eager", "compiled")
        assert calls == [0]
        assert torch.equal(kept["mean"], torch.zeros(4))
