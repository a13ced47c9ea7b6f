"""The measurements of one group of workers: asked for and answered as JSON.

The parent asks once for all settings, because starting workers costs seconds. A setting of fewer
workers than the group is measured by its first ranks while the others wait.
"""

import contextlib
import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec
import psutil
import torch
import torch.distributed as dist

from ridgeline import units
from ridgeline.codec import write_atomically
from ridgeline.errors import DeviceLostError
from ridgeline.host.memory import keep_freed_memory
from ridgeline.host.message_threads import calm_message_threads
from ridgeline.machine import Dispatch, Setting
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.gpu import measure_launch
from ridgeline.probe.groups.journal import (
    ProbeJournal,
    fault_path,
    journal_path,
    partial_path,
    scratch,
)
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.operators.clock import ReplayClock
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.rates.ceilings import measure_ceilings
from ridgeline.probe.rates.codecs import measure_codecs
from ridgeline.probe.rates.collectives import measure_collectives
from ridgeline.probe.rates.dispatch import measure_dispatch
from ridgeline.probe.rates.links import measure_links
from ridgeline.probe.rates.overlap import measure_overlap
from ridgeline.probe.visits import VISITS, combined
from ridgeline.workers.host_threads import set_threads


def warm_up(device: str) -> None:
    """Load what the first operators of a process wait for: torch's compiler, which its optimizers ask, too.

    Args:
        device: `cpu` or `cuda`; of a GPU also the libraries of products and convolutions.
    """
    importlib.import_module("torch._dynamo")
    if device == "cuda":
        x = torch.zeros(1, 8, 8, 8, device=device)
        torch.nn.functional.conv2d(x, x)
        torch.mm(x[0, 0], x[0, 0])


def survey(request: bytes) -> bytes:
    """Target of `run_in_group`: the findings of rank 0 as JSON.

    Where a journal is wanted, what was found so far is kept beside it, and what an operator did to a GPU.
    """
    wanted = msgspec.json.decode(request, type=Request)
    directory, rank = scratch(), _rank()

    def keep(findings: Findings) -> None:
        if directory is not None and rank == 0:
            write_atomically(partial_path(directory), msgspec.json.encode(findings))

    try:
        return msgspec.json.encode(measure_here(wanted, keep))
    except DeviceLostError as error:
        if directory is not None:
            fault_path(directory, rank).write_text(error.reason)
        raise


def measure_here(
    request: Request,
    keep: Callable[[Findings], None] = lambda findings: None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Findings:
    """Measure in this process and its peers of a process group; the same call on every rank.

    Threads are set for each setting and put back afterwards, and so are torch's random generators.

    Args:
        request: What to measure.
        keep: Called with all findings so far, again and again.
        group: None for that of the whole job, or for this process where there is none.

    Raises:
        DeviceLostError: an operator of the workload left the GPU unusable for this process.

    Cost: Blocks until all ranks are done.
    """
    device = _device(request)
    if device.type == "cpu":
        keep_freed_memory()  # as a step does
        calm_message_threads()
    threads = torch.get_num_threads()
    drawn_from = [device] if device.type == "cuda" else []
    # A script's own random numbers must not depend on whether a profile was there.
    with torch.random.fork_rng(devices=drawn_from):
        try:
            return _measured(request, Peers.of(group, device), keep)
        finally:
            set_threads(threads)


def _rank() -> int:
    return dist.get_rank(group=dist.group.WORLD) if dist.is_initialized() else 0


def _measured(request: Request, everyone: Peers, keep: Callable[[Findings], None]) -> Findings:
    """What every rank measures, what is short in several visits; threads and generators stay changed."""
    rank, device = everyone.rank, everyone.device
    groups = {setting: _group_of(setting, everyone) for setting in request.settings}
    parts: defaultdict[tuple[Setting | None, str], list[Findings]] = defaultdict(list)
    # All of it and then all again: a disturbance of seconds meets one visit of many numbers.
    for visit in range(request.visits or VISITS):
        if (request.dispatch or request.links) and rank == 0:
            set_threads(1)
            parts[None, "alone"].append(_alone(request, device))
            keep(combined(parts.values()))
        for setting in request.settings:
            if rank < setting.workers:
                if setting.threads:
                    set_threads(setting.threads)
                peers = Peers(rank=rank, size=setting.workers, device=device, group=groups[setting])
                for name, found in _at(setting, peers, request, is_first=not visit):
                    parts[setting, name].append(found)
                    keep(combined(parts.values()))
            # Ranks beyond the setting wait here, idle, so that its rates are those of so many workers only.
            everyone.barrier()
    return combined(parts.values())


def _group_of(setting: Setting, everyone: Peers) -> dist.ProcessGroup | None:
    """The group of the first `workers` ranks of a setting; every rank calls this."""
    if setting.workers == everyone.size:
        return everyone.group
    if setting.workers == 1:
        return None
    # Every rank must take part in making a group, also those that are not in it.
    ranks = dist.get_process_group_ranks(everyone.group)[: setting.workers]
    made = dist.new_group(ranks)
    calm_message_threads()  # as a step has them
    return made if isinstance(made, dist.ProcessGroup) else None


def _device(request: Request) -> torch.device:
    kind = request.settings[0].device if request.settings else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _alone(request: Request, device: torch.device) -> Findings:
    """What does not depend on how many workers there are."""
    dispatch: tuple[Dispatch, ...] = ()
    if request.dispatch:
        dispatch = measure_dispatch(device, quick=request.quick)
        if device.type == "cuda":
            dispatch += measure_launch(device, quick=request.quick)
    links = measure_links(quick=request.quick) if request.links else ()
    return Findings(dispatch=dispatch, links=links)


def _at(
    setting: Setting, peers: Peers, request: Request, *, is_first: bool
) -> Iterator[tuple[str, Findings]]:
    """What a visit finds at one setting, the most telling first; timings come with the first visit."""
    timings: Iterator[tuple[str, Findings]] = iter(())
    if is_first and setting in request.timings and request.workload is not None:
        timings = _all_timings(request, setting, peers)
    # The step as written first: if time runs out, nothing tells more about it.
    yield from itertools.islice(timings, 1)
    if setting in request.ceilings:
        ceilings = measure_ceilings(setting, peers, quick=request.quick)
        yield "ceilings", Findings(ceilings=ceilings)
    if setting in request.collectives and peers.size > 1:
        collectives = measure_collectives(setting, peers, quick=request.quick)
        overlaps = measure_overlap(setting, peers, quick=request.quick)
        yield "collectives", Findings(collectives=collectives, overlaps=overlaps)
    yield from timings
    if setting in request.codecs and peers.size > 1:
        codecs, warnings = measure_codecs(setting, peers, quick=request.quick)
        yield "codecs", Findings(codecs=codecs, warnings=warnings)


def _all_timings(
    request: Request, setting: Setting, peers: Peers
) -> Iterator[tuple[str, Findings]]:
    """The operators of all traces of the step; those of an earlier trace keep their timings."""
    known: set[str] = set()
    for variant, load in enumerate(request.traces):
        is_timed = (setting, load.precision, load.memory_format) in request.timed
        if is_timed or known.issuperset(op.key for op in load.ops):
            continue
        found = _timings(request, variant, setting, peers)
        fresh = tuple(timing for timing in found.timings if timing.key not in known)
        known.update(timing.key for timing in fresh)
        yield f"timings {variant}", msgspec.structs.replace(found, timings=fresh)


def _timings(request: Request, variant: int, setting: Setting, peers: Peers) -> Findings:
    """The operators of one trace of the step, with tensors of its own."""
    workload, skip, budget_s = request.traces[variant], request.skip, request.samples_s
    needed = workload.peak_memory_bytes * (setting.workers if setting.device == "cpu" else 1)
    if setting.device == "cpu":
        free = psutil.virtual_memory().available
    else:
        free = torch.cuda.mem_get_info(peers.device)[0]
    # Decided once for all: a worker that leaves out a pass would miss the barriers.
    if not peers.agree(needed < 0.9 * free):
        reason = f"the step needs {units.num_bytes(needed)}, {units.num_bytes(free)} are free"
        warning = f"operators of {workload.name} were not timed at {setting}: {reason}"
        return Findings(warnings=(warning,))
    with contextlib.ExitStack() as stack:
        clock, directory = None, scratch()
        if directory is not None:
            journal = ProbeJournal(journal_path(directory, _rank()), variant)
            clock = ReplayClock(peers.device, before=stack.enter_context(journal).note)
        timed = time_operators(workload, setting, peers, skip=skip, budget_s=budget_s, clock=clock)
    return Findings(timings=timed.timings, warnings=timed.warnings, checks=(timed.check,))
