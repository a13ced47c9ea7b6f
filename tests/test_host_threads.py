"""Setting a number of threads changes nothing else."""

from collections.abc import Iterator

import pytest
import torch

from ridgeline.workers import host_threads
from ridgeline.workers.host_threads import mkl_dynamic, set_threads


@pytest.fixture
def kept() -> Iterator[None]:
    mkl, threads = mkl_dynamic(), torch.get_num_threads()
    before = mkl.get() if mkl is not None else 0
    yield
    torch.set_num_threads(threads)
    if mkl is not None:
        mkl.set(before)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("is_dynamic", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_operators_run_as_before(is_dynamic: int, count: int) -> None:
    """MKL takes fewer threads for little work exactly where it did; torch alone switches that off."""
    mkl = mkl_dynamic()
    if mkl is None:
        pytest.skip("this build of torch has no MKL")
    mkl.set(is_dynamic)
    set_threads(count)
    assert torch.get_num_threads() == count
    assert mkl.get() == is_dynamic
    torch.set_num_threads(count)
    assert mkl.get() == 0  # the reason for all this


@pytest.mark.usefixtures("kept")
def test_without_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for other processors have no such switch."""
    monkeypatch.setattr(host_threads, "LIBRARY", "/nowhere/libtorch_cpu.so")
    mkl_dynamic.cache_clear()
    assert mkl_dynamic() is None
    set_threads(2)
    assert torch.get_num_threads() == 2
    mkl_dynamic.cache_clear()
