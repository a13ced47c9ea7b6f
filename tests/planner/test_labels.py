"""What a reader sees of a plan: whatever the search varies is told, so that no two rows look alike."""

import msgspec
import pytest

from ridgeline.plan import Plan
from ridgeline.planner.labels import label

PLAIN = Plan(workers=2, threads=1)


@pytest.mark.parametrize(
    "knob",
    [
        {"workers": 4},
        {"threads": 2},
        {"execution": "graph"},
        {"precision": "bf16"},
        {"memory_format": "channels_last"},
        {"optimizer": "fused"},
        {"kernels": "combined"},
        {"random": "compiled"},
        {"accumulate": 2},
        {"sync": msgspec.structs.replace(PLAIN.sync, bucket_bytes=(1 << 20,))},
    ],
    ids=lambda knob: next(iter(knob)),
)
def test_a_label_tells_every_knob(knob: dict[str, object]) -> None:
    """Tables, notes and progress have one label, in which each knob shows."""
    assert label(msgspec.structs.replace(PLAIN, **knob)) != label(PLAIN)


def test_a_plain_plan_is_short() -> None:
    """Knobs at their plainest are left out."""
    assert label(Plan()) == "1 worker, eager"
