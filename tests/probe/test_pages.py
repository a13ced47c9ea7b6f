"""Small pages and large ones: the same walk in both, and what is said where there are no large ones."""

from pathlib import Path

import pytest

from ridgeline.probe.host import pages
from ridgeline.probe.host.memory_levels import LINE_BYTES, Walked
from ridgeline.probe.host.pages import measure_pages, refusal

MIB = 1 << 20


def test_a_copied_walk_is_the_same_in_its_own_memory() -> None:
    """From line to line alike, each address in the copy."""
    with Walked(64 * LINE_BYTES, seed=3) as walked, Walked(64 * LINE_BYTES, like=walked) as copy:
        each = LINE_BYTES // 8
        lines = [int(word) - walked.address for word in walked.words[: 64 * each : each]]
        assert [int(word) - copy.address for word in copy.words[: 64 * each : each]] == lines
        assert sorted(lines) == [number * LINE_BYTES for number in range(64)]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0, 8 * MIB, ""),
        (MIB, 9 * MIB, ""),
        (
            8 * MIB,
            8 * MIB,
            "of 8.00 MiB that were asked for in large pages the system gave 0 B (FOLDER/enabled: [never])",
        ),
        (None, 8 * MIB, "the system does not say what lies in large pages"),
        (0, None, "the system does not say what lies in large pages"),
        (
            2 * MIB,
            4 * MIB,
            "of 8.00 MiB that were asked for in large pages the system gave 2.00 MiB (FOLDER/enabled: [never])",
        ),
        (
            2 * MIB,
            0,
            "of 8.00 MiB that were asked for in large pages the system gave 0 B (FOLDER/enabled: [never])",
        ),
    ],
)
def test_why_there_are_no_large_pages(
    before: int | None, after: int | None, said: str, tmp_path: Path
) -> None:
    """What this process had before does not count, and the system's setting is shown."""
    (tmp_path / "enabled").write_text("[never]\n")
    assert refusal(8 * MIB, before, after, tmp_path) == said.replace("FOLDER", str(tmp_path))


def test_a_system_without_large_pages(tmp_path: Path) -> None:
    """It has no such folder."""
    assert refusal(MIB, 0, 0, tmp_path / "none") == "this system has no transparent large pages"


def test_small_pages_are_timed_where_large_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is said of the gain."""
    monkeypatch.setattr(pages, "ROUNDS", 3)
    monkeypatch.setattr(pages, "LEAST_S", 0.0)
    monkeypatch.setattr(pages, "refusal", lambda *_: "refused")
    found = measure_pages(MIB)
    for loads in (found.waiting, found.independent):
        assert loads.small.n == len(loads.small.samples) == 3
        assert (loads.large, loads.gain) == (None, None)
    assert (found.large_page_bytes, found.reason) == (None, "refused")


def test_both_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gain is that of each round."""
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(pages, "ROUNDS", 3)
    monkeypatch.setattr(pages, "LEAST_S", 0.0)
    monkeypatch.setattr(pages, "refusal", lambda *_: "")
    found = measure_pages(MIB, tmp_path)
    assert (found.large_page_bytes, found.reason) == (2 * MIB, "")
    for loads in (found.waiting, found.independent):
        assert loads.large is not None
        assert loads.gain is not None
        pairs = zip(loads.small.samples, loads.large.samples, strict=True)
        assert loads.gain.samples == tuple(small / large for small, large in pairs)
    # Other programs only add to a sample; one that they left alone is enough.
    assert min(found.independent.small.samples) < min(found.waiting.small.samples)
