"""Memory of a step: what a plan needs at its peak, and what a worker may use."""

import msgspec

from ridgeline.machine.cluster import Level
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.memory import fits, memory_capacity_bytes, peak_memory_bytes
from strategies import make_machine, make_workload


def test_peak_memory_counts_buckets_and_micro_batches() -> None:
    """Gradients live in buckets for the whole step; activations shrink with the micro-batch."""
    workload = make_workload(gradient_bytes=[100] * 4, activation_bytes=1000)
    assert peak_memory_bytes(workload, Plan()) == 400 + 400 + 1000
    assert peak_memory_bytes(workload, Plan(workers=2)) == 400 + 1000 + 400 + 100
    assert peak_memory_bytes(workload, Plan(accumulate=4)) == 400 + 250 + 400 + 100


def test_the_optimizers_state_is_divided_where_its_update_is() -> None:
    """A quarter of it for each of four workers; parameters, gradients and buckets stay whole."""
    workload = make_workload(gradient_bytes=[100] * 4, activation_bytes=1000)
    points = tuple(msgspec.structs.replace(p, state_bytes=801) for p in workload.memory)
    workload = msgspec.structs.replace(workload, memory=points)
    plain = peak_memory_bytes(workload, Plan(workers=4))
    divided = Plan(workers=4, sync=Sync(algorithm="sharded"))
    assert plain - peak_memory_bytes(workload, divided) == 801 - 201
    alone = msgspec.structs.replace(divided, workers=1)
    assert peak_memory_bytes(workload, alone) == peak_memory_bytes(workload, Plan())


def test_hosts_of_a_cluster_have_memory_of_their_own() -> None:
    """Of eight workers on hosts of two, two share the memory of a host."""
    host = make_machine(memory_bytes=1000)
    cluster = msgspec.structs.replace(host, cluster=(Level(size=2, rate_bytes_per_s=1e9),))
    assert memory_capacity_bytes(cluster, make_workload(), Plan(workers=8)) == 450
    assert memory_capacity_bytes(cluster, make_workload(), Plan(workers=1)) == 900


def test_capacity_is_a_gpu_or_a_share_of_the_host() -> None:
    """Workers on the CPU share the memory of the host; an unknown size prunes nothing."""
    host = make_machine(memory_bytes=1000)
    assert memory_capacity_bytes(host, make_workload(), Plan(workers=2)) == 450
    gpu = make_machine(device="cuda", memory_bytes=1000)
    assert memory_capacity_bytes(gpu, make_workload(device="cuda"), Plan(workers=2)) == 900
    assert not fits(host, make_workload(), Plan())
    assert fits(make_machine(memory_bytes=0), make_workload(), Plan())
