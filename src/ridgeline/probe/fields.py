"""What adds to a profile part by part: each once, kept as it comes, and a warning where that cannot be."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ridgeline.codec import Value
from ridgeline.errors import LaunchError, MachineError
from ridgeline.machine import Machine, Setting
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.groups.worker_error import in_one_line

PREFIX = "not measured: "
DEADLINE_S = 240.0


class FieldProbe(NamedTuple):
    """One field of a value: how a person calls it, and what measures it."""

    field: str
    name: str
    measure: Callable[[], Value]


def with_fields(
    machine: Machine,
    value: Literal["microarchitecture", "gpu"],
    probes: Sequence[FieldProbe],
    keep: Callable[[Machine], Machine],
    say: Callable[[str], None],
    heading: str,
) -> Machine:
    """The profile with what it lacks of one of its values, kept after each field.

    Args:
        machine: What is known of this host.
        value: Which field of the profile; those of its own fields that are None are measured.
        probes: In the order in which they are measured.
        keep: Saves a profile, and gives back what it saved.
        say: Takes a line before each field.
        heading: Begins these lines.

    Cost: that of the probes. Those that end in a `MachineError` cost their field, and a warning says so,
        which goes when they are measured.
    """
    # By the names of this value, or it would take back what another one says of itself.
    mine = frozenset(probe.name for probe in probes)
    others = tuple(line for line in machine.warnings if not _is_of(line, mine))
    machine = msgspec.structs.replace(machine, warnings=others)
    missing = [probe for probe in probes if getattr(getattr(machine, value), probe.field) is None]
    refused: dict[str, list[str]] = {}
    for number, probe in enumerate(missing, 1):
        say(f"{heading}: {probe.name} ({number} of {len(missing)})")
        try:
            found = probe.measure()
        except MachineError as error:
            # Once for each reason: without a compiler every field has the same.
            refused.setdefault(str(error), []).append(probe.name)
            continue
        # Read again: the profile was saved with the fields before.
        known = msgspec.structs.replace(getattr(machine, value), **{probe.field: found})
        machine = keep(msgspec.structs.replace(machine, **{value: known}))
    told = [f"{PREFIX}{', '.join(names)}: {error}" for error, names in refused.items()]
    warnings = tuple(dict.fromkeys((*machine.warnings, *told)))
    return msgspec.structs.replace(machine, warnings=warnings)


def forgotten(machine: Machine, prefix: str) -> Machine:
    """The profile without the warnings that begin so: what is measured again says itself if it fails."""
    told = tuple(line for line in machine.warnings if not line.startswith(prefix))
    return msgspec.structs.replace(machine, warnings=told)


def warned(machine: Machine, warning: str) -> Machine:
    """The profile with one warning more."""
    return msgspec.structs.replace(machine, warnings=(*machine.warnings, warning))


def measured_apart(target: str, request: bytes, setting: Setting) -> bytes:
    """What fresh processes reply, as many as a setting has workers; see `run_in_group`.

    Raises:
        MachineError: they failed; says how in one line.
    """
    try:
        return run_in_group(
            target,
            request,
            workers=setting.workers,
            threads=setting.threads,
            device=setting.device,
            deadline_s=DEADLINE_S,
        )
    except LaunchError as error:
        raise MachineError(in_one_line(error)) from error


def _is_of(warning: str, names: frozenset[str]) -> bool:
    """Whether it says that some of these were not measured."""
    told, colon, _ = warning.removeprefix(PREFIX).partition(": ")
    return warning.startswith(PREFIX) and bool(colon) and names.issuperset(told.split(", "))
