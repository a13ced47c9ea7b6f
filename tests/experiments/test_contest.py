"""A contest: contenders alike, checked, timed in turns; what fails or finds no time is a row, too."""

import itertools
from typing import Any

import pytest
import torch
from rows import row_of
from tiny_cases import calling, contest, eager, fail, tiny
from torch import Tensor, nn

from printed import as_text
from ridgeline.errors import CaptureError
from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.entrant import Contender, Entrant, Remarks
from ridgeline.experiments.hybrid.limit import CountFlops
from ridgeline.experiments.hybrid.text import case_text
from ridgeline.experiments.plain_step import PlainStep


def test_models_are_alike() -> None:
    """Every contender begins with the same weights and meets the same batches; random state stays."""
    case = tiny("step")
    before = torch.get_rng_state()
    first, second = case.model_on_device(), case.model_on_device()
    assert torch.equal(first[0].weight, second[0].weight)
    assert all(
        torch.equal(a, b)
        for one, other in zip(case.batches(), case.batches(), strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert not torch.equal(case.batches()[0][0], case.batches()[1][0])
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_limit_the_figures_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the limit cannot be found the case says why, and keeps its times."""
    monkeypatch.setattr(
        "ridgeline.experiments.hybrid.contest.limit_of",
        lambda *arguments: fail(RuntimeError("no such operator")),
    )
    case = tiny("callable")
    result = contest(case, eager(case))
    note = "no limit, for counting FLOP failed: RuntimeError: no such operator"
    assert (result.limit, result.notes) == (None, (note,))
    assert row_of(result, "eager").seconds is not None
    assert note in as_text(case_text(result))


@pytest.mark.parametrize("purpose", ["callable", "step"])
def test_same_results(purpose: str) -> None:
    """Contenders that compute the same differ by nothing; times, ratios and a limit are there."""
    case = tiny(purpose)
    again = eager(case)._replace(name="again")
    result = contest(case, eager(case), again)
    assert [row.status for row in result.rows] == ["measured", "measured"]
    assert [row.difference for row in result.rows] == [0.0, 0.0]
    row = row_of(result, "again")
    assert row.times_faster["eager"].unit == "x"
    assert row.seconds is not None
    assert row.seconds.low <= row.seconds.value <= row.seconds.high
    assert (result.calls, row_of(result, "eager").times_faster["eager"].value) == (2, 1.0)
    assert result.turns >= 3
    assert result.limit is not None


def test_gain_within_the_noise_is_none() -> None:
    """Calls that earn the preparation back are told only of what was faster in most of the turns."""
    case = tiny("callable")
    slow = calling(lambda model, inputs: max((model(*inputs) for _ in range(20)), key=id), "slow")
    result = contest(
        case, slow._replace(name="eager", kind="peer"), slow, eager(case)._replace(name="fast")
    )
    assert row_of(result, "fast").times_faster["eager"].low > 1.0
    assert row_of(result, "fast").break_even is not None
    same = row_of(result, "slow")
    assert (same.break_even is None) == (same.times_faster["eager"].low <= 1.0)


def test_other_results_show() -> None:
    """Outputs that are off by a hundredth of the largest are told so."""
    case = tiny("callable")
    off = calling(lambda model, inputs: (out := model(*inputs)) + 0.01 * out.abs().max())
    row = row_of(contest(case, eager(case), off), "odd")
    assert row.difference == pytest.approx(0.01, rel=0.01)


def test_another_training_shows() -> None:
    """Parameters after some steps are compared, over the change that training made."""
    case = tiny("step")

    def make(case: HybridCase, budget_s: float) -> Entrant:
        model = case.model_on_device()
        return Entrant(model=model, run=PlainStep(model, model, case.loss_fn, _half(model)))

    def _half(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    row = row_of(contest(case, eager(case), Contender("half", "ridgeline", 0, make)), "half")
    assert row.difference == pytest.approx(0.5, rel=0.1)


def test_overwritten_outputs_show() -> None:
    """An output that a later call changes is told so; one that is new each time is not."""
    case = tiny("callable")
    static = torch.zeros(4, 3)
    shared = calling(lambda model, inputs: static.copy_(model(*inputs)))
    result = contest(case, eager(case), shared)
    assert [row.overwrites for row in result.rows] == [False, True]
    assert result.fastest("ridgeline", may_overwrite=False) is None
    assert result.fastest("ridgeline") is row_of(result, "odd")


def test_inputs_that_must_be_loaded() -> None:
    """What reads its inputs from tensors of its own is compared on the same inputs, and timed without."""
    case = tiny("callable")
    static = torch.zeros(4, 8)
    loaded = []

    def load(inputs: tuple[Tensor, ...]) -> None:
        loaded.append(static.copy_(inputs[0]))

    row = row_of(
        contest(case, eager(case), calling(lambda model, _: model(static), load=load)), "odd"
    )
    assert row.difference == 0.0
    assert len(loaded) == len(case.batches()) + 2


def test_failure_is_a_row() -> None:
    """A contender that cannot be made is a row with its reason, and the others go on."""
    case = tiny("callable")
    failing = Contender(
        "odd", "ridgeline", 0, lambda case, budget_s: fail(CaptureError("wanted a, got b"))
    )
    result = contest(case, eager(case), failing, eager(case)._replace(name="again"))
    assert [row.status for row in result.rows] == ["measured", "failed", "measured"]
    assert row_of(result, "odd").reason == "CaptureError: wanted a, got b"
    assert row_of(result, "odd").seconds is None


def test_failure_while_timing_is_a_row() -> None:
    """A contender that breaks after its check loses its times and is closed, once."""
    case = tiny("callable")
    closed = []
    calls = itertools.count()

    def act(model: nn.Module, inputs: Any) -> Any:
        return fail(RuntimeError("broken")) if next(calls) > 12 else model(*inputs)

    odd = calling(act, close=lambda: closed.append(1))
    result = contest(case, eager(case), odd, eager(case)._replace(name="again"))
    assert row_of(result, "odd").reason == "RuntimeError: broken"
    assert (row_of(result, "odd").seconds, closed) == (None, [1])
    assert set(row_of(result, "again").times_faster) == {"eager", "again"}


def test_our_own_interrupt_is_no_row() -> None:
    """Ctrl-C ends the experiment, and everything that was made is closed."""
    case = tiny("callable")
    closed = []
    fine = calling(lambda model, inputs: model(*inputs), "fine", close=lambda: closed.append(1))
    stop = Contender("stop", "ridgeline", 0, lambda case, budget_s: fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        contest(case, eager(case), fine, stop)
    assert closed == [1]


def test_time_limit_leaves_out() -> None:
    """What there is no time for is a row that says so; eager is measured in any case."""
    case = tiny("callable", compile_s=60.0)
    slow = calling(lambda model, inputs: model(*inputs), "slow", compilations=1)
    quick = calling(lambda model, inputs: model(*inputs), "quick")
    result = contest(case, eager(case), slow, quick, limit_s=30.0)
    assert [row.status for row in result.rows] == ["measured", "skipped", "measured"]
    assert row_of(result, "slow").reason == "no time left for it in the 30 s of this case"
    result = contest(case, eager(case), quick, limit_s=0.0)
    assert [row.status for row in result.rows] == ["measured", "skipped"]


def test_without_eager_nothing_is_compared() -> None:
    """If the program itself fails, the case is its reasons, and no error of ours."""
    case = tiny("callable", make_model=lambda: nn.Linear(5, 5))
    result = contest(case, eager(case), calling(lambda model, inputs: model(*inputs)))
    assert [row.status for row in result.rows] == ["failed", "skipped"]
    assert row_of(result, "eager").reason.startswith("RuntimeError: mat1 and mat2 shapes")
    assert row_of(result, "odd").reason == "there is no eager contender to compare with"
    assert (result.turns, result.limit) == (0, None)
    assert "no eager contender" in as_text(case_text(result))


def test_what_an_entrant_says() -> None:
    """What `auto` chose and what a contender notes are asked at the end, and kept."""
    case = tiny("callable")
    said = []
    odd = calling(
        lambda model, inputs: said.append(1) or model(*inputs),
        remarks=lambda: Remarks("fast", (f"{len(said) > 6}",)),
    )
    row = row_of(contest(case, eager(case), odd), "odd")
    assert (row.chosen, row.notes) == ("fast", ("True",))


def test_threads_and_gradients_are_put_back() -> None:
    """A case runs with its own number of threads, inference without gradients; afterwards all is as before."""
    before = torch.get_num_threads()
    seen = []

    def act(model: nn.Module, inputs: Any) -> Any:
        seen.append((torch.get_num_threads(), torch.is_grad_enabled()))
        return model(*inputs)

    case = tiny("callable", threads=before + 1)
    contest(case, eager(case), calling(act))
    assert set(seen) == {(before + 1, False)}
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (before, True)


def test_flops_of_the_limit() -> None:
    """The limit counts the matrix products of what runs: forward, and with it twice as many backward."""
    x = torch.randn(4, 8, requires_grad=True)
    model = nn.Linear(8, 16)
    with CountFlops() as counted:
        out = model(x)
    assert counted.total == 2 * 4 * 8 * 16
    with CountFlops() as counted:
        out.sum().backward()
    assert counted.total == 2 * 2 * 4 * 8 * 16
