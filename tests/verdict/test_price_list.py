"""What explains a measured step where its prediction carries no operators: the machine's price list."""

import msgspec

from ridgeline.machine import Setting
from ridgeline.machine.cluster import Level
from ridgeline.plan import Plan
from ridgeline.simulator.step import simulate
from ridgeline.verdict import verify
from strategies import make_machine, make_workload


def test_workers_of_a_cluster_are_explained_by_the_cores_of_their_host() -> None:
    """Eight on hosts of two have half of a host's cores each, not one core of four."""
    one, two = (Setting(device="cpu", workers=8, threads=threads) for threads in (1, 2))
    slow = make_machine(cores=4, settings=[one], rate=1e8)
    machine = msgspec.structs.replace(
        (fast := make_machine(cores=4, settings=[two])),
        ceilings=(*slow.ceilings, *fast.ceilings),
        cluster=(Level(size=2, rate_bytes_per_s=1e9),),
    )
    workload = make_workload()
    bare = simulate(machine, workload, Plan(workers=8, threads=2), details=False)
    verdict = verify(bare, bare, machine=machine, workload=workload)
    assert {part.name: part.ns for part in verdict.waterfall}["ideal compute"] == 12_500_000
