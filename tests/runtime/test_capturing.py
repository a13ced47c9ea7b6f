"""What a failed capture leaves: a message with a way out, and nothing else."""

from typing import Any

import pytest
import torch

from emulated_graphs import emulated_graphs
from ridgeline.capture.capturing import capturing, clear_failed_capture
from ridgeline.errors import CaptureError


def _fail(error: BaseException, graph: Any = None) -> None:
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    with capturing(graph, "the step", stream=torch.cuda.Stream()):
        torch.zeros(2).add_(1.0)
        raise error


def test_a_failed_capture_says_what_to_use_instead() -> None:
    """The process goes on where the device works."""
    wanted = (
        "wanted to capture the step as a CUDA graph, got RuntimeError: no; use execution='eager'"
    )
    with emulated_graphs(), pytest.raises(CaptureError) as caught:
        _fail(RuntimeError("no"))
    assert str(caught.value) == wanted


def test_a_device_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, it must be started again."""

    def refuse(*_: object) -> None:
        raise RuntimeError("an illegal memory access\nand more")

    with emulated_graphs():
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        with pytest.raises(CaptureError) as caught:
            _fail(RuntimeError("no"))
    assert str(caught.value).endswith(
        "got RuntimeError: no; the device does not work since (RuntimeError: an illegal memory access), start "
        "the process again with execution='eager'"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the user")])
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    """And the capture is cleared away all the same: the graph holds nothing."""
    with emulated_graphs():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(type(error)) as caught:
            _fail(error, graph)
    assert caught.value is error
    assert graph.calls == []


def test_clearing_draws_nothing() -> None:
    """The random state is what it was."""
    before = torch.get_rng_state()
    with emulated_graphs():
        assert (
            clear_failed_capture(torch.cuda.CUDAGraph(), (0, 0), torch.cuda.Stream().device) == ""
        )
    assert torch.equal(torch.get_rng_state(), before)


def test_the_stream_before_is_current_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a capture cannot be ended torch leaves its stream current."""
    current: list[Any] = []
    before = object()
    with emulated_graphs():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: before)
        monkeypatch.setattr(torch.cuda, "set_stream", current.append)
        with pytest.raises(CaptureError):
            _fail(RuntimeError("no"))
    assert current == [before]
