"""An asynchronous store over three hosts: keys, addresses that others reach, and a host that is cut off and back."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from namespaces import PORT, environment, need_hosts

from ridgeline.experiments.namespaces import NamespaceNetwork, hosts
from ridgeline.history import History, Outage
from ridgeline.runtime.kvstore.serving.addressing.keys import make_keys
from warm import WARM

RATE = "100mbit"
SCRIPT = Path(__file__).parent / "stored_across.py"
STEPS = 3 + 4 + 4


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[NamespaceNetwork]:
    """Three hosts; the links between them carry 100 Mbit/s each way."""
    need_hosts()
    with hosts(3, RATE) as network:
        yield network


def started(
    network: NamespaceNetwork, directory: Path, port: int, keys: Sequence[Path | None]
) -> "list[subprocess.Popen[str]]":
    """A worker on each host."""
    variables = {
        **environment(directory),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": str(port),
    }
    return [
        network.start(
            rank,
            WARM.command(SCRIPT, directory, environment={**os.environ, **variables}),
            environment={
                **variables,
                "RANK": str(rank),
                **({"RIDGELINE_KVSTORE_KEYS": str(own)} if own else {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, own in enumerate(keys)
    ]


def hear(workers: "Sequence[subprocess.Popen[str]]", word: str) -> None:
    """Wait until every one of these workers has said so."""
    for worker in workers:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        assert line == f"{word}\n", worker.communicate()[1][-3000:]


def tell(workers: "Sequence[subprocess.Popen[str]]") -> None:
    """Have these workers go on."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()


def read_until(worker: "subprocess.Popen[str]", words: str) -> str:
    """What a worker and the server beside it say, until that is among it."""
    assert worker.stderr is not None
    told = ""
    for line in worker.stderr:
        told += line
        if words in line:
            return told
    pytest.fail(f"wanted {words!r}, got {told[-3000:]}")


def test_all_are_told_that_one_has_no_keys(three_hosts: NamespaceNetwork, tmp_path: Path) -> None:
    """Nobody waits for it."""
    make_keys(tmp_path / "keys")
    workers = started(three_hosts, tmp_path, PORT + 2, [tmp_path / "keys", None, tmp_path / "keys"])
    errors = [worker.communicate()[1] for worker in workers]
    problem = (
        "wanted keys for workers on several hosts, got none; make some with `ridgeline kvserver"
    )
    assert problem in errors[1]
    told = f"wanted servers that all workers can use, got none from worker 1: {problem}"
    assert told in errors[0]
    assert told in errors[2]


def report_of(outages: list[dict[str, Any]], directory: Path) -> str:
    """What `ridgeline report` prints of a run that went through these."""
    told = tuple(msgspec.convert(outage, Outage) for outage in outages)
    History(task="three hosts", outages=told).save(directory / "history.json")
    command = [sys.executable, "-m", "ridgeline", "report", str(directory)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(printed.split())


@pytest.mark.parametrize("cut", [2, 1])
def test_training_survives_a_host_that_is_cut_off_and_back(
    three_hosts: NamespaceNetwork, tmp_path: Path, cut: int
) -> None:
    """Each push counts once; who was cut off and who missed it say for how long.

    The last host has a worker alone, whom others do not wait for once its lease has ended. The one before has a
    server, too: all wait for that.
    """
    make_keys(tmp_path / "keys")
    workers = started(three_hosts, tmp_path, PORT + 2 + cut, [tmp_path / "keys"] * 3)
    hear(workers, "ready")
    three_hosts.cut(cut)
    tell(workers)
    lost = f"worker {cut} sent no message for 10 s: no worker waits for it any longer"
    told = read_until(workers[0], lost)
    if cut == 2:
        hear(workers[:2], "far")
    three_hosts.restore(cut)
    hear(workers[2:] if cut == 2 else workers, "far")
    tell(workers)
    errors = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3, "\n".join(errors)[-6000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert len({one["host"] for one in found}) == 3
    for one in found:
        assert one["steps"] == STEPS
        assert one["count"] == pytest.approx([-0.1 * 3 * STEPS] * 2)
        assert one["values"] == found[0]["values"]
        assert one["losses"][-1] < one["losses"][0]
    assert re.search(rf"worker {cut} is back, after \d+\.\d s without a message", told + errors[0])
    silent = (
        r"the server at tcp://10\.77\.0\.\d:\d+ did not answer for (\d+\.\d) s and answers again"
    )
    assert any(float(one) > 5 for one in re.findall(silent, errors[cut]))
    outages = [outage for one in found for outage in one["outages"]]
    missed = {(one["worker"], one["server"]) for one in outages if one["lasted_s"] > 5}
    # Who waits for one server does not see how long the next one was silent meanwhile.
    assert {worker for worker, _ in missed} == {2: {2}, 1: {0, 1, 2}}[cut]
    reported = report_of(outages, tmp_path)
    for worker, server in missed:
        back = rf"worker {worker} got no answer from server {server} from .* UTC on for \d+\.\d s; it came back"
        assert re.search(back, reported)
    page = (tmp_path / "report.html").read_text()
    assert f"Training continued after {len(outages)} outage{'s' * (len(outages) > 1)} of s" in page
