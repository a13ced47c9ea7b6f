"""A process goes on after a capture that failed."""

import pytest
import torch
from gpu_programs import FAILURES, fail_a_capture

from ridgeline.runtime.hybrid.capture.child_trial import try_in_child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", FAILURES)
def test_a_process_goes_on(kind: str) -> None:
    """It draws random numbers and captures, and its memory is given back; in a child, should it not."""
    outcome = try_in_child(fail_a_capture, {"kind": kind})
    assert outcome.status == "ok", outcome
