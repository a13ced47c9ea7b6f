"""`measure`: what it asks for, what it keeps, when it trusts the cache, and the same under a group."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from answered_requests import ONE, TWO, cache_file
from test_replay import workload_of

from ridgeline.errors import MachineError
from ridgeline.machine import (
    Device,
    Machine,
    OperatorTiming,
    Quantity,
    Setting,
)
from ridgeline.probe import attempts, fitting, missing
from ridgeline.probe import measure as probe
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.host import fingerprint
from ridgeline.synchronisation import operations


def test_first_call_measures_and_second_reads(asked: list[Request], tmp_path: Path) -> None:
    """The profile is kept under the host's fingerprint and comes back equal without measuring."""
    first = probe.measure(settings=[ONE, TWO])
    assert cache_file(tmp_path).name == f"machine-{first.fingerprint}.json"
    assert probe.measure(settings=[ONE, TWO]) == first
    assert len(asked) == 1
    assert asked[0].ceilings == (ONE, TWO)
    assert asked[0].collectives == asked[0].codecs == (TWO,)
    assert asked[0].dispatch


def test_only_what_is_missing_is_measured(asked: list[Request]) -> None:
    """A further setting and a workload add to the cached profile; what it has is not measured again."""
    probe.measure(settings=[ONE])
    machine = probe.measure(settings=[ONE, TWO])
    assert asked[1].ceilings == asked[1].collectives == asked[1].codecs == (TWO,)
    assert not asked[1].dispatch
    workload = workload_of()
    timed = probe.measure(settings=[ONE, TWO], workload=workload)
    assert asked[2].timings == (ONE, TWO)
    assert asked[2].ceilings == ()
    assert timed.ceilings == machine.ceilings
    assert {t.key for t in timed.timings} == {op.key for op in workload.ops}
    assert probe.measure(settings=[TWO], workload=workload) == timed
    assert len(asked) == 3


def test_refresh_measures_again(asked: list[Request]) -> None:
    """`refresh` starts from nothing, whatever the cache has."""
    probe.measure(settings=[ONE])
    probe.measure(settings=[ONE], refresh=True)
    assert asked[0] == asked[1]


def test_full_profile_serves_quick_calls_but_not_the_reverse(asked: list[Request]) -> None:
    """A quick profile is not good enough for a full one; a full one is good enough for both."""
    probe.measure(settings=[ONE])
    full = probe.measure(False, settings=[ONE])
    assert [request.quick for request in asked] == [True, False]
    assert full.effort == "full"
    assert probe.measure(settings=[ONE]) == full


def test_damaged_cache_is_measured_again_and_told(asked: list[Request], tmp_path: Path) -> None:
    """A cache file that cannot be read is replaced, and the profile says so."""
    probe.measure(settings=[ONE])
    cache_file(tmp_path).write_text("{")
    machine = probe.measure(settings=[ONE])
    assert len(asked) == 2
    assert machine.warnings[0].startswith(
        "the cached profile could not be read and was made again: wanted a machine file, got "
    )
    assert Machine.load(cache_file(tmp_path)) == machine


@pytest.mark.parametrize("folder", [None, "a" * 300])
def test_a_cache_that_cannot_be_is_told(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    """A user without a home, or a name that the system refuses: all is measured, and what to do is said."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if folder is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
    machine = probe.measure(settings=[ONE])
    assert len(asked) == 1
    assert machine.ceilings
    assert machine.warnings[-1].endswith(
        "and will be measured again; let XDG_CACHE_HOME name a directory that can be written"
    )


def test_foreign_profile_is_not_used(asked: list[Request], tmp_path: Path) -> None:
    """A file whose content names another fingerprint is not this machine's, whatever its name."""
    machine = probe.measure(settings=[ONE])
    msgspec.structs.replace(machine, fingerprint="0" * 16).save(cache_file(tmp_path))
    assert probe.measure(settings=[ONE]).fingerprint == machine.fingerprint
    assert len(asked) == 2


def test_progress_is_one_line_per_request(asked: list[Request]) -> None:
    """Each group is announced with what it measures, where and about how long."""
    lines: list[str] = []
    probe.measure(settings=[ONE, TWO], progress=lines.append)
    (line,) = lines
    assert line == (
        "measuring ceilings, dispatch, collectives and overlap, codecs at 1 x 1 cpu threads, "
        "2 x 1 cpu threads (about 17.0 s)"
    )


def test_op_that_could_not_be_issued_is_not_tried_for_ever(asked: list[Request]) -> None:
    """A key that a warning names counts as known."""
    workload = workload_of()
    machine = probe.measure(settings=[ONE], workload=workload)
    key = workload.ops[0].key
    without = msgspec.structs.replace(
        machine,
        timings=tuple(t for t in machine.timings if t.key != key),
        warnings=(f"operator {key} could not be timed: reason",),
    )
    assert missing.requests(without, [ONE], quick=True, workload=workload) == ()
    (request,) = missing.requests(without, [TWO], quick=True, workload=workload)
    assert request.skip == (key,)


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is used, with a warning that says where it could not be kept."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    machine = probe.measure(settings=[ONE])
    assert {entry.setting for entry in machine.ceilings} == {ONE}
    (warning,) = [line for line in machine.warnings if "could not be kept" in line]
    assert str(tmp_path / "file" / "ridgeline") in warning


def test_variants_are_timed_too(asked: list[Request]) -> None:
    """A step that was traced in another precision as well has more operators to time."""
    workload = workload_of()
    machine = probe.measure(settings=[ONE], workload=workload)
    first = workload.ops[0]
    other = msgspec.structs.replace(first, arguments='{"args":[],"kwargs":{}}')
    variant = msgspec.structs.replace(workload, ops=(other,), precision="bf16")
    both = msgspec.structs.replace(workload, variants=(variant,))
    assert missing.requests(machine, [ONE], quick=True, workload=workload) == ()
    (request,) = missing.requests(machine, [ONE], quick=True, workload=both)
    assert request.workload == both


def test_measured_again_replaces_the_old_timing(asked: list[Request]) -> None:
    """One timing for a key and setting, the latest."""
    machine = probe.measure(settings=[ONE], workload=workload_of())
    latest = OperatorTiming(
        setting=ONE, key=machine.timings[0].key, seconds=Quantity.measured([9.0], "s")
    )
    merged = missing.merge(machine, Findings(timings=(latest,)))
    assert len(merged.timings) == len(machine.timings)
    assert [t for t in merged.timings if t.key == latest.key] == [latest]


def test_gpu_rates_are_asked_for_once(asked: list[Request]) -> None:
    """Every GPU serves one worker, so only collectives depend on how many there are."""
    machine = probe.measure(settings=[ONE])
    wanted = [Setting(device="cuda", workers=n) for n in (1, 2, 4)]
    (request,) = missing.requests(machine, wanted, quick=True, workload=None)
    assert request.ceilings == (wanted[0],)
    assert request.collectives == (wanted[1], wanted[2])
    assert request.dispatch
    assert request.links
    assert request.settings[-1] == wanted[2]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, ["1 x 1"]),
        (2, ["1 x 1", "1 x 2", "2 x 1"]),
        (6, ["1 x 1", "1 x 6", "2 x 3", "4 x 1"]),
        (64, ["1 x 1", "1 x 64", "2 x 32", "4 x 16", "8 x 8"]),
    ],
)
def test_default_settings_share_the_cores(
    asked: list[Request], cores: int, expected: list[str]
) -> None:
    """One worker with one thread and with all cores, and powers of two that divide them, up to 8."""
    machine = probe.measure(settings=[ONE])
    host = msgspec.structs.replace(machine.host, cores=cores)
    cpu_only = tuple(d for d in machine.devices if d.kind == "cpu")
    settings = probe.default_settings(msgspec.structs.replace(machine, host=host, devices=cpu_only))
    assert [str(setting).removesuffix(" cpu threads") for setting in settings] == expected


def test_default_settings_on_gpus_are_powers_of_two(asked: list[Request]) -> None:
    """Six GPUs are measured as 1, 2 and 4."""
    machine = probe.measure(settings=[ONE])
    gpus = tuple(Device(kind="cuda", index=i, name="gpu", memory_bytes=1) for i in range(6))
    settings = probe.default_settings(msgspec.structs.replace(machine, devices=gpus))
    assert [setting.workers for setting in settings] == [1, 2, 4]


def test_impossible_settings_are_refused(asked: list[Request]) -> None:
    """More GPUs than there are, or a CPU setting without threads, name what is there."""
    gpus = torch.cuda.device_count()
    message = (
        f"wanted {gpus + 1} x cuda, got {gpus} GPUs on this host; ask for at most {gpus} workers"
    )
    with pytest.raises(MachineError, match=re.escape(message)):
        probe.measure(settings=[Setting(device="cuda", workers=gpus + 1)])
    with pytest.raises(MachineError, match=re.escape("got workers=2, threads=0 in the settings")):
        probe.measure(settings=[Setting(device="cpu", workers=2)])
    assert asked == []


def test_fingerprint_changes_with_the_hardware() -> None:
    """Other cores, memory or devices, other fingerprint; the same, the same."""
    host, devices = fingerprint.host(), fingerprint.devices()
    mark = fingerprint.fingerprint(host, devices)
    assert mark == fingerprint.fingerprint(host, devices)
    assert re.fullmatch("[0-9a-f]{16}", mark)
    changes: list[Callable[[], str]] = [
        lambda: fingerprint.fingerprint(msgspec.structs.replace(host, cores=99), devices),
        lambda: fingerprint.fingerprint(msgspec.structs.replace(host, memory_bytes=1), devices),
        lambda: fingerprint.fingerprint(host, (*devices, devices[0])),
    ]
    assert len({mark, *(change() for change in changes)}) == 4


def test_group_measures_collectives_overlap_and_operators() -> None:
    """Two gloo workers give full size tables, slowdowns of at least 1, and timings of every op."""
    workload = workload_of()
    reply = run_in_group(
        "probe_targets:small_survey",
        msgspec.json.encode(workload),
        workers=2,
        threads=1,
        device="cpu",
    )
    findings = msgspec.json.decode(reply, type=Findings)
    assert [table.operation for table in findings.collectives] == [*operations("cpu")]
    for collective in findings.collectives:
        assert collective.backend == "gloo"
        assert [point.num_bytes for point in collective.table] == [1 << 10, 1 << 20]
        assert all(point.seconds.value > 0 for point in collective.table)
    (overlap,) = findings.overlaps
    assert overlap.compute_slowdown.low >= 1
    assert overlap.communication_slowdown.low >= 1
    assert {timing.key for timing in findings.timings} == {op.key for op in workload.ops}
    assert findings.warnings == ()


def test_measure_under_a_process_group_agrees_on_all_ranks(tmp_path: Path) -> None:
    """Every rank gets rank 0's machine, of that number of workers only, and keeps its random numbers."""
    request = json.dumps({"cache": str(tmp_path), "hosts": [1]}).encode()
    reply = run_in_group(
        "probe_targets:measure_in_place", request, workers=2, threads=1, device="cpu"
    )
    (first, lines, *drawn), (second, silent, *drawn_too) = json.loads(reply)
    assert [*drawn, *drawn_too] == [False, False]
    assert first == second
    assert len(lines) == 1
    assert silent == []
    machine = msgspec.json.decode(first, type=Machine)
    assert {entry.setting for entry in machine.ceilings} == {TWO}
    assert {entry.setting for entry in machine.collectives} == {TWO}
    assert {entry.phase for entry in machine.dispatch} == {"forward", "backward", "optimizer"}
    families = {(entry.family, entry.dtype) for entry in machine.ceilings}
    assert {("matmul", "float32"), ("elementwise", "float32"), ("memory", "float32")} <= families


def test_transfers_between_hosts_are_measured_every_time(tmp_path: Path) -> None:
    """Not taken from the profile of one host, nor kept for it; the rest is kept for as many hosts."""
    request = json.dumps({"cache": str(tmp_path), "hosts": [1, 2, 2, 1]}).encode()
    reply = run_in_group(
        "probe_targets:measure_in_place", request, workers=2, threads=1, device="cpu"
    )
    (_, lines, _), _ = json.loads(reply)
    parts = [line.split(" at ")[0] for line in lines]
    assert parts == [
        "measuring ceilings, dispatch, collectives and overlap, codecs",
        "measuring ceilings, dispatch, collectives and overlap, codecs",
        "measuring collectives and overlap",
    ]


def test_a_limit_ends_the_processes(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half as much again as the limit is their deadline, where that is shorter."""
    right, deadlines = attempts.run_in_group, list[float]()

    def answer(*arguments: object, deadline_s: float, **how: object) -> bytes:
        deadlines.append(deadline_s)
        return right(*arguments, deadline_s=deadline_s, **how)

    monkeypatch.setattr(attempts, "run_in_group", answer)
    for module in (probe, attempts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    probe.measure(settings=[ONE], limit_s=12.0)
    probe.measure(settings=[ONE], refresh=True)
    assert deadlines == [12.0 * probe.MOST_OVER_ESTIMATE, 300.0]


def test_measuring_again_takes_as_long_as_at_first(asked: list[Request]) -> None:
    """And nothing where nothing is missing."""
    workload = workload_of()
    first_s = probe.missing_seconds(workload, (ONE,))
    probe.measure(settings=[ONE], workload=workload)
    assert probe.missing_seconds(workload, (ONE,)) == 0.0
    assert probe.missing_seconds(workload, (ONE,), refresh=True) == pytest.approx(first_s)


def test_short_seconds_measure_less_and_say_so(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step itself keeps its timings: other memory formats go first, with a warning."""
    # What a busy host takes until then is no part of what is told.
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: 0.0))
    workload = workload_of()
    other = msgspec.structs.replace(workload, memory_format="channels_last")
    both = msgspec.structs.replace(workload, variants=(other,))
    machine = probe.measure(settings=[ONE], workload=both, limit_s=6.8)
    (request,) = asked
    assert request.timings == (ONE,)
    assert request.traces == (workload,)
    assert request.samples_s == fitting.LEAST_SAMPLES_S
    assert [line for line in machine.warnings if "not timed" in line] == [
        (
            "operators of test were not timed as they are in other plans (as-is in channels_last memory): that "
            "takes about 7.18 s, and measuring may take 6.80 s"
        )
    ]
