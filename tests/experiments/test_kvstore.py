"""The experiment `kvstore`: every way works in the same, and a wrong name is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from printed import as_text
from ridgeline.cli.bench import EXPERIMENTS
from ridgeline.errors import TaskError
from ridgeline.experiments import kvstore
from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.kvstore.ray_actor import LACKING, ActorServer
from ridgeline.experiments.kvstore.straggler import SLOWER, all_steps, steps_of
from ridgeline.experiments.ways.text import experiment_text


def test_every_way_computes_the_same() -> None:
    """Of all workers, and of one worker and a server; Ray is compared, or named as what is lacking."""
    found = kvstore.run(quick=True, only=("64KiB", "server-64KiB"), limit_s=2.0)
    ours = [[row for row in case.rows if row.name != "actor of Ray"] for case in found.cases]
    assert [[row.name for row in rows] for rows in ours] == [
        ["gloo all_reduce", "ridgeline dist_sync", "ridgeline dist_async"],
        ["gloo messages", "ridgeline dist_async", "ridgeline dist_async, sockets"],
    ]
    for row in (row for rows in ours for row in rows):
        assert row.status == "measured"
        assert row.difference is None or row.difference < 1e-6
    (ray,) = [row for row in found.cases[1].rows if row.name == "actor of Ray"]
    assert ray.status == ("skipped" if LACKING else "measured")
    is_told = "ray (pip install 'ridgeline[ray]'): actor of Ray" in as_text(experiment_text(found))
    assert is_told is bool(LACKING)


class Answer(NamedTuple):
    """What Ray gives back at once."""

    value: object


class FakeRay(ModuleType):
    """Ray in this process, as far as it is used: what an actor returns is a copy that is only read."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.began: dict[str, object] = {}
        self.is_over = False

    def init(self, **settings: object) -> None:
        self.began = settings

    def remote(self, **_: object):
        def made(kind: type) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda *given: self._actor(kind(*given)))

        return made

    def _actor(self, held) -> SimpleNamespace:
        return SimpleNamespace(
            subtract=SimpleNamespace(remote=lambda tensor: Answer(held.subtract(tensor).copy()))
        )

    def get(self, answer: Answer) -> object:
        answer.value.flags.writeable = False
        return answer.value

    def shutdown(self) -> None:
        self.is_over = True


@pytest.mark.filterwarnings("error")
def test_an_actor_subtracts_what_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value follows, whoever changes what was pushed; a Ray of its own begins and ends with it."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    server = ActorServer(torch.zeros(2, 3))
    assert (ray.began["address"], ray.began["include_dashboard"]) == ("local", False)
    pushed = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(server.pushpull(pushed), -pushed)
    torch.testing.assert_close(server.pushpull(pushed.mul_(2)), -1.5 * pushed)
    server.close()
    assert ray.is_over


def test_names_are_those_of_the_command_line() -> None:
    """Nothing else may be asked for."""
    assert EXPERIMENTS["kvstore"].parts == CASES
    with pytest.raises(TaskError, match="2GiB"):
        kvstore.run(only=("2GiB",))
    with pytest.raises(
        TaskError, match=r"^wanted device 'cpu' for the experiment kvstore, got 'cuda'; l"
    ):
        kvstore.run(device="cuda")


def test_more_servers_and_a_slow_worker() -> None:
    """One server and two give the same values; training reaches the same accuracy in both ways."""
    found = kvstore.run(quick=True, only=("shards-rprop", "shards-muon", "straggler"), limit_s=2.0)
    *shards, straggler = found.cases
    for case in shards:
        assert [row.name for row in case.rows] == [
            "ridgeline dist_async, 1 server",
            "ridgeline dist_async, 2 servers",
        ]
    assert [row.name for row in straggler.rows] == ["ridgeline dist_sync", "ridgeline dist_async"]
    for row in (*shards[0].rows, *shards[1].rows, *straggler.rows):
        assert (row.status, row.difference) == ("measured", 0.0)
    for row in straggler.rows:
        assert float(row.notes[0].split("%")[0]) >= 95.0


@pytest.mark.parametrize("workers", range(2, 10))
def test_a_run_with_a_slow_worker_is_dealt_out_without_rest(workers: int) -> None:
    """Equally where all wait for each other; else the last takes a third of what each other one does."""
    equal, own = (
        [steps_of(rank, workers, kind) for rank in range(workers)]
        for kind in ("dist_sync", "dist_async")
    )
    assert sum(equal) == sum(own) == all_steps(workers)
    assert len(set(equal)) == len(set(own[:-1])) == 1
    assert own[0] == SLOWER * own[-1]
