"""Every error Ridgeline raises on purpose.

One flat file, so that the whole vocabulary can be read at once. A message says, in this order, what
was wanted, what was got (name, value, unit), where (operator, rank, file), and what to do next. The
text is part of the interface: tests pin it.
"""

import re


class RidgelineError(Exception):
    """Base of every error that Ridgeline raises on purpose; the command line exits with status 1."""


class FileFormatError(RidgelineError, ValueError):
    """A Ridgeline file is damaged, of another kind, or of a version this release cannot read."""


class LawError(RidgelineError, ValueError):
    """A performance law was given a number for which it has no meaning, or too few points to fit."""


class MachineError(RidgelineError):
    """The machine profile lacks, or the machine refuses, what was asked for."""


class DeviceLostError(MachineError):
    """Something left the GPU in a state in which this process can use it no more; `reason` is its fault."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkloadError(RidgelineError, ValueError):
    """A training step cannot be traced, or its loss, batch or optimizer is not what a step needs."""


class SideEffectError(WorkloadError):
    """A step does what cannot be taken back, so that it cannot be run without being trained."""


class PlanError(RidgelineError, ValueError):
    """A plan contradicts itself, the workload or the machine, or asks for what is not available."""


class BatchError(RidgelineError, ValueError):
    """A batch does not fit the step: another structure, dtype or shape than the step was made for."""


class NonFiniteError(RidgelineError, ArithmeticError):
    """The loss became NaN or infinite; training stopped and the last good checkpoint was kept."""


class DataError(RidgelineError):
    """A data file is missing, damaged or not of the format that the task reads."""


class TaskError(RidgelineError):
    """A task name or task file does not give a usable `Task`."""


class CheckpointError(RidgelineError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class CaptureError(RidgelineError):
    """A program cannot be captured, scripted or compiled; names operators and lines where they are known."""


class ObstacleError(CaptureError):
    """A program does what no CUDA graph can hold, so that every way of replaying it fails alike."""


class EquivalenceError(RidgelineError):
    """A mode of execution gave other results than the plain program, so it is not used."""


class OutOfTimeError(RidgelineError):
    """Something did not end in the seconds that the user gave; what was known before is used."""


class PackageError(RidgelineError):
    """A saved program is damaged, foreign, or made for another device or version; nothing of it ran."""


class EngineError(RidgelineError):
    """The engine was used wrongly, or was closed while tasks were still wanted."""


class KVStoreError(RidgelineError):
    """A key-value store was given keys, values or settings that do not fit, or could not use them."""


class UnansweredError(KVStoreError):
    """A store's server said nothing, or other workers did not come: `workers`, where they are known."""

    def __init__(self, message: str, workers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers


class AbsentWorkerError(EngineError):
    """A worker did not come to a collective; names who, at which step, and what is known of it."""


class ScheduleError(RidgelineError, ValueError):
    """A schedule would let a node run before one that it waits for, or describes another graph."""


class LaunchError(RidgelineError):
    """A worker process died; the message names the rank, the signal or error, and its last span."""


class VerificationError(RidgelineError):
    """Prediction and measurement differ by more than the stated tolerance (exit status 3)."""


_QUOTED = re.compile(r"`([\w.]+)`")
"""A name as Dynamo quotes it; places, which it quotes too, have other characters in them."""


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    """The first line of what an error says, and the second where the first announces it.

    Args:
        error: Of any kind; those of torch's compiler begin with `backend='inductor' raised:`, or say or
            quote in an `Explanation:` what they got.
        otherwise: What to say where it says nothing.
    """
    first, second, *_ = [*map(str.strip, str(error).strip().splitlines()), "", ""]
    if first.endswith(":"):
        return f"{first} {second}".strip()
    # Dynamo's first line names a kind of failure; what it failed at stands behind `got`, or is quoted.
    got = ""
    if second.startswith("Explanation:"):
        got = second.partition("): got ")[2] or "".join(_QUOTED.findall(second)[:1])
    return f"{first}: {got}" if got and got not in first else first or otherwise


def unanswered(error: BaseException | None) -> UnansweredError | None:
    """What a store's server did not answer, where that is the cause of an error."""
    while error is not None and not isinstance(error, UnansweredError):
        error = error.__cause__
    return error
