"""A worker whose host is cut off is named by the other, and neither hangs."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from namespaces import PORT, environment, wait

from ridgeline.experiments.namespaces import NamespaceNetwork
from warm import WARM

WANTED = (
    (
        "wanted all 2 workers in all_reduce/0 of step 4, got none from rank 1: no sign of life for 5.00 s "
        "(process PID on HOST). Completed: 3 steps on rank 0; at least N steps on rank 1. See its log, its "
        "exit status, and whether HOST ran out of memory"
    ),
    (
        "wanted all 2 workers in all_reduce/0 of step 4, got none from rank 0: the store of the process "
        "group, which it or its launcher keeps, is gone (RuntimeError: no answer from the store for 5.00 s). "
        "Completed: 3 steps on rank 1. See the log of rank 0 and of the launcher"
    ),
)
SCRIPT = Path(__file__).parent / "cut_off.py"


def test_a_worker_that_is_cut_off_is_named(two_hosts: NamespaceNetwork, tmp_path: Path) -> None:
    """By rank and collective, on the host that has the rendezvous; the other says that it lost it."""
    variables = {
        **environment(tmp_path),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": two_hosts.hosts[0].address,
        "MASTER_PORT": str(PORT + 1),
    }
    workers = [
        two_hosts.start(
            rank,
            WARM.command(SCRIPT, tmp_path, environment={**os.environ, **variables}),
            environment={**variables, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    heard(workers, "ready")
    two_hosts.cut(1)
    try:
        say(workers, "go")
        heard(workers, "told")
        say(workers, "leave")
        wait(workers, [0, 0])
    finally:
        two_hosts.restore(1)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, wanted in enumerate(WANTED):
        # Its last word may be from making the step, "in TrainStep(...)".
        doing = r"(?:[^()]|\([^)]*\))+"
        text = re.sub(
            rf"process \d+ on [^;]+; last heard {doing}", "process PID on HOST", told[rank]
        )
        text = re.sub(r"whether \S+ ran", "whether HOST ran", text)
        assert re.sub(r"at least (no|\d+) steps? on", "at least N steps on", text) == wanted


def heard(workers: Sequence["subprocess.Popen[str]"], word: str) -> None:
    """Wait until every worker has said so."""
    for worker in workers:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        assert line == f"{word}\n", worker.communicate()[1][-3000:]


def say(workers: Sequence["subprocess.Popen[str]"], word: str) -> None:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{word}\n")
        worker.stdin.flush()
