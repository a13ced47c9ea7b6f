"""Parameters of types that not every collective takes, and refusals that leave nothing behind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchrun import torchrun

SCRIPT = Path(__file__).parent / "dtype_cases.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("dtypes") / "found.json"
    torchrun(2, SCRIPT, output)
    told: list[dict[str, Any]] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("algorithm", ["all_reduce", "ring"])
def test_complex_parameters_train(found: list[dict[str, Any]], algorithm: str) -> None:
    """As one process does with the samples of all."""
    assert all(one[f"complex, {algorithm}"]["error"] < 1e-6 for one in found)


@pytest.mark.parametrize("dtype", ["int16", "float8"])
def test_frozen_parameters_of_any_type_follow_the_first_worker(
    found: list[dict[str, Any]], dtype: str
) -> None:
    """At the start, and where a step writes them, at each exchange."""
    assert [one[dtype]["held"] for one in found] == [[2.0] * 3] * 2
    assert [one[f"{dtype}, written"]["held"] for one in found] == [[4.0] * 3] * 2


@pytest.mark.parametrize("algorithm", ["all_reduce", "sharded", "kvstore"])
def test_parameters_may_get_other_names(found: list[dict[str, Any]], algorithm: str) -> None:
    """By a parametrization between two steps; training goes on as that of one process."""
    assert all(one[f"changed, {algorithm}"]["error"] < 1e-6 for one in found)


def test_parameters_keep_their_type(found: list[dict[str, Any]]) -> None:
    """Buckets have that of the first step."""
    assert [one["changed, type"]["told"] for one in found] == [
        (
            "WorkloadError: wanted 0.bias to have its type of when the step was made, float32, got a gradient of "
            "float64; make the step again after model.to()"
        )
    ] * 2


def test_parameters_keep_their_shape(found: list[dict[str, Any]]) -> None:
    """Places in buckets, in a store and among common parameters have that of the first step."""
    for told in found:
        for one in told["changed, shape"]:
            assert re.fullmatch(
                r"WorkloadError: wanted 0\.(weight of shape \(2, 3\)|bias of shape \(2,\)), as when the step was "
                r"made, got \(4,( 3)?\); make the step again after changing shapes",
                one["told"],
            )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_parts_are_clipped_by_the_norm_of_all(found: list[dict[str, Any]], dtype: str) -> None:
    """Where one worker has no part, and where the square of the norm is beyond the type."""
    lengths = [one[f"clipped {dtype}"]["length"] for one in found]
    assert lengths == [pytest.approx(1.0, rel=1e-2)] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other", "wanted an optimizer of the model's parameters"),
        ("held", "got SGD with hooks on its steps"),
        (
            "compressed",
            "wanted real parameters for sync.compression='int8', got weight of complex64; use no compr",
        ),
    ],
)
def test_refusals_leave_no_hooks(found: list[dict[str, Any]], case: str, words: str) -> None:
    """On parameters that a script goes on to train otherwise."""
    for one in found:
        assert words in one[f"refused, {case}"]["told"]
        assert one[f"refused, {case}"]["num_hooks"] == 0
