"""Memory of a step: what a plan needs at its peak, and what a worker may use."""

from ridgeline.plan import Plan
from ridgeline.simulator.memory import fits, memory_capacity_bytes, peak_memory_bytes
from strategies import make_machine, make_workload


def test_peak_memory_counts_buckets_and_micro_batches() -> None:
    """Gradients live in buckets for the whole step; activations shrink with the micro-batch."""
    workload = make_workload(gradient_bytes=[100] * 4, activation_bytes=1000)
    assert peak_memory_bytes(workload, Plan()) == 400 + 400 + 1000
    assert peak_memory_bytes(workload, Plan(workers=2)) == 400 + 1000 + 400 + 100
    assert peak_memory_bytes(workload, Plan(accumulate=4)) == 400 + 250 + 400 + 100


def test_capacity_is_a_gpu_or_a_share_of_the_host() -> None:
    """Workers on the CPU share the memory of the host; an unknown size prunes nothing."""
    host = make_machine(memory_bytes=1000)
    assert memory_capacity_bytes(host, make_workload(), Plan(workers=2)) == 450
    gpu = make_machine(device="cuda", memory_bytes=1000)
    assert memory_capacity_bytes(gpu, make_workload(device="cuda"), Plan(workers=2)) == 900
    assert not fits(host, make_workload(), Plan())
    assert fits(make_machine(memory_bytes=0), make_workload(), Plan())
