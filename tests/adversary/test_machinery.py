"""The adversary itself: its programs run, it sees what is wrong, and it makes what fails small."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adversary import judging, rounding, worker
from adversary.children import Child
from adversary.comparing import differences
from adversary.devices import moved
from adversary.grammar import catalogue, general
from adversary.judging import judge
from adversary.making import make
from adversary.portraits import Portrait
from adversary.program import Call, Change, Program, Use, from_json, to_json
from adversary.rendering import render
from adversary.scripts import script
from adversary.shrinking import shrink
from adversary.worlds import World, run_plain_call
from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError

SEEDS = st.integers(min_value=0, max_value=1 << 32)
PURPOSES = st.sampled_from(["call", "step"])
PLAIN = Program(0, "call", (), (Call(), Call()))
PATIENT_S = 280.0
"""Of a child that will answer, on a host however busy; less than the test's own limit."""


def judged(
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[World, Any], Any],
) -> judging.Verdict:
    """The verdict on a made-up mode, which runs `run` for every call."""

    @contextmanager
    def in_mode(world: World, _mode: str) -> Iterator[None]:
        world.run = lambda x: run(world, x)
        yield

    monkeypatch.setattr(judging, "in_mode", in_mode)
    path = tmp_path / "program.py"
    path.write_text(render(program))
    return judge(program, path, "call:made up")


def faithful(world: World, x: Any) -> Any:
    with torch.no_grad():
        return world.w.model(x)


def wrong(world: World, x: Any) -> Any:
    return faithful(world, x) * 1.01


def transposing(world: World, x: Any) -> Any:
    return faithful(world, x).t().contiguous().t()


def with_gradients(world: World, x: Any) -> Any:
    return world.w.model(x)


def drawing(world: World, x: Any) -> Any:
    torch.rand(())
    return faithful(world, x)


def writing(world: World, x: Any) -> Any:
    world.w.model.head.bias.data.add_(1.0)
    return faithful(world, x) - 1.0


def remembering(world: World, x: Any) -> Any:
    world.w.model.seen = True
    return faithful(world, x)


def raising(_world: World, _x: Any) -> Any:
    raise ValueError("no")


def refusing(_world: World, _x: Any) -> Any:
    raise CaptureError("no")


def refusing_late(world: World, x: Any) -> Any:
    writing(world, x)
    raise CaptureError("no")


@pytest.mark.parametrize(
    ("run", "outcome", "kind"),
    [
        (faithful, "equal", ""),
        (refusing, "refused", ""),
        (wrong, "failed", "result: value"),
        (transposing, "failed", "result: stride"),
        (with_gradients, "failed", "result: requires_grad"),
        (drawing, "failed", "torch.get_rng_state(): value"),
        (writing, "failed", "state: value"),
        (remembering, "failed", "state: appeared"),
        (refusing_late, "failed", "refused, but state: value"),
        (raising, "failed", "raises ValueError"),
    ],
)
def test_what_a_mode_does_wrong_is_seen(
    run: Any, outcome: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong number, stride or flag, and state that should not have changed; a refusal is none of these."""
    verdict = judged(PLAIN, tmp_path, monkeypatch, run)
    assert (verdict.outcome, verdict.kind) == (outcome, kind), verdict.detail


def drawn(value: torch.Tensor) -> dict[str, Any]:
    portrait = Portrait(with_gradients=False)
    portrait.draw("result", value)
    return portrait.leaves


def test_what_rounding_does_is_no_difference_and_more_than_that_is() -> None:
    """A saturated tanh amplifies the last bits; a factor, it does not hide. Random numbers stay."""
    x = torch.linspace(6.0, 7.0, 32)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return (1.0 - torch.tanh(x).square()) * 1e4

    state = torch.get_rng_state()
    others = []
    for seed in rounding.SEEDS:
        with rounding.OtherRounding(seed):
            others.append(drawn(slope(x)))
    assert torch.equal(torch.get_rng_state(), state)
    wanted, exact = drawn(slope(x)), drawn(slope(x.double()).float())
    wrong = drawn(slope(x.double()).float() * 3.0)
    assert differences(wanted, exact, is_narrow=False)
    assert not differences(wanted, exact, is_narrow=False, others=others)
    assert differences(wanted, wrong, is_narrow=False, others=others)
    now = judging.Ambient.now()
    sides = {
        "wanted_ambient": now,
        "got_ambient": now,
        "is_narrow": False,
        "others": lambda: others,
    }
    for got, outcome in ((exact, "unclear"), (wrong, "failed")):
        verdict = judging._compared("call:compiled", 0, wanted, got, **sides)
        assert verdict is not None
        assert verdict.outcome == outcome


def test_what_rounding_does_is_seen_from_the_same_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a call has set the default dtype meanwhile: the model is not made in that one."""
    calls = (Call(), Call(Change(None, "default dtype double")))
    found: list[dict[str, Any]] = []
    plain = judging._run_plainly

    def recorded(*arguments: Any) -> dict[str, Any] | None:
        left = plain(*arguments)
        found.extend([] if left is None else [left])
        return left

    @torch.no_grad()
    def off_by_one_in_double(world: World, x: Any) -> Any:
        return world.w.model(x) + (torch.get_default_dtype() == torch.float64)

    monkeypatch.setattr(judging, "_run_plainly", recorded)
    program = Program(0, "call", (), calls)
    verdict = judged(program, tmp_path, monkeypatch, off_by_one_in_double)
    assert (verdict.outcome, verdict.call) == ("failed", 1)
    assert [other["result"].dtype for other in found] == [torch.float32] * len(rounding.SEEDS)


def test_a_mode_that_accepts_what_eager_refuses_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where plain PyTorch raises, so must every mode, and it need not be the same error."""
    program = Program(
        0, "call", (), (Call(input="three dimensions"), Call(change=Change(None, "bias removed")))
    )
    assert judged(program, tmp_path, monkeypatch, faithful).outcome == "equal"
    program = Program(0, "call", (Use(0, "batch norm", "net"),), (Call(input="one row"),))
    assert judged(program, tmp_path, monkeypatch, raising).outcome == "equal"
    verdict = judged(program, tmp_path, monkeypatch, lambda _, x: x)
    assert verdict.kind == "no error where eager raises"


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "equal"), (1.01, "failed")])
def test_what_autograd_refuses_since_a_saved_value_was_written_is_compared_with_kept_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, outcome: str
) -> None:
    """A program keeps what it saves; only where plain PyTorch can, too, there is something to compare with."""
    change = Change(None, "block repeated")
    program = Program(0, "step", (Use(0, "integer buffer", "block"),), (Call(change=change),))

    def keeping(world: World, x: Any) -> Any:
        w = world.w
        w.optimizer.zero_grad(set_to_none=True)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = w.loss_fn(w.model, x) * factor
            loss.backward()
        w.optimizer.step()
        return loss.detach()

    verdict = judged(program, tmp_path, monkeypatch, keeping)
    assert verdict.outcome == outcome
    if outcome == "equal":
        assert verdict.detail.startswith("as with kept values, where eager raises RuntimeError")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")  # there are models that use them
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("name", catalogue.FEATURES)
def test_every_feature_runs_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    """With all its changes, one after the other, wherever it may stand."""
    feature = catalogue.FEATURES[name]
    calls = tuple(Call(Change(0, change)) for change in feature.changes)
    sites: Any = ("loss",) if feature.is_loss else ("net",) if feature.result else ("net", "block")
    for site in sites:
        program = Program(0, feature.purposes[0], (Use(0, name, site),), (Call(), *calls, Call()))
        path = tmp_path / f"{site}.py"
        path.write_text(render(program))
        world = World(path)
        if feature.purposes[0] == "call":
            run_plain_call(world)
        for index in range(len(program.calls)):
            world.run = world.run if feature.purposes[0] == "call" else loss_of(world)
            world.call(index)
        world.close()


def loss_of(world: World) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        return world.w.loss_fn(world.w.model, x).backward()

    return run


def test_tensors_of_a_class_of_the_program_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each world has such a class of its own, and torch computes with tensors of one class only."""
    program = Program(0, "call", (), (Call(input="labelled"),))
    assert judged(program, tmp_path, monkeypatch, faithful).outcome == "equal"
    assert judged(program, tmp_path, monkeypatch, wrong).kind == "result: value"


@given(seed=SEEDS, purpose=PURPOSES)
def test_a_seed_is_a_program(seed: int, purpose: Any) -> None:
    """Always the same one; written and read it is the same, and its text is Python."""
    program = make(seed, purpose)
    assert make(seed, purpose) == program
    assert from_json(to_json(program)) == program
    compile(render(program), "program", "exec")


@given(seed=SEEDS, purpose=PURPOSES, data=st.data())
def test_what_is_excluded_does_not_occur(seed: int, purpose: Any, data: Any) -> None:
    """Be it a feature, a change of one, a general change, an input, a context or an optimizer."""
    words = make(seed, purpose).words()
    if words:
        word = data.draw(st.sampled_from(words))
        assert word not in make(seed, purpose, {word}).words()


@given(seed=SEEDS, purpose=PURPOSES, data=st.data())
def test_shrinking_leaves_only_what_fails(seed: int, purpose: Any, data: Any) -> None:
    """Where a failure needs one word of the program, and what that stands on, nothing else is left."""
    program = make(seed, purpose)
    changes = [call.change for call in program.calls if call.change is not None]
    if not changes:
        return
    wanted = data.draw(st.sampled_from(changes))

    def is_failing(one: Program) -> bool:
        has_owner = wanted.number is None or any(use.number == wanted.number for use in one.uses)
        return has_owner and any(call.change == wanted for call in one.calls)

    small = shrink(program, is_failing)
    assert small.calls == (Call(wanted),)
    assert len(small.uses) == (wanted.number is not None)


def test_a_script_is_complete(tmp_path: Path) -> None:
    """It compiles, says what was found, and imports nothing of ours but ridgeline."""
    verdict = judging.Verdict(
        "call:script", "failed", "state: value", 1, 'w.model.a: "1" \\ 2', ("w.model.a",)
    )
    text = script(make(3, "call"), verdict)
    compile(text, "script", "exec")
    assert "state: value" in text
    assert "adversary" not in "".join(line for line in text.splitlines() if "import" in line)


def test_hangs_and_crashes_are_failures() -> None:
    """A child that does not answer in time is killed, and so is one that died."""
    unknown = Program(0, "call", (Use(0, "no such feature", "net"),), (Call(),))
    with Child(0.0, interprets=True) as child:
        assert child.examine(PLAIN, "call:eager", shrinks=False)[0].kind == "hangs"
    with Child(PATIENT_S, interprets=True) as child:
        verdict, _ = child.examine(unknown, "call:eager", shrinks=False)
        assert verdict.kind == "crashes"
        assert "KeyError: 'no such feature'" in verdict.detail


def test_children_choose_afresh_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user's cache remembers of plans is not read, and nothing is written there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Child(PATIENT_S, interprets=True) as child:
        verdict, _ = child.examine(make(0, "step"), "step:auto", shrinks=False)
        assert verdict.outcome == "equal", verdict.detail
    assert [*tmp_path.iterdir()] == []


def test_nothing_of_an_emulation_stays_in_a_process() -> None:
    """What is imported first in an emulation would offer graphs on the CPU ever after."""
    with Child(PATIENT_S, interprets=True) as child:
        for mode in ("call:graph@emulated", "call:auto"):
            verdict, _ = child.examine(PLAIN, mode, shrinks=False)
            assert verdict.outcome == "equal", verdict.detail


def test_a_refusal_that_leaves_no_device_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a failed capture, which fails all programs that come then; so does what breaks the judging."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    refused = judging.Verdict("call:graph@cuda", "refused")
    monkeypatch.setattr(torch, "randn", broken)
    for judging_it in (lambda: refused, broken):
        verdict = worker._with_device("call:graph@cuda", judging_it)
        assert verdict.outcome == "failed"
        assert verdict.kind.endswith(worker.LOST)
        assert "Offset increment" in verdict.detail


@pytest.mark.parametrize("name", general.OPTIMIZERS)
def test_optimizers_leave_gradients_alone(name: str) -> None:
    """In the forms that plain PyTorch takes on a GPU, too: torch's SGD with Nesterov's momentum does not."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    with emulated_graphs():
        optimizer = eval(general.OPTIMIZERS[name], {"torch": torch, "params": parameters})
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
    assert all(torch.equal(p.grad, torch.ones(3)) for p in parameters if p.grad is not None)


def test_a_program_moves_to_a_device() -> None:
    """Whatever makes tensors is told where; what is inside of its arguments, too."""
    text = "y = torch.full((), 7.0) + torch.rand(4, generator=torch.Generator().manual_seed(5))"
    assert moved(text, "cpu") == text
    assert moved(text, "cuda") == (
        "y = torch.full((), 7.0, device='cuda') + torch.rand(4, generator="
        "torch.Generator(device='cuda').manual_seed(5), device='cuda')"
    )
    inside = "nn.Parameter(torch.eye(4)), torch.autocast('cpu', torch.float16)"
    assert moved(inside, "cuda") == (
        "nn.Parameter(torch.eye(4, device='cuda')), torch.autocast('cuda', torch.float16)"
    )


@given(seed=SEEDS, purpose=PURPOSES)
def test_a_program_on_another_device_is_the_same_text(seed: int, purpose: Any) -> None:
    """But for where things are made."""
    program = make(seed, purpose)
    text = render(program, "cuda")
    compile(text, "program", "exec")
    bare = text.replace(", device='cuda'", "").replace("device='cuda'", "")
    assert bare.replace("'cuda'", "'cpu'") == render(program)


def test_features_that_torch_does_not_put_together_are_no_failure(tmp_path: Path) -> None:
    """A teacher is a deep copy, which a weight that a hook has computed does not allow."""
    hooked, teacher = Use(0, "weight norm by a hook", "net"), Use(1, "teacher", "loss")
    program = Program(0, "step", (hooked, teacher), (Call(), Call()))
    path = tmp_path / "program.py"
    path.write_text(render(program))
    verdict = judge(program, path, "step:eager")
    assert verdict.outcome == "unclear"
    assert "support the deepcopy protocol" in verdict.detail
