"""Levels and knees of a GPU, on one that is made up: what is tried, what it tells, and what a profile keeps."""

import msgspec
import pytest
from answered_requests import answered
from made_up_gpu import MIB, MadeUpGpu

from ridgeline.codec import decode, encode
from ridgeline.errors import LaunchError
from ridgeline.machine import Machine, Setting
from ridgeline.machine.gpu_levels import BlocksCurve, BlocksPoint, GpuLevels
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.gpu_memory.gpu_levels import (
    FieldReply,
    measure_blocks,
    measure_sizes,
    measure_stairs,
    numbers_of_blocks,
    powers,
    replied,
    with_gpu_levels,
)
from strategies import make_machine

GPU = make_machine(device="cuda")


def test_stairs_show_the_levels_that_there_are() -> None:
    """Each size is walked through once and, from 256 KiB on, read by all multiprocessors."""
    gpu = MadeUpGpu()
    found = measure_stairs(gpu)
    sizes = [16 << 10 << power for power in range(11)]
    assert gpu.laid == [stair.num_bytes for stair in found.stairs] == sizes
    for stair in found.stairs:
        fits = stair.num_bytes <= MIB
        assert stair.access.value == pytest.approx(100e-9 if fits else 400e-9)
        if stair.num_bytes < 256 << 10:
            assert stair.read is None
        else:
            assert stair.read is not None
            assert stair.read.value == pytest.approx(10e12 if fits else 2e12)
            assert stair.read.unit == "B/s"
        assert stair.access.n == 11
    assert found.cache_bytes == MIB
    assert found.cached is not None
    assert found.cached.num_bytes == MIB // 2


def test_a_gpu_whose_cache_holds_nothing_that_was_read_has_no_stair_for_it() -> None:
    """A stair stands for a cache where it fills half of it."""
    gpu = MadeUpGpu()
    gpu.cache_bytes = 256 << 10
    assert measure_stairs(gpu).cached is None


def test_knees_are_where_more_blocks_bring_nothing() -> None:
    """512 threads on each multiprocessor for multiply-adds; 2,000 threads in all for reading."""
    found = measure_blocks(MadeUpGpu())
    arithmetic, reading = found.curves
    assert [point.blocks for point in arithmetic.points] == [
        *(1, 2, 4, 8, 10, 20, 30, 40, 60, 80, 160, 320)
    ]
    assert arithmetic.knee.blocks == 20
    assert arithmetic.best.rate.value == pytest.approx(2 * 512 * 10 / 8e-9)
    assert arithmetic.points[0].rate.value == pytest.approx(2 * 256 / 8e-9)
    assert (arithmetic.work, arithmetic.threads_per_block) == ("multiply-add", 256)
    assert reading.knee.blocks == 8
    assert reading.best.rate.value == pytest.approx(2e12)
    assert found.shared.value == pytest.approx(5e12)
    assert found.multiprocessors == 10


def test_a_knee_is_the_fewest_blocks_within_5_percent_of_the_best() -> None:
    """Whatever fluctuates behind it."""

    def curve(*rates: float) -> BlocksCurve:
        points = tuple(
            BlocksPoint(blocks=1 << index, rate=Sampled.measured([rate], "B/s"))
            for index, rate in enumerate(rates)
        )
        return BlocksCurve(work="read", threads_per_block=256, points=points)

    assert curve(10.0, 94.0, 95.0, 90.0, 100.0, 99.0).knee.blocks == 4
    assert curve(1.0).knee.blocks == 1


def test_an_operator_reaches_the_bandwidth_from_some_size_on() -> None:
    """A microsecond for the kernel beside one for each MiB: nine tenths of the largest from 4 MiB on."""
    found = measure_sizes(MadeUpGpu())
    assert [point.num_bytes for point in found.points] == list(powers(256 << 10, 16 * MIB))
    assert found.points[0].rate.value == pytest.approx(MIB / 2 / 1.5e-6)
    assert found.knee.num_bytes == 4 * MIB
    assert found.call == "mul_ of float32"


@pytest.mark.parametrize(
    ("multiprocessors", "few"), [(1, (1,)), (132, (1, 2, 4, 8, 16, 32, 64, 128))]
)
def test_blocks_grow_to_one_each_and_on_in_whole_waves(
    multiprocessors: int, few: tuple[int, ...]
) -> None:
    """No number occurs twice."""
    found = numbers_of_blocks(multiprocessors)
    assert found[: len(few)] == few
    assert found[-8:] == tuple(multiprocessors * each for each in (1, 2, 3, 4, 6, 8, 16, 32))
    assert len(set(found)) == len(found)


def test_no_more_memory_is_taken_than_there_is_room() -> None:
    """The least size in any case."""
    assert powers(256, 1000) == (256, 512)
    assert powers(256, 10) == (256,)


LEVELS = "gpu_memory.gpu_levels"


def made_up(request: bytes) -> bytes:
    """The reply of a process to which a field of a made-up GPU is asked for."""
    return msgspec.json.encode(replied(request.decode(), MadeUpGpu()))


def test_a_profile_gets_each_field_once_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the last field, it goes on there; its file has all of it."""
    kept: list[Machine] = []
    said: list[str] = []

    def keep(machine: Machine) -> Machine:
        kept.append(machine)
        return machine

    def stops(request: bytes) -> bytes:
        if request == b"sizes":
            raise KeyboardInterrupt
        return made_up(request)

    answered(monkeypatch, LEVELS, stops)
    with pytest.raises(KeyboardInterrupt):
        with_gpu_levels(GPU, keep, said.append)
    assert len(kept) == 2
    asked = answered(monkeypatch, LEVELS, made_up)
    found = with_gpu_levels(kept[-1], keep, said.append)
    assert asked == [(b"sizes", Setting(device="cuda", threads=1))]
    assert found.gpu == GpuLevels(
        stairs=measure_stairs(MadeUpGpu()),
        blocks=measure_blocks(MadeUpGpu()),
        sizes=measure_sizes(MadeUpGpu()),
    )
    assert decode(Machine, encode(found), where="kept") == found
    assert with_gpu_levels(found, keep, said.append) == found
    assert said == [
        "GPU: levels of memory (1 of 3)",
        "GPU: rates by blocks (2 of 3)",
        "GPU: an operator by size (3 of 3)",
        "GPU: an operator by size (1 of 1)",
    ]


def test_without_kernels_sizes_are_measured_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One warning for all fields that miss the same; it goes when they are measured, and no other does."""

    def answer(request: bytes) -> bytes:
        if request == b"sizes":
            return made_up(request)
        return msgspec.json.encode(FieldReply(reason="wanted NVRTC, got none"))

    answered(monkeypatch, LEVELS, answer)
    found = with_gpu_levels(GPU, lambda one: one, print)
    assert (found.gpu.stairs, found.gpu.blocks) == (None, None)
    assert found.gpu.sizes == measure_sizes(MadeUpGpu())
    assert found.warnings == (
        *GPU.warnings,
        "not measured: levels of memory, rates by blocks: wanted NVRTC, got none",
    )
    other = "not measured: nodes of memory: one core"
    told = msgspec.structs.replace(found, warnings=(*found.warnings, other))
    answered(monkeypatch, LEVELS, made_up)
    again = with_gpu_levels(told, lambda one: one, print)
    assert again.gpu.stairs is not None
    assert again.warnings == (*GPU.warnings, other)


def test_a_process_that_fails_costs_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on."""

    def fails(request: bytes) -> bytes:
        raise LaunchError(f"no GPU for {request.decode()}")

    answered(monkeypatch, LEVELS, fails)
    found = with_gpu_levels(GPU, lambda one: one, print)
    assert found.gpu == GpuLevels()
    assert found.warnings[-1] == "not measured: an operator by size: no GPU for sizes"


def test_a_host_without_a_gpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its profile stays as it is."""
    asked = answered(monkeypatch, LEVELS, made_up)
    said: list[str] = []
    machine = make_machine()
    assert with_gpu_levels(machine, lambda one: one, said.append) == machine
    assert asked == said == []
