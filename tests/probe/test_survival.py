"""An operator that ends, stops or exhausts the measuring process costs its own timing and nothing else."""

import math
from pathlib import Path

import msgspec
import probe_faults  # noqa: F401 - registers the operators here, too
import pytest
import torch
from test_replay import op, spec, workload_of

from ridgeline.errors import LaunchError
from ridgeline.machine import Setting, StepCheck
from ridgeline.probe import apart, attempts
from ridgeline.probe.attempts import remainder, survey_in_group
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.groups.group import WorkerError
from ridgeline.probe.groups.journal import (
    DIRECTORY,
    OperatorEntry,
    ProbeJournal,
    Reader,
    journal_path,
    partial_path,
)
from ridgeline.probe.operators.operators import time_operators
from ridgeline.workload import Op, Workload
from strategies import make_codec_timing

ONE = Setting(device="cpu", workers=1, threads=1)
TWO = Setting(device="cpu", workers=2, threads=1)
ARGUMENTS = {"args": [{"tensor": 0}], "kwargs": {}}
X = spec(4, 4)


def faulty(*names: str) -> tuple[Workload, list[Op]]:
    """A step of a few products with operators of those names among them, and these."""
    fine = op("aten.relu.default", [X], ARGUMENTS, outputs=(X,))
    bad = [op(f"probe_faults.{name}.default", [X], ARGUMENTS, outputs=(X,)) for name in names]
    ops = [fine]
    for each in bad:
        after = op("aten.neg.default", [X], ARGUMENTS, outputs=(X,), dependencies=(len(ops),))
        ops += [each, after]
    return msgspec.structs.replace(workload_of(), ops=tuple(ops)), bad


def survey_of(workload: Workload, **more: object) -> Findings:
    request = Request(quick=True, timings=(ONE,), workload=workload, **more)
    return survey_in_group(request, ONE, deadline_s=math.inf)


@pytest.fixture(autouse=True)
def known_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children know the faulty operators."""
    monkeypatch.setattr(attempts, "SURVEY", "probe_faults:survey")


def test_operators_that_end_the_process_cost_themselves() -> None:
    """A signal and an exit: a warning for each, and timings for all others."""
    workload, (abort, leave) = faulty("abort", "leave")
    found = survey_of(workload)
    assert {timing.key for timing in found.timings} == {
        op.key for op in workload.ops if op not in (abort, leave)
    }
    assert [line for line in found.warnings if "could not be timed" in line] == [
        f"operator {abort.key} could not be timed: signal 6 (SIGABRT)",
        f"operator {leave.key} could not be timed: exit code 7",
    ]
    (check,) = found.checks
    assert check.untimed == 2


def test_an_operator_that_hangs_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent sees no progress, ends the process and measures the others."""
    workload, (hang,) = faulty("hang")

    class Patient(Reader):
        def hanging(self, workers: int, *, after_s: float) -> int | None:
            """At once in the one that hangs; in others never, however busy the host is."""
            entry = self.entry(0)
            hangs = entry is not None and workload.ops[entry.op] is hang
            return super().hanging(workers, after_s=0.0 if hangs else math.inf)

    monkeypatch.setattr(attempts, "Reader", Patient)
    found = survey_of(workload)
    assert {timing.key for timing in found.timings} == {
        op.key for op in workload.ops if op is not hang
    }
    assert f"operator {hang.key} could not be timed: it hangs" in found.warnings


def test_what_was_found_before_a_fault_is_not_measured_again() -> None:
    """The traces in other precisions that were timed stay; the next start takes what is left."""
    workload, (leave,) = faulty("leave")
    plain = msgspec.structs.replace(workload, ops=(workload.ops[0],))
    both = msgspec.structs.replace(
        plain, variants=(msgspec.structs.replace(workload, precision="bf16"),)
    )
    found = survey_of(both)
    assert [check.precision for check in found.checks] == ["as-is", "bf16"]
    assert [line for line in found.warnings if leave.key in line] == [
        f"operator {leave.key} could not be timed: exit code 7"
    ]


def test_codecs_that_were_timed_before_a_fault_are_not_timed_again() -> None:
    """They take seconds a setting, and stand in what was found already."""
    workload, (leave,) = faulty("leave")
    few, many = (Setting(device="cpu", workers=workers, threads=1) for workers in (2, 4))
    request = Request(quick=True, codecs=(few, many), timings=(few, many), workload=workload)
    done = Findings(codecs=(make_codec_timing(few),))
    left = remainder(request, done, leave.key)
    assert left.codecs == (many,)
    assert left.skip == (leave.key,)


@pytest.mark.parametrize("has_found", [True, False])
def test_a_deadline_leaves_what_was_found_before(
    has_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each trace and each rate that is missing; where nothing was found, an error."""
    workload, _ = faulty()
    other = msgspec.structs.replace(workload, precision="bf16")
    check = StepCheck(setting=ONE, workload="test", precision="as-is", ops_s=1.0)

    def late(*_: object, environment: dict[str, str], **how: object) -> bytes:
        directory = Path(environment[DIRECTORY])
        if has_found:
            partial_path(directory).write_bytes(msgspec.json.encode(Findings(checks=(check,))))
        raise WorkerError("late", rank=0, how="no end within 3.00 s", is_late=True)

    monkeypatch.setattr(attempts, "run_in_group", late)
    both = msgspec.structs.replace(workload, variants=(other,))
    if not has_found:
        with pytest.raises(WorkerError, match="late"):
            survey_of(both, ceilings=(ONE,))
        return
    found = survey_of(both, ceilings=(ONE,), collectives=(TWO,), codecs=(TWO,), dispatch=True)
    assert found.checks == (check,)
    assert found.warnings == (
        (
            "operators of test (bf16, as-is memory) were not timed at 1 x 1 cpu threads: measuring had no end "
            "within 3.00 s"
        ),
        "rates of 1 x 1 cpu threads were not measured: measuring had no end within 3.00 s",
        "collectives of 2 x 1 cpu threads were not measured: measuring had no end within 3.00 s",
        "compressions of 2 x 1 cpu threads were not measured: measuring had no end within 3.00 s",
        "dispatch of this machine: not measured, as measuring had no end within 3.00 s",
    )


def test_too_many_faults_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others stay without timings, and a warning says so."""
    monkeypatch.setattr(attempts, "MOST_FAULTS", 1)
    workload, (leave,) = faulty("leave")
    found = survey_of(workload)
    assert found.timings == ()
    fault, given_up = found.warnings
    assert fault == f"operator {leave.key} could not be timed: exit code 7"
    assert given_up == (
        "operators of test (as-is) were not timed: 1 of them ended the measuring process; their time is "
        "estimated from others of their kind"
    )


def test_a_process_killed_for_want_of_memory_is_not_started_again() -> None:
    """SIGKILL is how the system ends a process that needs too much; another signal is the operator's."""
    assert attempts.error_is_lack_of_memory("signal 9 (SIGKILL)")
    assert not attempts.error_is_lack_of_memory("signal 6 (SIGABRT)")


def test_other_failures_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails outside of the workload's operators is an error, as before."""
    monkeypatch.setattr(attempts, "SURVEY", "probe_faults:survey_lost")
    with pytest.raises(WorkerError, match="no survey today") as caught:
        survey_of(faulty()[0])
    assert (caught.value.rank, caught.value.how) == (0, "exit code 1")


def test_memory_that_runs_out_costs_the_operator() -> None:
    """The pass ends there; in the next ones all others are timed."""
    workload, (exhaust,) = faulty("exhaust")
    timings, warnings, check = time_operators(workload, ONE, budget_s=0.05)
    assert {timing.key for timing in timings} == {
        op.key for op in workload.ops if op is not exhaust
    }
    assert warnings[0] == (
        f"operator {exhaust.key} could not be timed: memory ran out: CUDA out of memory. Tried to "
        "allocate 7 TiB"
    )
    assert check.untimed == 1


def test_what_comes_after_the_end_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even a stand-in has room, the rest of the step has no timings."""
    workload, _ = faulty("exhaust")

    def no_room(spec: object, device: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("ridgeline.probe.operators.values.stand_in", no_room)
    timings, warnings, _ = time_operators(workload, ONE, budget_s=0.05)
    assert [timing.key for timing in timings] == [workload.ops[0].key]
    assert warnings[1] == (
        "operators of test from number 1 of 3 on were not timed at 1 x 1 cpu threads: memory ran out; use "
        "a smaller batch, or leave more memory free"
    )


def test_a_journal_names_the_op_until_it_is_done(tmp_path: Path) -> None:
    """Between passes and after the last it names none; after a fault it still names the op."""
    reader = Reader(tmp_path)
    assert reader.entry(0) is None
    with ProbeJournal(journal_path(tmp_path, 0), 1) as journal:
        assert reader.entry(0) is None
        journal.note(17)
        assert reader.entry(0) == OperatorEntry(2, 1, 17)
    assert reader.entry(0) is None
    journal = ProbeJournal(journal_path(tmp_path, 1), 0)
    journal.note(3)
    journal.__exit__(ValueError, ValueError("fault"), None)
    assert reader.any_entry(2) == OperatorEntry(1, 0, 3)


def test_only_a_worker_without_progress_hangs(tmp_path: Path) -> None:
    """A new entry is progress, and a worker that waits for the others issues nothing."""
    reader = Reader(tmp_path)
    waiting = ProbeJournal(journal_path(tmp_path, 0), 0)
    waiting.note(-1)
    working = ProbeJournal(journal_path(tmp_path, 1), 0)
    for index in range(3):
        working.note(index)
        assert reader.hanging(2, after_s=0.0) is None
    assert reader.hanging(2, after_s=0.0) == 1


def test_a_group_times_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are workers on the host; the findings are those of the whole group's setting."""
    asked: list[tuple[Request, Setting]] = []
    workload, _ = faulty()
    timed = time_operators(workload, ONE, budget_s=0.01)

    def answer(request: Request, setting: Setting, **how: object) -> Findings:
        asked.append((request, setting))
        return Findings(timings=timed.timings, checks=(timed.check,))

    monkeypatch.setattr(apart, "survey_in_group", answer)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    four = Setting(device="cpu", workers=4, threads=1)
    whole = Request(quick=True, ceilings=(four,), timings=(four,), workload=workload)
    alone, only = apart.without_timings(whole)
    assert alone == Request(quick=True, ceilings=(four,))
    assert only == Request(quick=True, timings=(four,), workload=workload)
    found = apart.time_apart(only)
    two = Setting(device="cpu", workers=2, threads=1)
    assert [(request.timings, setting) for request, setting in asked] == [((two,), two)]
    assert {entry.setting for entry in (*found.timings, *found.checks)} == {four}


def test_a_group_goes_on_when_its_operators_cannot_be_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the processes for it raise becomes a warning."""

    def fail(*asked: object, **how: object) -> Findings:
        raise LaunchError("wanted a process, got none; start fewer")

    monkeypatch.setattr(apart, "survey_in_group", fail)
    found = apart.time_apart(Request(quick=True, timings=(ONE,), workload=faulty()[0]))
    assert found == Findings(
        warnings=(
            "operators of test were not timed at 1 x 1 cpu threads: wanted a process, got none; start fewer",
        )
    )
