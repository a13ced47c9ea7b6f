"""Workers that take part in a training by a plan while it runs: all on real processes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import taking_part_worker
import torch.distributed as dist
from taking_part_worker import BEFORE, DYING, FIRST_VALUE, STEPS, WORKERS

from ports import free_port
from ridgeline.errors import KVStoreError, PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.kvstore.serving.joining import members
from ridgeline.runtime.kvstore.training.joining import check_joined
from ridgeline.runtime.steps.body.requirements import check_joins
from ridgeline.runtime.training.loop import train
from ridgeline.workers.world import JOIN, World
from torchrun import GOES_ON, LATER, torchrun

SCRIPT = Path(taking_part_worker.__file__)
ADDRESS = "tcp://127.0.0.1:9/0"
WATCH = """
def ended(step, count=[0], seen=[]):
    count[0] += 1
    store = step._step.synchronizer._store
    job = store._shelf._members._store
    if store.rank >= 2:
        job.set("has come", "")
        if count[0] > 100:
            job.wait(["seen 0", "seen 1"], datetime.timedelta(seconds=240))
        return count[0] > 100
    if count[0] == 10:
        job.wait(["has come"], datetime.timedelta(seconds=240))
    seen.append(2 in store.present())
    if seen[-1]:
        job.set(f"seen {store.rank}", "")
    return any(seen) and not seen[-1]
"""
"""Steps of who joins are counted; the others wait for it, as it does to be seen, and end behind it, with what is
public of neither."""


def run(staleness: int, killed: str, **environment: str) -> dict[str, Any]:
    """What rank 0 says at the end of a training in which somebody is killed; two may join it."""
    done = torchrun(WORKERS, SCRIPT, staleness, killed, **{LATER: "2"}, **environment)
    assert done.stdout, done.stderr[-3000:]  # nobody ends the others for a worker that failed
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def check_all(told: dict[str, Any], pushed: dict[str, int]) -> None:
    """What every training holds in which workers have come and gone."""
    assert [str(one["rank"]) for one in told["joined"]] == [*pushed]
    for one in told["joined"]:
        # One version of all parameters: so many elements, and one number of steps that they hold.
        assert len(one["seen"][0]) == 1
        assert one["seen"][0][0] <= FIRST_VALUE - WORKERS * BEFORE / WORKERS
        assert one["steps"] > 0
        assert one["versions"][str(one["rank"])] == pushed[str(one["rank"])]
        assert one["notes"][-1] == (
            f"takes part as worker {one['rank']} in a training at "
            f"{told['notes'][-1].split()[4].partition('=')[2]} that {WORKERS} workers began; each push "
            "counts for as much as one of theirs"
        )
    for versions in told["versions"].values():
        assert {rank: versions[rank] for rank in pushed} == pushed
        # Each push took 1/2 off each element, whoever made it.
        assert told["values"] == [FIRST_VALUE - sum(versions.values()) / WORKERS]


@pytest.mark.parametrize(("staleness", "killed"), [(-1, "nobody"), (0, "nobody"), (3, "joined")])
def test_a_worker_takes_part_in_a_training(staleness: int, killed: str) -> None:
    """It begins with one version, each of its pushes counts once, and the others go on when it leaves or dies."""
    told = run(staleness, killed)
    check_all(told, {"2": DYING, "3": STEPS} if killed == "joined" else {"2": STEPS})
    assert told["versions"]["parts.0"]["0"] == told["versions"]["parts.0"]["1"]


def test_one_takes_the_place_of_a_worker_that_began() -> None:
    """Where no launcher ends all for one that is killed, the rest goes on, also with a bound."""
    told = run(3, "founder", **{GOES_ON: "1"})
    check_all(told, {"2": STEPS})
    assert told["versions"]["parts.0"]["1"] == BEFORE


def test_the_example_trains(tmp_path: Path) -> None:
    """The script of the documentation, begun by two workers and joined by another one, each by torchrun as it says."""
    page = (Path(__file__).parents[2] / "docs/kvstore.md").read_text()
    (text,) = re.findall(r"<!-- script: apart.py -->\n```python\n(.*?)^```$", page, re.M | re.S)
    (joins,) = re.findall(r"^(\S+=)tcp://127.0.0.1:29500 torchrun (.*) apart.py$", page, re.M)
    assert joins[0] == f"{JOIN}="
    script = tmp_path / "apart.py"
    # Those who begin go on until the other one has come and gone.
    script.write_text(
        text.replace("range(100)", "iter(lambda: ended(step), True)").replace(
            "with rl.", "import datetime\n" + WATCH + "\n\nwith rl."
        )
    )
    port = free_port()
    run = [sys.executable, "-m", "torch.distributed.run"]
    told = subprocess.PIPE
    first = subprocess.Popen(
        [*run, "--nproc-per-node", "2", "--master-port", str(port), script], stdout=told, text=True
    )
    later = subprocess.Popen(
        [*run, *joins[1].split(), script],
        env={**os.environ, JOIN: f"tcp://127.0.0.1:{port}"},
        stdout=told,
        text=True,
    )
    said, all_said = later.communicate()[0], first.communicate()[0]
    assert (first.returncode, later.returncode) == (0, 0)
    assert f"takes part as worker 2 in a training at tcp://127.0.0.1:{port}" in said
    assert all_said.count(f"other processes join by {JOIN}=tcp://") == 2
    assert all(math.isfinite(float(one.splitlines()[-1])) for one in (said, all_said))


def plan_of(**options: Any) -> Plan:
    return Plan(workers=2, sync=Sync(algorithm="kvstore", options=options))


WORLDS = World.join(device="cpu")
JOINING = World(0, 1, 0, WORLDS.device, joins=ADDRESS)
REFUSED: dict[str, tuple[Any, World, str]] = {
    "several": (
        plan_of(kind="dist_async"),
        World(0, 4, 0, WORLDS.device, joins=ADDRESS),
        (
            f"wanted a single process for {JOIN}='{ADDRESS}', got one of 4 workers; start each of them with "
            "a torchrun of its own, or without"
        ),
    ),
    "auto": (
        "auto",
        JOINING,
        (
            f"wanted the plan of the training at {JOIN}='{ADDRESS}', whose workers do not wait for each "
            "other (sync.algorithm='kvstore' of kind 'dist_async', workers above 1), got auto; give that "
            "plan, or unset the variable"
        ),
    ),
    "synchronous": (plan_of(), JOINING, "^wanted the plan of the training at .*, got workers=2, "),
    "alone": (Plan(), JOINING, "^wanted the plan of the training at .*, got workers=1, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_take_part_is_refused(case: str) -> None:
    """Before anybody is asked; a worker that joins nobody may have any plan."""
    plan, world, message = REFUSED[case]
    matches = {"match": message} if message.startswith("^") else {}
    with pytest.raises(PlanError, **matches) as refused:
        check_joins(plan, world)
    assert matches or str(refused.value) == message
    check_joins(plan, WORLDS)


def test_a_run_of_a_task_is_not_joined(tmp_path: Path) -> None:
    """Its workers agree by collectives."""
    none: Any = None
    with pytest.raises(PlanError) as refused:
        train(none, plan_of(kind="dist_async"), JOINING, run_dir=tmp_path, epochs=1)
    assert str(refused.value) == (
        f"wanted no {JOIN} for a run of a task, whose workers are all there from the beginning, got "
        f"'{ADDRESS}'; unset it, or join from a script with rl.TrainStep"
    )


def test_a_store_that_nobody_trains_by_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is counted who would be waited for."""
    record = members.StoreRecord("run", 2, 3, [], [], has_keys=False, writes=False)
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = members.founded(job, 0, record, is_first=True).address
    message = (
        rf"^wanted a training by a plan at {address} that has made its first step within 0 s, got "
        r".*; make sure that its workers train by rl.TrainStep$"
    )
    with monkeypatch.context() as patched:
        patched.setattr(members, "BEGIN_S", 0.1)  # in vain; not what is found below
        with pytest.raises(KVStoreError, match=message):
            check_joined(plan_of(kind="dist_async", staleness=3), address)
    members.found(address).say_it_trains()
    check_joined(plan_of(kind="dist_async", staleness=3), address)
    with pytest.raises(PlanError) as refused:
        check_joined(plan_of(kind="dist_async"), address)
    assert str(refused.value) == (
        "wanted workers=2 and sync.options['staleness']=3 in the plan, as in that of the training at "
        f"{address}, got 2 and -1; give the plan of that training"
    )
