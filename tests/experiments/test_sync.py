"""The experiment `sync`: ways to send gradients, on hosts of their own or on this one."""

from collections.abc import Iterable

import pytest

from printed import as_text
from ridgeline.errors import LaunchError
from ridgeline.experiments import namespaces, sync
from ridgeline.experiments.sync.ours import QUICK_WANTED, WANTED
from ridgeline.experiments.sync.peers import PEERS, QUICK_PEERS
from ridgeline.experiments.ways.result import WayCase, WayExperiment
from ridgeline.experiments.ways.text import experiment_text


def check(case: WayCase, peers: Iterable[str], wanted: Iterable[str]) -> None:
    """Everybody trained; ours is DDP to the last bits, and what sends less is not."""
    rows = {row.name: row for row in case.rows}
    ours = [f"ridgeline, {name}" for name in wanted]
    assert [row.name for row in case.rows if row.kind != "part"] == [*peers, *ours]
    assert [(row.name, row.reason) for row in case.rows if row.status != "measured"] == []
    assert rows["ridgeline, exact"].difference < 1e-5
    assert all(rows[name].difference > 1e-5 for name in peers if name != "DDP")
    assert all(rows[name].predicted_s > 0.0 for name in ours)
    for name in {"powersgd, rank 4", "every 4 steps", "every 50 steps"}.intersection(wanted):
        assert rows[f"ridgeline, {name}"].difference > 1e-5
    assert "rl.Plan(workers=2" in rows["ridgeline, exact"].notes[0]
    assert case.limit is not None


@pytest.fixture(scope="module")
def local() -> WayExperiment:
    """On a machine without namespaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces, "lacking", lambda *, is_shaped: "privileges")
        return sync.run(
            quick=True, only=("mlp",), rates=("100mbit", "none"), limit_s=2.0, device="cpu"
        )


def test_local_workers(local: WayExperiment) -> None:
    """A shaped link is left out with the reason; what the unshaped one is, is said, and nothing is counted."""
    shaped, unshaped = local.cases
    reason = "no network namespaces: this machine lacks privileges"
    assert (shaped.title, shaped.skipped) == ("a link of 100mbit", reason)
    assert unshaped.title == f"128 samples a step over 2 local workers, not shaped ({reason})"
    check(unshaped, QUICK_PEERS, QUICK_WANTED)
    assert {row.wire_bytes for row in unshaped.rows} == {None}
    assert "Predicted" in as_text(experiment_text(local))


@pytest.mark.skipif(
    bool(namespaces.lacking()), reason=f"this machine lacks {namespaces.lacking()} for hosts"
)
def test_hosts() -> None:
    """What the link carried is what the gradients are, and headers; with less sent it is less."""
    (case,) = sync.run(only=("mlp",), rates=("1gbit",), limit_s=2.0, device="cpu").cases
    check(case, PEERS, WANTED)
    assert case.title == "128 samples a step over 2 hosts, a link of 1gbit"
    rows = {row.name: row for row in case.rows}
    sent = rows["ridgeline, exact"].wire_bytes
    payload = 50_826 * 4
    assert payload < sent < 1.2 * payload
    assert rows["DDP, fp16_compress_hook"].wire_bytes < 0.6 * sent
    assert rows["DDP"].wire_bytes == pytest.approx(sent, rel=0.1)


def test_a_wrong_rate_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(LaunchError, match=r"wanted a rate such as 100mbit or 1gbit, got 'fast'"):
        sync.run(rates=("none", "fast"))
