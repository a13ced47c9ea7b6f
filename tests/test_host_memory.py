"""Memory that a step frees stays with the process, unless the environment says how to allocate."""

import subprocess
import sys

import pytest

from ridgeline.host.memory import is_given, keep_freed_memory

FAULTS = """
import resource, torch
from ridgeline.host.memory import keep_freed_memory
kept = keep_freed_memory()
def step():
    for size in (1 << 20, 3 << 20, 1 << 24):  # 4, 12 and 64 MiB
        torch.ones(size)
for _ in range(20):
    step()  # until every block has found its place
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants the GNU C library")
def test_a_step_that_comes_again_faults_no_page() -> None:
    """80 MiB are 20,000 pages a step; once they are there none is asked for again."""
    kept, count = faults()
    if not kept:
        pytest.skip("this C library has no mallopt")
    assert count < 1000
    kept, plain = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert plain > 50_000


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "1"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2"}, False),
    ],
)
def test_the_environment_comes_first(environment: dict[str, str], given: bool) -> None:
    """Whoever has set how the C library allocates keeps it."""
    assert is_given(environment) is given


def test_it_may_be_asked_for_again() -> None:
    """A second call does nothing and says the same."""
    assert keep_freed_memory() == keep_freed_memory()
