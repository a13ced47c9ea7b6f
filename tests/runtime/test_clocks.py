"""Where a clock puts its stamps, in a model of streams."""

from typing import Any

import pytest
import torch
from stream_model import Streams

from ridgeline.recording.clocks import BranchClock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """torch.cuda as far as clocks use it; an event is work of the stream that is current."""
    model = Streams()

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self, stream: Any) -> None:
            stream.enqueue("stamp")

    for name, stand_in in {
        "Stream": model.make,
        "stream": model.use,
        "current_stream": lambda *_: model.current,
        "Event": Event,
        "is_initialized": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return model


def test_no_kernel_waits_for_a_stamp_beside_it(streams: Streams) -> None:
    """A stamp comes after what its stream did, holds nobody up, and is joined at the end."""
    clock = BranchClock()
    other: Any = streams.make("other")
    streams.main.enqueue("first")
    clock.stamp()
    streams.main.enqueue("second")
    with streams.use(other):
        streams.current.enqueue("elsewhere")
        clock.stamp()
    clock.stamp()
    streams.main.enqueue("third")
    stamps = [work for work in streams.after if work[0] == "stamp"]
    first, elsewhere, second = (streams.before(stamp) for stamp in stamps)
    assert streams.work("first") in first
    assert streams.work("second") not in first
    assert streams.work("elsewhere") in elsewhere
    assert streams.work("second") in second
    assert streams.work("elsewhere") not in second, "each stream has a branch of its own"
    assert not streams.before(streams.work("third")) & set(stamps)
    clock.join()
    streams.main.enqueue("end")
    assert set(stamps) <= streams.before(streams.work("end"))
