"""The experiments `async`, `parallel` and `overlap` on GPUs: every way runs, and results agree."""

import importlib

import pytest
import torch
from quiet_device import holds_when_quiet

from ridgeline.experiments.ways.result import WayCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    ("asynchronous", "queue"),
    ("parallel", "devices"),
    ("parallel", "operators"),
    ("parallel", "small"),
    ("parallel", "host-and-device"),
    ("parallel", "branches"),
    ("parallel", "cell"),
    ("parallel", "perceptron"),
    ("overlap", "results"),
    ("overlap", "batches"),
]


def held(package: str, name: str) -> WayCase:
    run = importlib.import_module(f"ridgeline.experiments.{package}").run
    (case,) = run(quick=True, only=(name,), limit_s=3.0, device="cuda").cases
    if case.skipped:
        pytest.skip(case.skipped)
    return case


@pytest.mark.quiet
@pytest.mark.parametrize(("package", "name"), CASES)
def test_case(package: str, name: str) -> None:
    """Every way of a case runs, computes what the first one does, and takes no less than the limit."""

    def wrong() -> str:
        case = held(package, name)
        assert [(row.name, row.reason) for row in case.rows if row.status != "measured"] == []
        # Kernels are chosen by shape and library, so products may add in another order.
        assert max(row.difference or 0.0 for row in case.rows) < 1e-4
        assert case.limit is not None
        beyond = [row for row in case.rows if (row.of_limit or 0.0) >= 1.2]
        return ", ".join(f"{row.name}: {row.of_limit}" for row in beyond)

    holds_when_quiet(wrong)
