"""Every codec trains over gloo, with two, three and four workers, as a step of one's own uses it."""

import json
from pathlib import Path
from typing import Any

import pytest
from codec_cases import KINDS, RESUMED
from test_codec_laws import CODECS

from torchrun import torchrun

SCRIPT = Path(__file__).parent / "codec_cases.py"
NAMES = tuple(f"{name} {options}" for name, options in CODECS)
FAR = 0.5
"""How far a parameter may be from that of plain training, after a few steps of 0.1."""


def start(folder: Path, workers: int) -> dict[str, Any]:
    """What the first of some workers found."""
    output = folder / "found.json"
    torchrun(workers, SCRIPT, output)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return start(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return start(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return start(tmp_path_factory.mktemp("four"), 4)


@pytest.mark.parametrize("workers", ["two", "three", "four"])
@pytest.mark.parametrize("name", NAMES)
def test_all_workers_hold_the_same_bits_near_plain_training(
    workers: str, name: str, request: pytest.FixtureRequest
) -> None:
    """In float32 and bfloat16, accumulated and clipped, and where a worker leaves parameters out."""
    found = request.getfixturevalue(workers)
    for kind, plain in found["none {}"].items():
        if kind in KINDS:
            told = found[name][kind]
            assert told["same"], kind
            assert told["finite"], kind
            pairs = zip(told["parameters"], plain["parameters"], strict=True)
            assert 0.0 < max(abs(a - b) for a, b in pairs) < FAR, kind


@pytest.mark.parametrize("workers", ["two", "three", "four"])
@pytest.mark.parametrize("name", ["none {}", *NAMES])
def test_bytes_of_a_step_are_those_predicted(
    workers: str, name: str, request: pytest.FixtureRequest
) -> None:
    """To the byte, in every kind of step; without compression as well."""
    for kind, told in request.getfixturevalue(workers)[name].items():
        if kind in KINDS:
            assert told["counted"] == told["predicted"], kind


@pytest.mark.parametrize("name", NAMES)
def test_a_group_trains_as_a_job_of_its_own(
    two: dict[str, Any], three: dict[str, Any], name: str
) -> None:
    """Two of three workers come to the bits of two."""
    assert three[name]["group"]["parameters"] == two[name]["plain"]["parameters"]


@pytest.mark.parametrize("name", [f"{name} {options}" for name, options in RESUMED])
def test_a_run_goes_on_where_it_was_stopped(two: dict[str, Any], name: str) -> None:
    """With the bits of a run that was not: what a codec remembers is in checkpoints."""
    assert two[name]["resumed"] == {
        "equal": True,
        "steps": ["step-0000024", "step-0000024"],
        "was_stopped": True,
    }
