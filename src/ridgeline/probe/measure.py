"""`measure`: the profile of this machine, from the cache where it can be and measured where it must."""

import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from ridgeline import units
from ridgeline.codec import decode, encode
from ridgeline.errors import FileFormatError, MachineError
from ridgeline.execution import waiting_as_here
from ridgeline.given import checked
from ridgeline.machine import Machine, Setting
from ridgeline.machine.host_load import HostLoad
from ridgeline.probe.apart import time_apart, without_timings
from ridgeline.probe.attempts import SURVEY, survey_in_group
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.fitting import expected_s, fitted
from ridgeline.probe.full_parts import completed, full_seconds, left
from ridgeline.probe.groups.group import Group
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.host import fingerprint as identity
from ridgeline.probe.host.limits import limits
from ridgeline.probe.host.load import Counters, between, counters, own_seconds
from ridgeline.probe.missing import merge, requests
from ridgeline.probe.survey import measure_here
from ridgeline.workload import Workload

MOST_WORKERS = 8
MOST_OVER_ESTIMATE = 1.5
"""Measuring that takes more than this multiple of its limit is ended; what it has found by then is used."""

_DISTURBED = ": rates are too low and times too long; measure again when it is idle"

Progress = Callable[[str], None]


class WantedProfile(NamedTuple):
    """What of a profile is asked for; see `measure`."""

    quick: bool
    workload: Workload | None
    settings: Sequence[Setting] | None
    codecs: bool
    limit_s: float

    def missing(self, machine: Machine, settings: Sequence[Setting]) -> tuple[Request, ...]:
        """What the machine lacks of it at some settings."""
        asked = {"quick": self.quick, "codecs": self.codecs}
        return requests(machine, settings, workload=self.workload, **asked)


@checked(MachineError)
def measure(
    quick: bool = True,
    *,
    workload: Workload | None = None,
    settings: Sequence[Setting] | None = None,
    codecs: bool = True,
    refresh: bool = False,
    progress: Progress | None = None,
    here: bool = False,
    limit_s: float = math.inf,
    process_group: dist.ProcessGroup | None = None,
    group: Group | None = None,
) -> Machine:
    """The profile of this machine: ceilings, dispatch, collectives, links, overlap, operator timings.

    What the cache (`$XDG_CACHE_HOME/ridgeline`, default `~/.cache/ridgeline`) knows about hardware and
    software of the same fingerprint is used; only what is missing is measured, in processes of its
    own, and added there. Rates, costs and collectives are visited several times, and say how they repeat
    (`Quantity`). In a process group of several workers (under torchrun) every rank calls this
    and measures in place, for that number of workers; all get the machine of rank 0. Over several hosts
    collectives are measured every time: the network between them is nobody's property.

    Args:
        quick: Fewer sizes and samples, under 20 s; False takes minutes, and adds what only a full one has.
        workload: Also time its distinct operators, about 4 s for each setting.
        settings: How devices will be shared. None: on GPUs 1, 2, 4 ... of them; on the CPU one worker
            with one thread, one with all cores, and 2, 4 ... workers that divide the cores.
        codecs: Also time what encodes gradients (CPUs; 5 s a setting): only plans that send less need it.
        refresh: Measure again whatever the cache says.
        progress: Called with one line before each part.
        here: The step will run in this very process, and not in one that Ridgeline starts for it.
        limit_s: Seconds that it may take. Where they are short, operators get fewer samples, and none in
            other precisions and memory formats (`fitting`). Processes that take half as long again are ended;
            what they found is kept, and a warning says what is missing. Process groups are not ended.
        process_group: Its workers measure, and all of them call this; None for those of the whole job.
        group: From `stand_by`; used, and ended, by the first measurement in processes of its own.

    Raises:
        MachineError: a setting asks for more GPUs than there are, or for no thread on the CPU.
        LaunchError: a measuring process failed, and not in an operator of the workload: what those do
            costs them their timings, with a warning in the machine.

    Cost: Keeps all cores (or GPUs) busy while it measures. Writes one file.
    """
    say = progress or (lambda line: None)
    blank = _blank()
    peers = Peers.of(process_group)
    wanted = WantedProfile(quick, workload, settings, codecs, limit_s)
    hosts = identity.num_hosts() if peers.size > 1 else 1
    machine = _cached(blank, quick, refresh, hosts)
    if peers.size > 1:
        return _measure_in_place(machine, peers, wanted, say, hosts)
    all_settings = tuple(settings) if settings is not None else default_settings(blank)
    _check(blank, all_settings)
    end, over = (time.monotonic() + share * limit_s for share in (1.0, MOST_OVER_ESTIMATE))
    missing = wanted.missing(machine, all_settings)
    try:
        for number, asked in enumerate(missing):
            request, left_out = fitted(asked, end - time.monotonic())
            say(_describe(request) + ("" if quick else f"; {_left(missing[number:], machine)}"))
            # A bound also without a limit: a group that hangs must not keep a script for ever.
            deadline_s = min(300.0 if quick else 1800.0, max(1.0, over - time.monotonic()))
            findings, load = _surveyed(request, deadline_s, here, group)
            machine = merge(machine, Findings(warnings=left_out) + findings)
            # After each request: an interrupt costs one of them, not all.
            machine = _kept(_loaded(machine, load))
        return machine if quick else completed(machine, _kept, say)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(_interrupted(blank, quick, refresh)) from interrupt


def stand_by(setting: Setting) -> Group:
    """Processes that will measure for a step of this process at a setting, started ahead.

    For `measure(settings=(setting,), here=True, group=...)`: their start takes seconds, in which the step can
    be traced.

    Cost: See `Group`, whose end ends them.
    """
    begun = _in_group(setting)
    return Group(
        SURVEY,
        workers=begun.workers,
        threads=begun.threads,
        device=begun.device,
        environment=waiting_as_here(os.environ),
    )


def _surveyed(
    request: Request, deadline_s: float, here: bool, group: Group | None
) -> tuple[Findings, HostLoad]:
    """What processes of a group find, and what others took of the host meanwhile; see `measure`."""
    # Before workers start, whose own seconds are counted as children's.
    before = counters()
    findings = survey_in_group(
        request,
        _in_group(request.settings[-1]),
        deadline_s=deadline_s,
        environment=waiting_as_here(os.environ) if here else None,
        group=group,
    )
    return findings, between(before, counters(), findings.ceilings)


def _in_group(setting: Setting) -> Setting:
    """The same workers with all threads of the host, of which each part takes what it needs."""
    threads = 0 if setting.device == "cuda" else identity.host().cores
    return msgspec.structs.replace(setting, threads=threads)


class Known(NamedTuple):
    """The profile of this machine as far as it is in the cache, and the directory of the cache."""

    machine: Machine
    directory: Path


def known_machine() -> Known:
    """What is known of this machine; nothing is measured.

    Cost: Reads one file.
    """
    blank, hosts = _blank(), identity.num_hosts()
    directory = identity.cache_path(blank.fingerprint, hosts).parent
    return Known(_cached(blank, quick=True, refresh=False, hosts=hosts), directory)


def marked(machine: Machine, suspect: str, retakes: int) -> Machine:
    """The machine with what is thought of its profile, of which the one in the cache gets a note, too.

    The machine may have been held against a step: only the marks, see `Machine`, are kept.

    Cost: Reads and writes one file. Where the cache holds another profile by now, nothing is written.
    """
    hosts = identity.num_hosts()
    with contextlib.suppress(FileFormatError, OSError):
        kept = Machine.load(identity.cache_path(machine.fingerprint, hosts))
        if kept.measured_at == machine.measured_at:
            # The kept one with the marks, not this one, whose timings a step may have corrected.
            _kept(msgspec.structs.replace(kept, suspect=suspect, retakes=retakes), hosts)
    return msgspec.structs.replace(machine, suspect=suspect, retakes=retakes)


def missing_seconds(
    workload: Workload | None,
    settings: Sequence[Setting],
    *,
    codecs: bool = True,
    refresh: bool = False,
    limit_s: float = math.inf,
) -> float:
    """About how long `measure` would take, with these arguments, for what the cache lacks; 0 for nothing.

    More than `limit_s` is told where not even the least fits.
    """
    known = _blank() if refresh else known_machine().machine
    missing = requests(known, settings, quick=True, workload=workload, codecs=codecs)
    return sum(expected_s(fitted(request, limit_s).request) for request in missing)


def default_settings(machine: Machine) -> tuple[Setting, ...]:
    """The settings worth planning for on this machine."""
    if machine.device_kind == "cuda":
        sizes = [size for size in (1, 2, 4, 8) if size <= machine.num_gpus]
        return tuple(Setting(device="cuda", workers=size) for size in sizes)
    cores = machine.host.cores
    # All cores at least once: that is what a single worker of a script has.
    found = [Setting(device="cpu", workers=1, threads=threads) for threads in (1, cores)]
    workers = 2
    while workers <= min(cores, MOST_WORKERS):
        found.append(Setting(device="cpu", workers=workers, threads=cores // workers))
        workers *= 2
    return tuple(dict.fromkeys(found))


def _kept(machine: Machine, hosts: int = 1) -> Machine:
    """The machine, saved in the cache; where that cannot be written, with a warning that says so."""
    path = identity.cache_path(machine.fingerprint, hosts)
    try:
        machine.save(path)
    except OSError as error:
        warning = (
            f"the profile could not be kept in {path} ({error.strerror}) and will be measured again; let "
            "XDG_CACHE_HOME name a directory that can be written"
        )
        return merge(machine, Findings(warnings=(warning,)))
    return machine


def _blank() -> Machine:
    """This machine before anything is measured."""
    host, devices = identity.host(), identity.devices()
    return Machine(
        fingerprint=identity.fingerprint(host, devices),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host=host,
        devices=devices,
        limits=limits(),
    )


def _cached(blank: Machine, quick: bool, refresh: bool, hosts: int = 1) -> Machine:
    """The profile in the cache, or `blank` when there is none that can be used."""
    path = identity.cache_path(blank.fingerprint, hosts)
    effort = "quick" if quick else "full"
    blank = msgspec.structs.replace(blank, effort=effort)
    if refresh:
        return blank
    try:
        machine = Machine.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return blank
    except (FileFormatError, OSError) as error:
        return msgspec.structs.replace(
            blank, warnings=(f"the cached profile could not be read and was made again: {error}",)
        )
    if machine.fingerprint != blank.fingerprint or (machine.effort == "quick" and not quick):
        return blank
    return msgspec.structs.replace(machine, limits=blank.limits)  # another shell may grant less


def _loaded(machine: Machine, load: HostLoad) -> Machine:
    """The machine with what others took while a part of it was measured, and a warning where that is much."""
    worst = load.worst(machine.host_load)
    if not load.is_disturbed:
        return msgspec.structs.replace(machine, host_load=worst)
    # One line for the worst of all parts: each has another share, and all say the same.
    others = tuple(line for line in machine.warnings if not line.endswith(_DISTURBED))
    machine = msgspec.structs.replace(machine, host_load=worst, warnings=others)
    warning = f"{worst} when {machine.host.name} was measured{_DISTURBED}"
    return merge(machine, Findings(warnings=(warning,)))


def _check(machine: Machine, wanted: Sequence[Setting]) -> None:
    for setting in wanted:
        if setting.device == "cuda" and setting.workers > machine.num_gpus:
            raise MachineError(
                f"wanted {setting}, got {machine.num_gpus} GPUs on this host; ask for at most "
                f"{machine.num_gpus} workers, or measure under torchrun for several hosts"
            )
        if setting.workers < 1 or (setting.device == "cpu" and setting.threads < 1):
            raise MachineError(
                f"wanted workers >= 1 and, on the CPU, threads >= 1, got workers={setting.workers}, "
                f"threads={setting.threads} in the settings to measure; give both"
            )


def _measure_in_place(
    machine: Machine, peers: Peers, wanted: WantedProfile, say: Progress, hosts: int
) -> Machine:
    """Measure with the process group that is there; rank 0 decides what, and its machine goes to all."""
    device = "cuda" if peers.device.type == "cuda" else "cpu"
    threads = 0 if device == "cuda" else torch.get_num_threads()
    here = Setting(device=device, workers=peers.size, threads=threads)
    # Measured in place, so by as many workers as there are, whatever else is wanted.
    settings = (here,) if wanted.settings is None else wanted.settings
    if any(setting.workers != peers.size for setting in settings):
        raise MachineError(
            f"wanted settings of {peers.size} workers, as many as the process group has, got "
            f"{', '.join(map(str, settings))}; leave settings out, or measure without torchrun"
        )
    if hosts > 1:
        machine = msgspec.structs.replace(machine, collectives=(), overlaps=())
    over = time.monotonic() + MOST_OVER_ESTIMATE * wanted.limit_s
    machine = of_first(
        machine, peers
    )  # caches may differ between hosts, but all must measure alike
    for asked in wanted.missing(machine, settings):
        request, left_out = fitted(asked, wanted.limit_s)  # by the clock alone workers would differ
        machine = merge(machine, Findings(warnings=left_out))
        is_first = peers.rank == 0
        if is_first:
            say(_describe(request))
        before, known = _counted(peers, hosts), len(machine.ceilings)
        alone, apart = without_timings(request)
        if alone is not None:
            found = measure_here(alone, group=peers.group)
            machine = of_first(merge(machine, found), peers)
        if apart is not None:
            left_s = max(1.0, over - time.monotonic())
            timed = peers.done_by_first(partial(time_apart, apart, left_s))
            machine = machine if timed is None else merge(machine, timed)
        after = _counted(peers, hosts)
        if before is not None and after is not None:
            machine = _loaded(machine, between(before, after, machine.ceilings[known:]))
        machine = of_first(machine, peers)
        if is_first:
            machine = _kept(machine, hosts)
    return machine


def _counted(peers: Peers, hosts: int) -> Counters | None:
    """The counters of this host, on which all peers measure; None over several hosts."""
    if hosts > 1:
        return None
    return counters(own_s=sum(own_s for (own_s,) in peers.gather([own_seconds()])))


def of_first(machine: Machine, peers: Peers) -> Machine:
    """The machine of rank 0, on all ranks."""
    if peers.size == 1:
        return machine
    text = encode(machine) if peers.rank == 0 else b""
    return decode(Machine, peers.share(text), where="the process group")


def _describe(request: Request) -> str:
    words = ("ceilings", "dispatch", "collectives and overlap", "codecs", "links")
    parts = [word for word in words if getattr(request, word.partition(" ")[0])]
    if request.workload is not None:
        keys = len({op.key for load in request.traces for op in load.ops})
        parts.append(f"{keys} distinct operators of {request.workload.name}")
    settings = ", ".join(str(setting) for setting in request.settings)
    return (
        f"measuring {', '.join(parts)} at {settings} (about {units.seconds(expected_s(request))})"
    )


def _interrupted(blank: Machine, quick: bool, refresh: bool) -> str:
    """What an interrupt leaves of a measurement that began so."""
    if not _cached(blank, quick, refresh=False).ceilings:
        return "no part of the profile was measured whole: the next measurement begins anew"
    condition = ", unless it is to refresh it" if refresh else ""
    return (
        "the part that was being measured is lost, what was known by then is kept in "
        f"{identity.cache_path(blank.fingerprint)}, and the next measurement goes on there{condition}"
    )


def _left(missing: Sequence[Request], machine: Machine) -> str:
    """How long a full measurement takes that lacks these requests, and what comes behind them."""
    return left(sum(map(expected_s, missing)) + full_seconds(machine))
