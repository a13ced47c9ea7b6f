"""What encoding and decoding gradients takes, by codec, and how much it and computing slow each other."""

import importlib
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ridgeline.errors import RidgelineError
from ridgeline.machine import CodecTiming, Setting, SizePoint
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.operators.replay import FAILURES
from ridgeline.probe.rates.overlap import Compute, computing_mix, seconds_of_call
from ridgeline.synchronisation import COMPRESSIONS, REHEARSAL, offered_compressions

QUICK_SIDES = (128, 512, 1024, 2048)
FULL_SIDES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Of the square matrices, in float32: 64 KiB to 16 MiB, or to 64 MiB."""
ONE = ((112, 256),)
ALIKE = ((64, 64),) * 7
UNLIKE = ((64, 64), (32, 128), (128, 32), (16, 256), (256, 16), (8, 512), (512, 8))
"""Buckets with this many elements: one parameter, seven of one shape, seven of seven shapes."""
BESIDE_SIDE = 512
"""Of the matrix that is encoded beside computing: a megabyte."""
ROUNDS, ROUNDS_BESIDE = 2, 1
"""Of a visit; in a full measurement three times as many of the former."""
SMALL, SMALL_ROUNDS = 1 << 18, 4
"""Buckets of at most this size get more rounds by this factor: each is short and easily disturbed."""
WINDOW_S = 0.03
"""In which both run at once, and as long each alone."""

Work = Callable[[], None]
Rehearsal = Callable[[str, Sequence[tuple[int, ...]], int, torch.device], Work]


def measure_codecs(
    setting: Setting, peers: Peers, *, quick: bool
) -> tuple[tuple[CodecTiming, ...], tuple[str, ...]]:
    """Seconds of every codec that is offered on a CPU, while all workers of the setting do the same.

    On a GPU, where its kernels are enqueued with those of the step, nothing is measured.

    Returns:
        The codecs' timings, and a warning for each codec that failed.
    """
    if peers.device.type != "cpu":
        return (), ()
    module, _, function = REHEARSAL.partition(":")
    rehearsal: Rehearsal = getattr(importlib.import_module(module), function)
    rounds = ROUNDS if quick else 3 * ROUNDS
    sides = QUICK_SIDES if quick else FULL_SIDES
    found: list[CodecTiming] = []
    warnings: list[str] = []
    for name in offered_compressions("cpu"):
        if not COMPRESSIONS[name].codec:
            continue
        # Tried by all before any of them measures: one alone in a barrier waits for ever.
        failure = _failure(name, rehearsal, peers)
        if failure:
            label = COMPRESSIONS[name].label
            warnings.append(f"encoding {label} gradients was not timed: {failure}")
        else:
            found.append(_measured(setting, name, rehearsal, peers, sides, rounds))
    return tuple(found), tuple(warnings)


def _failure(name: str, rehearsal: Rehearsal, peers: Peers) -> str:
    """Why a codec is not timed: it fails on one of the workers; empty where it does not."""
    reason = ""
    try:
        rehearsal(name, UNLIKE, peers.size, peers.device)()
    except (*FAILURES, RidgelineError) as error:
        reason = f"{type(error).__name__}: {error}"
    is_failed = any(row != [0.0] for row in peers.gather([float(bool(reason))]))
    return reason or ("it failed on another worker" if is_failed else "")


def _measured(
    setting: Setting,
    name: str,
    rehearsal: Rehearsal,
    peers: Peers,
    sides: Sequence[int],
    rounds: int,
) -> CodecTiming:
    def samples(*buckets: Sequence[tuple[int, ...]]) -> list[list[float]]:
        # Each with residuals of its own, as buckets have them.
        works = [rehearsal(name, shapes, setting.workers, peers.device) for shapes in buckets]
        is_small = sum(map(math.prod, buckets[0])) <= SMALL
        return _in_turns(works, peers, SMALL_ROUNDS * rounds if is_small else rounds)

    one, alike, unlike = samples(ONE, ALIKE, UNLIKE)
    table = [(4 * side * side, samples([(side, side)])[0]) for side in sides]
    # The first parameter is in the table already.
    more = len(ALIKE) - 1
    beside = rehearsal(name, [(BESIDE_SIDE, BESIDE_SIDE)], setting.workers, peers.device)
    mix = computing_mix()
    found = [_together(mix, beside, peers) for _ in range(ROUNDS_BESIDE)]
    return CodecTiming(
        setting=setting,
        compression=name,
        table=tuple(
            SizePoint(num_bytes=num_bytes, seconds=_merged(seconds, "s", peers))
            for num_bytes, seconds in table
        ),
        parameter=_merged(_excess(alike, one, more), "s", peers),
        shape=_merged(_excess(unlike, alike, more), "s", peers),
        compute_slowdown=_merged([compute for compute, _ in found], "x", peers),
        codec_slowdown=_merged([codec for _, codec in found], "x", peers),
    )


def _in_turns(works: Sequence[Work], peers: Peers, rounds: int) -> list[list[float]]:
    """Seconds of each work, once a round, begun by all workers together; it is called once before."""
    found: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(rounds):
        for work, own in zip(works, found, strict=True):
            peers.barrier()
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
    return found


def _excess(more: Sequence[float], less: Sequence[float], count: int) -> list[float]:
    """By how much one bucket takes longer than another in the same round, for each of what it has more."""
    return [max(0.0, a - b) / count for a, b in zip(more, less, strict=True)]


def _together(compute: Compute, encode: Work, peers: Peers) -> tuple[float, float]:
    """How many times as long computing and encoding take while a thread encodes beside what computes."""
    peers.barrier()
    compute_s, encode_s = seconds_of_call(WINDOW_S, compute), seconds_of_call(WINDOW_S, encode)
    peers.barrier()
    beside = _Repeated(encode)
    beside.start()
    both_s = seconds_of_call(WINDOW_S, compute)
    beside.stop()
    # Below 1 is noise of two short windows.
    return max(1.0, both_s / compute_s), max(1.0, beside.call_s / encode_s)


class _Repeated(threading.Thread):
    """Calls something again and again; `call_s` are the seconds of a call, once it was stopped."""

    def __init__(self, call: Work) -> None:
        super().__init__(name="ridgeline-encode")
        self._call, self._is_over, self.call_s = call, threading.Event(), 0.0

    def run(self) -> None:
        start, done = time.perf_counter(), 0
        while not self._is_over.is_set():
            self._call()
            done += 1
        self.call_s = (time.perf_counter() - start) / max(done, 1)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def _merged(samples: Sequence[float], unit: str, peers: Peers) -> Sampled:
    return Sampled.measured([value for row in peers.gather(samples) for value in row], unit)
