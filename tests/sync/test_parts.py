"""Compiled steps are cut where buckets end: gradients leave while backward goes on, and are the same."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ridgeline.execution import is_compiled_in_parts
from ridgeline.plan import Plan, Sync, cut_buckets
from ridgeline.programs.parts import IN_ONE, parts_of
from torchrun import torchrun


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers found in all cases."""
    output = tmp_path_factory.mktemp("parts") / "told.json"
    torchrun(2, Path(__file__).parent / "parts_worker.py", output)
    return json.loads(output.read_text())


CASES = ("a part a layer", "two micro-batches", "one bucket", "recomputed")


@pytest.mark.parametrize("case", CASES)
def test_parts_compute_what_the_eager_step_does(told: dict[str, Any], case: str) -> None:
    """Parameters and buffers after some steps in double precision, with a shared weight and a frozen one."""
    assert told[case]["gap"] < 1e-12


@pytest.mark.parametrize("case", ["a part a layer", "two micro-batches"])
def test_buckets_leave_before_backward_is_over(told: dict[str, Any], case: str) -> None:
    """Behind the backward pass of each part its bucket leaves, and then comes the part before."""
    events = [event for event in told[case]["events"] if event != "broadcast_buffers"]
    pairs = [
        event
        for part in range(4)
        for event in (f"backward of part {3 - part}", f"all_reduce/{part}")
    ]
    assert events[-9:] == [*pairs, "all_reduce/4"]
    early = (
        [f"backward of part {3 - part}" for part in range(4)] if case == "two micro-batches" else []
    )
    assert events[:-9] == early


@pytest.mark.parametrize("case", ["one bucket", "recomputed"])
def test_what_is_not_cut_is_one_program(told: dict[str, Any], case: str) -> None:
    """Where all gradients are sent at once, and where torch does not cut: then a note says why."""
    events = [event for event in told[case]["events"] if event.startswith("backward")]
    assert events == ["backward of part 0"]
    reasons = [note.removeprefix(IN_ONE) for note in told[case]["notes"] if note.startswith(IN_ONE)]
    wanted = "it calls other graphs, which torch does not cut (checkpoints, say)"
    assert reasons == ([wanted] if case == "recomputed" else [])


def graph_of(widths: list[int]) -> fx.GraphModule:
    """What torch's compiler reads of linear layers one after the other."""
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs))
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, _: list[Tensor]) -> Any:
        found.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(torch.zeros(2, widths[0]))
    return found[0]


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=7),
    st.lists(st.integers(1, 6000), min_size=1, max_size=3),
)
def test_a_part_begins_where_its_bucket_is_complete(widths: list[int], limits: list[int]) -> None:
    """As many parts as buckets, in order; the last layer of bucket k begins the k-th part from the end."""
    graph = graph_of(widths)
    found = parts_of(graph, limits)
    layers = [node for node in found if node.op in ("call_function", "call_module")]
    sizes = [a * b * 4 for a, b in itertools.pairwise(widths)][::-1]
    cuts = cut_buckets([(size, "float32") for size in sizes], limits)
    assert list(found.values()) == sorted(found.values())
    assert set(found.values()) == set(range(len(cuts)))
    part_of_layer = [found[layer] for layer in layers][::-1]
    for number, bucket in enumerate(cuts):
        assert {part_of_layer[index] for index in bucket} == {len(cuts) - 1 - number}


@pytest.mark.parametrize(
    ("plan", "device", "wanted"),
    [
        (Plan(execution="compiled", workers=2), "cpu", True),
        (Plan(execution="compiled", workers=2), "cuda", True),
        (Plan(execution="compiled"), "cpu", False),
        (Plan(execution="regional", workers=2), "cpu", False),
        (Plan(execution="compiled+graph", workers=2), "cuda", False),
        (Plan(execution="compiled", workers=2, sync=Sync(every=8)), "cpu", False),
    ],
)
def test_who_is_cut(plan: Plan, device: str, wanted: bool) -> None:
    """One program per step that is called, whose gradients others wait for in every step."""
    assert is_compiled_in_parts(plan, device) is wanted
