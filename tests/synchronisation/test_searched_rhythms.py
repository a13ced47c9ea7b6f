"""The table of rhythms that are searched: each is a plan that runs, and says what it is called."""

import pytest

from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.periods import period_steps
from ridgeline.planner.trials.trial_steps import LEAST_STEPS
from ridgeline.synchronisation import RHYTHMS, Rhythm, changed_words, check_sync, is_exact


def way(rhythm: Rhythm, *, is_adaptive: bool) -> Sync:
    return Sync(
        compression=rhythm.compression,
        every=rhythm.every,
        options=rhythm.options(is_adaptive=is_adaptive),
    )


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_every_rhythm_runs_and_can_be_tried(rhythm: Rhythm, is_adaptive: bool) -> None:
    """On both devices; a trial of short steps has room for one of its periods."""
    sync = way(rhythm, is_adaptive=is_adaptive)
    for device in ("cpu", "cuda"):
        check_sync(Plan(workers=2, sync=sync).sync, 2, device)
    assert not is_exact(sync)
    assert period_steps(sync, LEAST_STEPS, 1e-3, 1e3) >= rhythm.every + rhythm.delay


def test_the_mildest_comes_first() -> None:
    """A fragment lands before the next one leaves, so that one at most is late."""
    intervals = [rhythm.every for rhythm in RHYTHMS]
    assert intervals == sorted(intervals)
    assert len(set(RHYTHMS)) == len(RHYTHMS)
    assert all(rhythm.delay < rhythm.every // rhythm.fragments for rhythm in RHYTHMS)


def test_an_outer_momentum_goes_with_an_adaptive_optimizer_only() -> None:
    """What is at its default is left out."""
    rhythm = Rhythm(every=50, fragments=4, delay=10)
    parts = {"fragments": 4, "delay": 10}
    assert rhythm.options(is_adaptive=False) == parts
    assert rhythm.options(is_adaptive=True) == {"outer": "nesterov", **parts}
    assert Rhythm(every=8, has_outer=False).options(is_adaptive=True) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "local SGD (Stich, ICLR 2019)"),
        ({"fragments": 4, "delay": 10}, "streaming local SGD (Stich, ICLR 2019)"),
        ({"outer": "nesterov"}, "DiLoCo (Douillard et al., 2023)"),
        ({"outer": "nesterov", "delay": 10}, "streaming DiLoCo (Douillard et al., 2025)"),
    ],
)
def test_words_for_people(options: dict[str, str | int], words: str) -> None:
    """They name the algorithm that takes the place of the user's."""
    assert changed_words(Sync(every=50, options=options)) == (  # type: ignore[arg-type]
        "workers train alone and exchange parameters every 50 steps, which is another optimisation "
        f"algorithm: {words}"
    )
