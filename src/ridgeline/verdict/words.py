"""What the verdict says: what binds the step, why, and what to do about it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.host.preemption import MUCH_PER_S
from ridgeline.simulator.replay import Replay
from ridgeline.verdict.waterfall import (
    BETWEEN,
    EXPOSED,
    IDEAL,
    INPUT,
    KERNEL,
    LAUNCH,
    MEMORY,
    OTHER,
    Part,
)

REPLAY_TOLERANCE = 0.01
"""Of the recorded step: a clock that misses it by more orders frames otherwise than the run did."""


class Words(NamedTuple):
    """The three lines of a verdict."""

    verdict: str
    why: str
    next: str


class _Kind(NamedTuple):
    name: str
    parts: tuple[str, ...]
    what: str
    gain_parts: tuple[str, ...]
    advice: str
    advice_compiled: str = ""
    """What is left to advise where the step is compiled already; empty: the same."""
    advice_full: str = ""
    """What is left to advise where every device, or every core, has a worker; empty: the same."""
    advice_preempted: str = ""
    """What to advise where the process lost its cores often; empty: the same."""
    advice_fed: str = ""
    """What to advise where a feed measured its waiting, without which no gain is claimed; empty: the same."""
    is_measured: bool = False
    """Whether it stands between the measured steps, so that no error of the prediction touches it."""


_KINDS = (
    _Kind(
        "COMPUTE-BOUND",
        (IDEAL, KERNEL),
        "computing",
        (KERNEL,),
        "let operators do more at once (a larger batch per worker), add workers, or allow a lower "
        "precision",
        advice_full="let operators do more at once (a larger batch per worker), or allow a lower precision",
    ),
    _Kind(
        "MEMORY-BOUND",
        (MEMORY,),
        "moving bytes",
        (MEMORY,),
        "move fewer bytes: fuse elementwise operators (execution='compiled', with '+graph' on a GPU) or "
        "allow a lower precision",
        "move fewer bytes: allow a lower precision",
    ),
    _Kind(
        "LAUNCH-BOUND",
        (LAUNCH,),
        "issuing operators",
        (LAUNCH,),
        "issue fewer operators: a larger batch per worker, the whole step as one graph on a GPU, or as one "
        "program (execution='step-graph')",
        "issue less often: a larger batch per worker, or on a GPU a mode that replays a graph",
    ),
    _Kind(
        "COMMUNICATION-BOUND",
        (EXPOSED,),
        "exposed communication",
        (EXPOSED,),
        "hide or shorten communication: other bucket sizes, a larger batch per worker, fewer workers",
    ),
    _Kind(
        "INPUT-BOUND",
        (INPUT,),
        "spent waiting for input",
        (INPUT,),
        "prepare input faster or further ahead (more loader workers, a deeper feed)",
        is_measured=True,
    ),
    _Kind(
        "BETWEEN STEPS",
        (BETWEEN,),
        "spent from a step's end to the next call",
        (BETWEEN,),
        "iterate over rl.feed(loader), which measures how long it waits, to separate waiting for input from "
        "code of your own",
        advice_fed="do less between steps, or less often: the feed waited for less than that",
        is_measured=True,
    ),
    _Kind(
        "UNEXPLAINED",
        (OTHER,),
        "not explained by the model",
        (),
        "look at the timeline for what runs between the frames, and measure the machine again",
        advice_preempted="end the other programs on this host, or give the step fewer threads, which wait "
        "for each other (torch.set_num_threads(1))",
    ),
)


def words_for(
    parts: Sequence[Part],
    *,
    step_ns: int,
    error: float,
    spread: float,
    steps: int,
    drift: float | None = None,
    is_compiled: bool = False,
    is_full: bool = False,
    is_fed: bool = True,
    is_preempted: bool = False,
) -> Words:
    """Three lines about a measured step.

    Args:
        parts: Its waterfall.
        step_ns: Its duration.
        error: Expected over measured, minus 1.
        spread: Distance of the quartiles of the measured steps over their median.
        steps: Number of measured steps.
        drift: Second half of the steps over the first, minus 1, if known.
        is_compiled: Whether its elementwise operators are fused already.
        is_full: Whether the machine has no room for a further worker.
        is_fed: Whether the waiting for batches was measured.
        is_preempted: Whether the process lost its cores often.
    """
    length = {part.name: part.ns for part in parts}
    # By what can be done about it, not by part: kernels that lose time belong to computing.
    kind = max(_KINDS, key=lambda k: sum(length[name] for name in k.parts))
    share = sum(length[name] for name in kind.parts) / step_ns
    drifted = "" if drift is None else f", drift {100 * drift:+.1f} %"
    why = (
        f"a step takes {units.nanoseconds(step_ns)} (median of {steps}, spread {units.percent(spread)}"
        f"{drifted})"
    )
    # The physical limit is no loss, however long it is.
    losses = [part for part in parts if part.name not in (IDEAL, MEMORY) and part.ns > 0]
    if losses:
        worst = max(losses, key=lambda part: part.ns)
        why += (
            f"; the largest loss is {worst.name}, {units.nanoseconds(worst.ns)} or "
            f"{units.percent(worst.ns / step_ns)}"
        )
    doubt = spread if kind.is_measured else max(abs(error), spread)
    # What the step is already comes first: advice to compile a compiled step is none.
    advice = (
        (is_preempted and kind.advice_preempted)
        or (is_compiled and kind.advice_compiled)
        or (is_full and kind.advice_full)
        or (is_fed and kind.advice_fed)
        or kind.advice
    )
    gain = _gain(kind, length, step_ns, doubt)
    # Without a feed this may be the user's own code, of which nobody knows whether it can be avoided.
    if kind.advice_fed and not is_fed:
        gain = "no gain is claimed: what passed there was not measured"
    return Words(
        f"{kind.name}: {units.percent(share)} of the step is {kind.what}", why, f"{advice}; {gain}"
    )


def outlook_words(*, measured_ns: int, predicted_ns: int, expected_ns: int | None = None) -> str:
    """One line on what was expected of the step, and how far off that was: estimate over measured, minus 1.

    Args:
        measured_ns: The measured step.
        predicted_ns: The step as predicted before any trial.
        expected_ns: As expected when training began, after a trial of the plan; None without one.
    """

    def error(estimate_ns: int) -> str:
        return f"({100 * (estimate_ns / measured_ns - 1.0):+.1f} %)"

    took = units.nanoseconds(measured_ns)
    predicted = units.nanoseconds(predicted_ns)
    if expected_ns is None:
        return f"predicted {predicted}, took {took} {error(predicted_ns)}"
    return (
        f"expected {units.nanoseconds(expected_ns)} when training began, took {took} "
        f"{error(expected_ns)}; predicted {predicted} before any trial {error(predicted_ns)}"
    )


def replay_words(replay: Replay) -> str:
    """One line on what the clock makes of the recorded durations, without gaps between frames and with."""
    frames, step = (
        f"{units.nanoseconds(ns)} ({100 * (ns / replay.recorded_ns - 1.0):+.1f} %)"
        for ns in (replay.frames_ns, replay.step_ns)
    )
    words = f"the recorded frames on the simulator's clock take {frames}"
    if replay.gap_ns:
        largest = units.nanoseconds(replay.gap_ns)
        words += f", with the gaps between them {step}; the largest gap is {largest} {replay.gap}"
    if abs(replay.error) > REPLAY_TOLERANCE:
        words += "; they did not run in the order that predictions assume"
    return words


def _gain(kind: _Kind, length: Mapping[str, int], step_ns: int, doubt: float) -> str:
    """What could be gained, claimed only when it exceeds what prediction and measurement leave open."""
    share = sum(length[name] for name in kind.gain_parts) / step_ns
    if not kind.gain_parts:
        return "no gain is claimed for unexplained time"
    if share <= 0.0:
        return "no gain is claimed: the step is at its limit there"
    if share <= doubt:
        return (
            f"no gain is claimed: {units.percent(share)} of the step is within the uncertainty of "
            f"{units.percent(doubt)}"
        )
    if share >= 1.0:
        return "no gain is claimed: without it nothing would be left of the step"
    return f"at most {units.digits3(1 / (1 - share))} x if all of it went away"


def is_preempted(counters: Mapping[str, float]) -> bool:
    """Whether the process lost its cores so often that steps of several threads take far longer."""
    return counters.get("preempted_per_s", 0.0) > MUCH_PER_S


def counted_words(counters: Mapping[str, float]) -> tuple[str, ...]:
    """What a run counted besides its steps, in sentences: preparation, shapes, steps that ran otherwise.

    Args:
        counters: Of a measured timeline; unknown ones say nothing.
    """
    words: list[str] = []
    # Counters are floats, whatever they count.
    eager = round(counters.get("eager_steps", 0.0))
    if eager:
        words.append(
            f"{units.counted(eager, 'batch', 'batches')} of other shapes ran operator by operator; their "
            "time is among the measured steps"
        )
    again = round(counters.get("recaptures", 0.0))
    if again:
        words.append(f"the step was captured again {units.counted(again, 'time')}")
    shapes = round(counters.get("shapes", 0.0))
    if shapes > 1:
        words.append(f"{shapes} batch shapes were captured, each a program of its own")
    idle_gaps = round(counters.get("idle_gaps", 0.0))
    if idle_gaps:
        idle = units.nanoseconds(counters.get("idle_ns", 0.0))
        hint = (
            ""
            if "waited_ns" in counters
            else "; rl.feed(loader) measures waiting for batches separately"
        )
        words.append(
            f"idle between steps: {idle} in {units.counted(idle_gaps, 'gap')}, not counted{hint}"
        )
    others_ns = counters.get("others_ns", 0.0)
    if others_ns:
        words.append(
            f"other steps of this process ran between these, {units.nanoseconds(others_ns)} before each, not "
            "counted"
        )
    if is_preempted(counters):
        words.append(
            f"the process lost a core {counters['preempted_per_s']:.0f} times for each second that it "
            "computed, to other programs or to threads of its own"
        )
    prepared_s = counters.get("compile_s", 0.0)
    if prepared_s > 0.0:
        words.append(
            f"preparing the step (compiling, capturing, checking) took {units.seconds(prepared_s)} once, "
            "which is in no measured step"
        )
    return tuple(words)
