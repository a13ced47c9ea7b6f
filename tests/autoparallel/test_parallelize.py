"""`parallelize`: equal results, an honest choice, and what it does with calls that do not fit."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.autoparallel import search as home
from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.autoparallel.report import ParallelReport
from ridgeline.callables.calls.equivalence import CallComparison
from ridgeline.errors import CaptureError, EquivalenceError, PlanError


def chains(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x, y = (x @ x).tanh(), (y @ y).tanh()
    return x + y


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 16, generator=generator), torch.randn(16, 16, generator=generator)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a test say what each way takes; other ways take two seconds."""

    def use(**seconds: float) -> None:
        def turns(ways: Mapping[str, Any], *_: Any) -> dict[str, list[float]]:
            named = {name.replace(" ", "_"): name for name in ways}
            return {named[key]: [seconds.get(key, 2.0)] * 5 for key in named}

        monkeypatch.setattr(home, "take_turns", turns)

    return use


# Results.


def test_results_are_those_of_the_function(inputs: tuple[Tensor, Tensor]) -> None:
    """On several lanes the result is the function's, exactly, for other values too."""
    with parallelize(chains, inputs, mode="parallel", lanes=2) as parallel:
        assert parallel.report.lanes == 2
        for scale in (1.0, -0.5, 3.0):
            x, y = inputs[0] * scale, inputs[1] - scale
            assert torch.equal(parallel(x, y), chains(x, y))
        assert parallel.report.counters == {}


def test_a_training_step_is_parallelized_with_its_backward() -> None:
    """Loss, gradients and parameters go on as those of the plain step."""

    def make() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def forward_and_backward(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss

        return net, lambda run, x: _step(run, optimizer, x), forward_and_backward

    net, advance, plain = make()
    twin, advance_twin, also_plain = make()
    with parallelize(plain, torch.randn(4, 8), mode="parallel", lanes=2) as parallel:
        for seed in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(advance(parallel, x), advance_twin(also_plain, x))
        assert parallel.report.counters == {}
        # Gradients that are there already are added to, which was not traced.
        parallel(x)
        parallel(x)
        assert parallel.report.counters == {"gradients": 1}
        also_plain(x), also_plain(x)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.grad, theirs.grad)


def _step(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = run(x).detach()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_trying_leaves_state_and_random_numbers_alone() -> None:
    """Whatever was compared and timed, buffers, parameters and the generator are as before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(8, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    with torch.no_grad(), parallelize(net, x):
        pass
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_autograd_goes_through_a_parallelized_module() -> None:
    """Backward of the result gives the module's own gradients but for rounding, also those of inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    frozen = net[0].bias.requires_grad_(False)
    twin = copy.deepcopy(net)
    x = torch.randn(8, 4, requires_grad=True)
    with parallelize(net, x, mode="parallel", lanes=2) as parallel:
        for scale in (1.0, 2.0):
            for model, run in ((net, parallel), (twin, twin)):
                model.zero_grad()
                given = (x * scale).detach().requires_grad_()
                loss = run(given).square().sum()
                (loss * 3).backward()
                model.input_grad = given.grad
            assert torch.allclose(net.input_grad, twin.input_grad, atol=1e-6)
            for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                assert (
                    torch.allclose(mine.grad, theirs.grad, atol=1e-6)
                    if mine is not frozen
                    else True
                )
            assert frozen.grad is None
        for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.allclose(mine, theirs)
        with torch.no_grad():
            assert torch.allclose(parallel(x), twin(x), atol=1e-6)
        assert parallel.report.counters == {}
        frozen.requires_grad_(True)
        parallel(x).sum().backward()
        assert frozen.grad is not None
        assert parallel.report.counters == {"changed": 1}


@pytest.mark.parametrize("mode", ["serial", "parallel"])
def test_results_that_nobody_uses_give_no_gradients(mode: str) -> None:
    """No zeros either, which momentum and weight decay follow, and which are none times an infinite slope."""
    torch.manual_seed(0)
    trunk, used, unused = (nn.Linear(4, 4) for _ in range(3))
    nn.init.zeros_(unused.weight)
    nn.init.zeros_(unused.bias)
    parts = nn.ModuleList([trunk, used, unused])

    def losses(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = trunk(x)
        return used(hidden).square().mean(), unused(hidden).square().sum().sqrt()

    x, found = torch.randn(8, 4), []
    with parallelize(losses, x, mode=mode, lanes=2) as parallel:
        for run in (losses, parallel):
            parts.zero_grad()
            run(x)[0].backward()
            found.append([parameter.grad for parameter in parts.parameters()])
        assert parallel.report.counters == {}
    assert found[1][-2:] == [None, None]
    for mine, theirs in zip(found[1][:-2], found[0][:-2], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


# The choice.


def test_the_fastest_measured_way_is_used(
    inputs: tuple[Tensor, Tensor], timed: Callable[..., None]
) -> None:
    """A gain that was measured is taken, and the report has figures, bounds and the reason."""
    timed(as_written=1.1, serial=1.0, concurrent=0.5)
    with parallelize(chains, inputs, lanes=2) as parallel:
        report = parallel.report
        assert (report.chosen, report.lanes) == ("concurrent", 2)
        assert (report.serial_s, report.measured_s, report.speedup) == (1.0, 0.5, 2.0)
        assert report.reason == (
            "concurrent is the fastest measured: 500 ms against 1.00 s serially, 2.00 times faster"
        )
        assert 0 < report.bounds.limit_s <= report.predicted_s
        assert parallel.schedule is not None
        assert parallel.schedule.num_lanes == 2
        parallel(*inputs)
        assert {span.index for span in parallel.timeline().spans} == {0, 1}


def test_where_nothing_is_gained_it_runs_as_written(
    inputs: tuple[Tensor, Tensor], timed: Callable[..., None]
) -> None:
    """No gain, no lanes: the function itself runs, and the report says why."""
    timed(as_written=1.0, serial=1.0, concurrent=1.25)
    with parallelize(chains, inputs, lanes=2) as parallel:
        report = parallel.report
        assert report.chosen == "as written"
        assert report.reason == (
            "nothing is gained: the best other way, concurrent, takes 1.25 s against 1.00 s serially"
        )
        assert parallel.schedule is None
        assert torch.equal(parallel(*inputs), chains(*inputs))
        with pytest.raises(PlanError) as caught:
            parallel.timeline()
        assert str(caught.value) == (
            "wanted the timeline of a call on threads, got a function that runs 'as written' on cpu; use "
            "torch.profiler for what happens on a device"
        )


def test_a_gain_over_the_program_that_is_none_over_the_function_is_not_claimed(
    inputs: tuple[Tensor, Tensor], timed: Callable[..., None]
) -> None:
    """Lanes that only make up for what tracing cost are not used."""
    timed(as_written=0.9, serial=2.0, concurrent=1.0)
    with parallelize(chains, inputs, lanes=2) as parallel:
        assert parallel.report.chosen == "as written"
        assert parallel.report.serial_s == 0.9


def test_wrong_results_are_not_used(
    inputs: tuple[Tensor, Tensor], timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that differs from the function is out, whatever its speed; requested by name it is an error."""
    timed(as_written=1.0, serial=1.0, concurrent=0.1)
    real = home.compare

    def compare(fn: Any, way: Any, *rest: Any) -> CallComparison:
        if hasattr(way, "schedule"):
            return CallComparison(0.5, 1e-4, "tensor 0 of call 1")
        return real(fn, way, *rest)

    monkeypatch.setattr(home, "compare", compare)
    with parallelize(chains, inputs, lanes=2) as parallel:
        assert parallel.report.chosen == "as written"
        row = parallel.report.row("concurrent")
        assert row is not None
        assert row.note == "not used: differs in tensor 0 of call 1, accepted are 1e-04"
    with pytest.raises(EquivalenceError) as caught:
        parallelize(chains, inputs, lanes=2, mode="parallel")
    assert str(caught.value) == (
        "wanted a way on several lanes with the results of the function, got none: concurrent not used: "
        "differs in tensor 0 of call 1, accepted are 1e-04; use mode='serial'"
    )


def test_a_chain_has_nothing_to_run_side_by_side() -> None:
    """A function without independent parts runs serially; several lanes cannot be had."""
    with parallelize(lambda x: x.sin().cos().exp(), torch.ones(4)) as parallel:
        assert parallel.report.lanes == 1
    with pytest.raises(PlanError) as caught:
        parallelize(lambda x: x.sin().cos().exp(), torch.ones(4), mode="parallel")
    assert str(caught.value) == (
        "wanted a way on several lanes, got a function with no independent parts (or lanes=1); use "
        "mode='auto', which runs it serially"
    )


# Calls that do not fit.


def test_other_calls_run_the_function_and_are_counted() -> None:
    """Another shape, another training flag, replaced parameters: the function itself runs, and is counted."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    x = torch.randn(2, 4)
    with torch.no_grad(), parallelize(net, x, mode="serial") as parallel:
        assert parallel.report.chosen == "serial"
        assert torch.equal(parallel(x), net(x))
        assert parallel(torch.randn(3, 4)).shape == (3, 4)
        net.train()
        parallel(x)
        net.eval()
        net[0].weight = nn.Parameter(torch.zeros(4, 4))
        assert torch.equal(parallel(x), net(x))
        assert parallel.report.counters == {"other_shapes": 1, "changed": 2}


def test_an_input_that_is_written_state_is_not_traced() -> None:
    """The program knows input and state as two variables, so a call that gives it both in one is the function's."""
    state = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        state.add_(1)
        return state + x

    with parallelize(fn, torch.ones(3), mode="serial") as parallel:
        assert parallel(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        assert parallel(state).tolist() == [4.0, 4.0, 4.0]
        assert parallel.report.counters == {"other_shapes": 1}


class Counted(torch.autograd.Function):
    """Counts its calls, which the compiler does not read."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Twice the input."""
        Counted.count += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Twice the gradient."""
        return grads[0] * 2


def test_a_refused_function_has_changed_nothing() -> None:
    """What the trace counted is undone."""
    Counted.count = 0
    with pytest.raises(CaptureError):
        parallelize(lambda x: Counted.apply(x) * len(type(x).__name__), torch.ones(3))
    assert Counted.count == 0


def test_wrong_use_is_refused(inputs: tuple[Tensor, Tensor]) -> None:
    """Unknown modes, lanes below one, foreign devices and calls after close() are named."""

    def message(error: type[Exception], **options: Any) -> str:
        with pytest.raises(error) as caught:
            parallelize(chains, inputs, **options)
        return str(caught.value)

    assert message(PlanError, mode="fast") == (
        "wanted mode 'auto', 'serial' or 'parallel' for parallelize, got 'fast'; use one of these"
    )
    assert message(PlanError, lanes=0) == (
        "wanted at least 1 lane, got lanes=0 for parallelize; raise it"
    )
    assert message(PlanError, lanes=1.5) == (
        "wanted at least 1 lane, got lanes=1.5 for parallelize; give a whole number"
    )
    assert message(PlanError, devices=["gpu"]) == (
        "wanted devices such as ['cuda:0', 'cpu'] for parallelize, got devices=['gpu']; name each"
    )
    # Of more lanes than operations the others would be empty.
    assert parallelize(torch.sin, inputs[0], lanes=10**30, mode="serial").report.operations == 1
    with pytest.raises(
        PlanError, match=r"^wanted a function or module to parallelize, got NoneType; give"
    ):
        parallelize(None, inputs)  # type: ignore[arg-type]
    assert message(PlanError, devices=["meta"]) == (
        "wanted the function's tensors on devices=['meta'], got operations on cpu; add it to devices, or "
        "move the tensors with .to(device)"
    )
    with pytest.raises(CaptureError, match="must not depend on the values of tensors"):
        parallelize(lambda x: x * x.sum().item(), inputs[0])
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    with pytest.raises(CaptureError) as refused:
        parallelize(lambda x: optimizer.step() or x + 1, inputs[0])
    assert str(refused.value) == (
        "wanted a function without an optimizer, got a step of SGD; let it step after the call, or use "
        "rl.TrainStep, which keeps learning rates as tensors"
    )
    parallel = parallelize(chains, inputs, mode="serial")
    parallel.close()
    with pytest.raises(PlanError) as caught:
        parallel(*inputs)
    assert str(caught.value) == (
        "wanted to call a parallelized function, got one that was closed; keep it open for calls"
    )


def test_the_report_is_a_table_and_a_file(
    inputs: tuple[Tensor, Tensor], timed: Callable[..., None], tmp_path: Any
) -> None:
    """The repr shows every way with its figures; the file holds the same report."""
    timed(as_written=1.0, serial=1.0, concurrent=0.5)
    with parallelize(chains, inputs, lanes=2) as parallel:
        text = repr(parallel.report)
        assert "chains on cpu: 17 operations, 16 edges" in text
        (line,) = (line for line in text.splitlines() if line.startswith("  *"))
        assert line.split()[:4] == ["*", "concurrent", "2", "1"]
        assert "no schedule is shorter than" in text
        assert repr(parallel) == "Parallel(chains, concurrent, cpu)"
        path = parallel.report.save(tmp_path / "report.json")
        assert ParallelReport.load(path) == parallel.report


@pytest.mark.parametrize("fn", [lambda a: a, lambda a: None, lambda a: (a, 3)])
def test_a_function_without_operations(fn: Callable[[Tensor], Any]) -> None:
    """There is nothing to spread: `auto` runs it as it is, and `parallel` says so."""
    x = torch.ones(3)
    assert str(parallelize(fn, (x,))(x)) == str(fn(x))
    with pytest.raises(PlanError, match="got a function with no independent parts"):
        parallelize(fn, (x,), mode="parallel")


def test_tracing_leaves_nothing_in_the_cache_of_autocast() -> None:
    """A cast without data there would be the user's own in the rest of the block; and dtypes are told apart."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parallel = parallelize(lambda x: model(x) + model(2 * x), (x,))
        assert type(model(x)) is Tensor
        assert torch.equal(parallel(x), model(x) + model(2 * x))
    with torch.autocast("cpu", dtype=torch.float16):
        assert parallel(x).dtype == torch.float16
