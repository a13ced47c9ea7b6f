"""The workloads that plans are chosen for: one global batch, shared by one worker or two."""

from strategies import make_workload

MS = 1_000_000


def make_loads(scale: int = 10, gradient_bytes: int = 1 << 19) -> dict:
    """One global batch of 64 for one worker or two."""
    return {
        workers: make_workload(
            forward=[scale * MS // workers] * 8,
            backward=[2 * scale * MS // workers] * 8,
            gradient_bytes=[gradient_bytes] * 8,
            samples=64 // workers,
        )
        for workers in (1, 2)
    }
