"""Workers on two hosts train as on one, see the link between them, and predict what a step over it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from namespaces import torchrun

from ridgeline.experiments.namespaces import NamespaceNetwork, bytes_per_s
from torchrun import torchrun as torchrun_here

pytestmark = pytest.mark.alone  # times of one worker a core
SCRIPT = Path(__file__).parent / "trained_across.py"
LARGE_BYTES = 1 << 20
"""From this size on, an all-reduce over the link takes its time by the bytes."""


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def across(
    two_hosts: NamespaceNetwork, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the workers of two hosts found, by rank."""
    directory = tmp_path_factory.mktemp("across")
    torchrun(two_hosts, SCRIPT, directory, "measure")
    return written(directory)


@pytest.fixture(scope="module")
def on_one(across: object, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers of one host found; not at the same time."""
    directory = tmp_path_factory.mktemp("on_one")
    torchrun_here(2, SCRIPT, directory)
    return written(directory)


def test_two_hosts_train_as_one(across: list[dict[str, Any]], on_one: list[dict[str, Any]]) -> None:
    """Losses and parameters have the bits that two workers of one host give them."""
    for there, here in zip(across, on_one, strict=True):
        assert there["losses"] == here["losses"]
        assert there["bits"] == here["bits"]
    assert across[0]["bits"] == across[1]["bits"]
    assert across[0]["losses"] != across[1]["losses"]


def test_the_link_is_measured(across: list[dict[str, Any]], two_hosts: NamespaceNetwork) -> None:
    """Two workers send each byte of an all-reduce once: its bandwidth is that of the link, within 15 %."""
    assert two_hosts.rate is not None
    link = bytes_per_s(two_hosts.rate)
    large = [(size, seconds) for size, seconds in across[0]["all_reduce"] if size >= LARGE_BYTES]
    assert large
    for size, seconds in large:
        assert 0.85 * link <= size / seconds <= 1.15 * link, f"{size} bytes took {seconds} s"
    assert across[0]["all_reduce"] == across[1]["all_reduce"]


def test_a_step_over_the_link_is_predicted(across: list[dict[str, Any]]) -> None:
    """Within a third, of an exact plan whose step is mostly communication."""
    for found in across:
        assert found["exact"]
        told = f"predicted {found['predicted_s']:.3f} s, measured {found['measured_s']:.3f} s: {found['plan']}"
        print(told)  # noqa: T201 - shown where the test fails, or with -rP
        assert 0.67 <= found["predicted_s"] / found["measured_s"] <= 1.5, told
