"""Fake tensors that outlive a trace are found; those that are about to go are waited for."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline.tracing.fakes import leaks


@pytest.mark.parametrize(("device", "waits"), [("cuda", 2), ("cpu", 0)])
def test_a_thread_of_a_gpu_may_let_go_late(
    device: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has let go after the second pause, nothing is left; on a CPU there is no such thread."""
    mode, pauses = FakeTensorMode(), []
    with mode:
        held = [torch.empty(2, device=device)]

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            held.clear()

    monkeypatch.setattr(leaks.time, "sleep", pause)
    assert len(leaks.left_fakes(mode)) == len(held) == (0 if waits else 1)
    assert pauses == [*leaks.PAUSES_S[:waits]]


def test_what_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all pauses."""
    monkeypatch.setattr(leaks.time, "sleep", lambda _: None)
    mode = FakeTensorMode()
    with mode:
        held = torch.empty(2, device="cuda")
    assert [one is held for one in leaks.left_fakes(mode)] == [True]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_objects_are_set_aside_for_the_time_of_a_trace(is_frozen: bool) -> None:
    """Of those that are there none is looked at, unless the program has set aside some itself."""
    older = [object(), []]
    if is_frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        with leaks.older_objects_set_aside():
            newer = [older]
            seen = {id(found) for found in gc.get_objects()}
            assert id(newer) in seen
            assert id(older) not in seen
            assert gc.get_freeze_count() >= count
        # Those that Python 3.12 sets aside when it starts come back with the others.
        assert gc.get_freeze_count() == (count if is_frozen else 0)
    finally:
        gc.unfreeze()
    assert any(found is older for found in gc.get_objects())
