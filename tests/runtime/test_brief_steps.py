"""Brief steps on a device: an event for each of the first, one for a group of the others."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.recording import recorder as recording
from ridgeline.recording.clocks import DeviceClock, Stamp
from ridgeline.recording.recorder import DEVICE_SAMPLING, GROUP, SINGLE, WINDOW, Recorder

US = 1000
S = 1_000_000_000


class Events(DeviceClock):
    """Events that happen when they are recorded, at the time of the test; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns, self.num_stamps = S, 0

    def stamp(self) -> Stamp:
        self.num_stamps += 1
        return self.now_ns

    def resolve(self, stamps: list[Stamp]) -> list[int]:
        return [int(stamp) - int(stamps[0]) for stamp in stamps]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Events:
    events = Events()
    fake = SimpleNamespace(perf_counter_ns=lambda: events.now_ns)
    monkeypatch.setattr(recording, "time", fake)
    return events


def trained(clock: Events, lengths_ns: list[int], *, is_brief: bool, gap_ns: int = 0) -> Recorder:
    recorder = Recorder(clock)
    recorder.is_brief = is_brief
    for length_ns in lengths_ns:
        clock.now_ns += gap_ns
        recorder.begin_step(clock.now_ns)
        clock.now_ns += length_ns
        recorder.end_step()
    return recorder


def test_groups_save_events(clock: Events) -> None:
    """One at the end of many steps, and one at their begin, where others have one at least each."""
    trained(clock, [50 * US] * WINDOW, is_brief=True)
    brief = clock.num_stamps
    clock.num_stamps = 0
    trained(clock, [50 * US] * WINDOW, is_brief=False)
    groups = (WINDOW - SINGLE) // GROUP
    assert clock.num_stamps == 1 + WINDOW + WINDOW // DEVICE_SAMPLING
    # The group under way at the end has begun, too.
    assert brief == 1 + SINGLE + SINGLE // DEVICE_SAMPLING + groups + groups + 1


@given(st.integers(1, 3 * WINDOW), st.integers(1, 500), st.integers(0, 50))
def test_steps_of_one_length_take_that(count: int, length_us: int, gap_us: int) -> None:
    """In groups or not; all that have ended count, but those of a group that has not."""
    events = Events()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "time", SimpleNamespace(perf_counter_ns=lambda: events.now_ns))
        recorder = trained(events, [length_us * US] * count, is_brief=True, gap_ns=gap_us * US)
    measured = recorder.timeline("steps", 1)
    assert set(measured.steps_ns) == {(length_us + gap_us) * US}
    assert len(measured.steps_ns) == recorder.num_steps
    if count <= WINDOW:
        assert recorder.num_steps == min(count, SINGLE) + max(0, count - SINGLE) // GROUP * GROUP


def test_a_group_counts_its_mean(clock: Events) -> None:
    lengths = [40 * US] * SINGLE + [(30 + 10 * GROUP) * US, *[50 * US] * (GROUP - 2), 70 * US]
    measured = trained(clock, lengths, is_brief=True).timeline("steps", 1)
    assert measured.steps_ns == (*[40 * US] * SINGLE, *[60 * US] * GROUP)


def test_a_pause_within_a_group_is_no_part_of_its_steps(clock: Events) -> None:
    """How long the device rested is not known there: they count as the usual step."""
    recorder = trained(clock, [50 * US] * (SINGLE + GROUP + 3), is_brief=True)
    clock.now_ns += 7 * S
    for _ in range(GROUP - 3):
        recorder.begin_step(clock.now_ns)
        clock.now_ns += 50 * US
        recorder.end_step()
    measured = recorder.timeline("steps", 1)
    assert measured.steps_ns == (50 * US,) * (SINGLE + 2 * GROUP)
    assert measured.counters["idle_ns"] == 7 * S


def test_a_step_that_failed_leaves_no_gap(clock: Events) -> None:
    recorder = trained(clock, [50 * US] * (SINGLE + 2), is_brief=True)
    for _ in range(3):  # no step ends
        clock.now_ns += 2 * US
        recorder.begin_step(clock.now_ns)
    for _ in range(GROUP - 2):
        recorder.begin_step(clock.now_ns)
        clock.now_ns += 50 * US
        recorder.end_step()
    assert len(recorder.timeline("steps", 1).steps_ns) == SINGLE + GROUP


def test_warm_up_within_a_group_keeps_all_of_it_out(clock: Events) -> None:
    recorder = trained(clock, [50 * US] * (SINGLE + 2), is_brief=True)
    for index in range(GROUP - 2):
        recorder.begin_step(clock.now_ns)
        clock.now_ns += 90 * US
        recorder.end_step(is_warmup=index == 0)
    assert set(recorder.timeline("steps", 1).steps_ns) == {50 * US}


def test_the_first_step_behind_the_warm_up_is_measured(clock: Events) -> None:
    """Wherever in a group of brief steps the warm-up ends; it is sampled, and a failed step leaves no gap."""
    for warm in range(SINGLE, SINGLE + GROUP + 1):
        recorder = Recorder(clock)
        recorder.is_brief = True
        for _ in range(warm):
            recorder.begin_step(clock.now_ns)
            clock.now_ns += 90 * US
            recorder.end_step(is_warmup=True)
        recorder.begin_step(clock.now_ns)  # it fails
        recorder.sample_next()
        recorder.begin_step(clock.now_ns)
        recorder.mark("forward")
        clock.now_ns += 50 * US
        recorder.end_step()
        measured = recorder.timeline("steps", 1)
        assert measured.steps_ns == (50 * US,)
        assert [span.name for span in measured.spans] == ["input", "forward"]


def test_costs_of_a_group_are_those_of_its_first_step(clock: Events) -> None:
    """The last one records the event, which the others do not; steps that warm up cost nothing that counts."""
    recorder = Recorder(clock)
    recorder.is_brief = True
    counted = []
    for index in range(SINGLE + 2 * GROUP):
        recorder.begin_step(clock.now_ns)
        if recorder.end_step(is_warmup=index < 3):
            counted.append(index)
    assert counted == [*range(3, SINGLE), SINGLE, SINGLE + GROUP]


def test_each_longer_step_counts_what_it_costs(clock: Events) -> None:
    recorder = Recorder(clock)
    counted = 0
    for _ in range(SINGLE + GROUP):
        recorder.begin_step(clock.now_ns)
        counted += recorder.end_step()
    assert counted == SINGLE + GROUP
