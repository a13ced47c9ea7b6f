"""Buckets that are held: parameters are updated when they are read, to the bits of steps that wait for all."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from ridgeline.errors import PlanError
from ridgeline.execution import check_plan
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.sync.unread import UnreadParameter, make_plain, make_unread
from ridgeline.synchronisation import launch_order, num_held
from torchrun import torchrun

HERE = Path(__file__).parent
CASES = (
    "SGD", "Adam", "AdamW", "ASGD", "tied", "accumulated", "read", "saved", "fails", "bf16", "skipped",
    "skipped by one", "added", "by two steps", "state cleared", "state zeroed", "state replaced",
    "parameter removed", "parameter moved", "group removed",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("held") / "found.json"
    torchrun(2, HERE / "held_cases.py", output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_steps_that_wait(found: dict[str, Any], case: str) -> None:
    """Losses, parameters, buffers and the optimizer's state, to the bit, however many buckets are held."""
    plain = found[case]["0"]
    assert plain["num_unread"] == 0
    for held in ("1", "2", "99"):
        assert found[case][held]["values"] == plain["values"]
        assert found[case][held]["num_unread"] > 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "hooks",
            "got SGD with hooks on its steps, or methods in their place; change that, or hold none",
        ),
        (
            "script",
            "got 0 compiled by TorchScript, which reads parameters without notice; change that, or hold none",
        ),
        ("clipped", "wanted clip_norm=None for sync.options['held'], got 1.0"),
        ("fused", "wanted an optimizer that is not fused for sync.options['held'], got fused SGD"),
        (
            "Adafactor",
            "got Adafactor, which may look at all parameters; use one of those, or hold none",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(found: dict[str, Any], case: str, words: str) -> None:
    """With the reason."""
    assert words in found["refused"][case]


def test_who_reads_the_optimizers_state_finds_it_up_to_date(found: dict[str, Any]) -> None:
    """To the bits of steps that wait for all; `wait` does nothing before a batch, then and behind `close`."""
    held, plain = found["waited"]["2"], found["waited"]["0"]
    assert held["num_unread"] > 0 == plain["num_unread"]
    assert held["num_left"] == plain["num_left"] == 0
    assert set(held["before"]) == set(held["after"]) == {4.0}
    assert set(plain["before"]) == set(plain["after"]) == {4.0}
    assert held["values"] == plain["values"]
    assert found["waited"]["outside"] == [True, True]


def test_who_reads_during_an_update_waits_for_it(found: dict[str, Any]) -> None:
    """Parameters are unread by other threads until their update is over; half of one is nobody's."""
    told = found["read meanwhile"]
    assert len(told["unread"]) == len(told["new"]) > 0
    assert all(told["unread"])
    assert all(told["new"])


def test_unread_parameters_have_the_kernels_of_plain_ones() -> None:
    """Their update is to be that of a step that waits, and torch chooses kernels by class."""
    plain, unread = (nn.Parameter(torch.ones(2)) for _ in range(2))
    make_unread([unread], lambda: None)
    with torch._C.DisableTorchFunctionSubclass():
        chosen = [
            _default_to_fused_or_foreach([p], differentiable=False, use_fused=True)
            for p in (plain, unread)
        ]
    assert chosen == [(True, False)] * 2


def test_a_timeline_tells_where_a_step_waits_and_updates(found: dict[str, Any]) -> None:
    """Inside of the forward pass, which is resumed; a step that waits does so once, behind backward."""
    held, plain = (found["waited"][number]["frames"] for number in ("2", "0"))
    late = held[: held.index("backward/0")]
    assert late.count("wait") == late.count("optimizer") == 2
    assert late[0] == late[-1] == "forward"
    assert held[-2:] == plain[-2:] == ["wait", "optimizer"]
    assert plain.count("wait") == plain.count("optimizer") == plain.count("forward") == 1


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"execution": "graph"},
            "wanted execution='eager' for sync.options['held'], got 'graph' in the plan",
        ),
        (
            {"compression": "bf16"},
            "wanted sync.compression='none' for sync.options['held'], got 'bf16'",
        ),
        ({"every": 4}, "wanted sync.every=1 for sync.options['held'], got 4 in the plan"),
    ],
)
def test_plans_that_cannot_hold_are_refused(knobs: dict[str, Any], words: str) -> None:
    """Be it to run them or to predict them."""
    of_sync = {name: value for name, value in knobs.items() if name != "execution"}
    sync = Sync(options={"held": 2}, **of_sync)
    plan = Plan(workers=2, sync=sync, execution=knobs.get("execution", "eager"))
    with pytest.raises(PlanError) as refusal:
        check_plan(plan, "cuda" if "execution" in knobs else "cpu")
    assert words in str(refusal.value)


def test_the_first_layers_overtake() -> None:
    """Held buckets leave last one first; the first bucket is never held."""
    assert launch_order(5, 3) == (0, 1, 4, 3, 2)
    assert num_held(Sync(options={"held": 99}), 5) == 4
    assert num_held(Sync(options={"held": 99}), 1) == 0
    assert num_held(Sync(), 5) == 0


def test_every_reading_updates_first() -> None:
    """What torch computes, copies or shows of a parameter is new; its shape is known without."""
    readings = (
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p.grad,
        lambda p: p.data_ptr(),
        lambda p: nn.functional.linear(torch.ones(1, 2), p),
        lambda p: torch.stack([p, p]),
        lambda p: torch._foreach_norm([p]),
        copy.deepcopy,
        pickle.dumps,
    )
    for read in readings:
        parameter = nn.Parameter(torch.ones(2, 2))
        calls: list[int] = []

        def update(parameter: nn.Parameter = parameter, calls: list[int] = calls) -> None:
            calls.append(1)
            make_plain([parameter])

        make_unread([parameter], update)
        assert parameter.shape == (2, 2)
        assert parameter.requires_grad
        assert type(parameter) is UnreadParameter
        assert not calls
        found = read(parameter)
        assert type(found) is not UnreadParameter
        assert calls == [1]
        assert type(parameter) is nn.Parameter
