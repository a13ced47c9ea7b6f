"""The model of a step: frames, the priced operators in each, collectives' seconds, and rates.

A workload describes a worker's whole batch. With `accumulate=n` an operator does 1/n of its work per
micro-batch but is issued n times, so dispatch is paid n times in full.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ridgeline.compiled_program import CompilerProgram
from ridgeline.errors import PlanError, WorkloadError
from ridgeline.execution import MODES, check_plan, is_compiled_in_parts
from ridgeline.machine import Machine, Setting
from ridgeline.machine.cluster import crossings
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.compiler.compiled import in_parts, price_execution
from ridgeline.simulator.compiler.layout import lays_out
from ridgeline.simulator.compiler.replaying import CALL_DISPATCHES, loading
from ridgeline.simulator.exchange.codecs import CodecCost
from ridgeline.simulator.exchange.communication import overlap_slowdown
from ridgeline.simulator.exchange.late_reads import LateRead, early_update, late_reads
from ridgeline.simulator.exchange.serving import update_seconds, values_pieces
from ridgeline.simulator.exchange.synchronising import (
    communication_seconds,
    decoding_pieces,
    encoding_pieces,
    encodings,
    local_steps_seconds,
)
from ridgeline.simulator.frames import WHOLE_STEP, Frame, step_frames
from ridgeline.simulator.pricing.costs import prices
from ridgeline.simulator.pricing.pieces import (
    BucketCut,
    Piece,
    PricedStep,
    buffer_pieces,
    copy_pieces,
    cut_workload,
    handed_out_by_part,
    issued,
)
from ridgeline.simulator.pricing.sparse_rows import SparseGradient, check_rows, sent_by_rows
from ridgeline.synchronisation import (
    frame_names,
    holds,
    num_shards,
    replaces_update,
    sends_buffers,
    trains_apart,
    without_named_workers,
)
from ridgeline.timeline import Lane
from ridgeline.workload import Workload

CUT_IN_PARTS = (
    "assumed: a forward pass that is compiled in parts, one for each bucket of gradients, has the kernels of "
    "one that is compiled whole, and calls one program more for each"
)
"""Source: autograd sees one node for a compiled backward, and runs its hooks when that is done; so the
runtime cuts it. A GPU that replays the step is told of each gradient by an event of its own."""


HELD_ON_GPU = (
    "assumed: on a GPU held buckets take as long as if the step waited for them; they were never run there, "
    "and what the next forward pass hides of them is not predicted"
)
PUSHED_ROWS = "the time in which sparse gradients are pushed to a store is not predicted"


class StepModel(NamedTuple):
    """All that the clock needs: frames, the pieces of each, collectives' seconds, rates, notes.

    `own_kernels` and `own_bytes` are those of the step as priced, see `PricedStep`. `encodings` are of the
    collectives that a CPU encodes gradients for. `late_reads` are of the buckets that are held on a CPU,
    whose update is not among the pieces.
    """

    frames: tuple[Frame, ...]
    pieces: dict[str, tuple[Piece, ...]]
    communication_s: dict[str, float]
    slowdown: dict[Lane, float]
    gap_s: float
    replay_s: float
    notes: tuple[str, ...]
    own_kernels: int = 0
    own_bytes: int = 0
    encodings: Mapping[str, CodecCost] = {}
    late_reads: tuple[LateRead, ...] = ()


def resized(plan: Plan, workers: int) -> Plan:
    """The plan for another number of workers; CPU threads are left to follow from the cores.

    A worker alone has no exchange to leave out of a step, and what names each worker names others then.

    Raises:
        PlanError: `workers` is below 1.
    """
    # A plan for one worker with an interval would be refused.
    sync = Sync() if workers == 1 and trains_apart(plan.sync) else plan.sync
    if workers != plan.workers:
        sync = without_named_workers(sync)
    return msgspec.structs.replace(
        plan, workers=workers, threads=0, layout=None, sync=sync, choices=()
    )


def setting_of(machine: Machine, workload: Workload, plan: Plan) -> Setting:
    """The setting whose rates hold for a plan; on a CPU, threads 0 are an equal share of a host's cores."""
    if workload.device == "cuda":
        return Setting(device="cuda", workers=plan.workers, threads=0)
    in_host = workers_in_host(machine, plan.workers)
    threads = plan.threads or max(1, machine.host.cores // in_host)
    return Setting(device="cpu", workers=plan.workers, threads=threads)


def workers_in_host(machine: Machine, workers: int) -> int:
    """How many of so many workers share a host, its cores and its memory: of a cluster as it is described."""
    crossed = crossings(machine.cluster, workers)
    return crossed[0].devices if crossed else workers


def model_step(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    setting: Setting,
    programs: tuple[CompilerProgram, ...] = (),
) -> StepModel:
    """Frames, pieces, collectives and rates of a step.

    `programs` are what the compiler made of the step, if that is known. Other arguments as of `simulate`.

    Raises:
        MachineError: the profile lacks a ceiling, or the collectives, that the step needs.
        PlanError: the plan asks for what no step is run with, or for more micro-batches than samples.
        WorkloadError: the workload has no operators.
    """
    workload = as_run(workload, plan)
    _check(workload, plan, setting)
    priced = price_execution(machine, workload, setting, plan, programs)
    cuts = cut_workload(workload, plan.sync) if plan.workers > 1 else ()
    if is_compiled_in_parts(plan, setting.device):
        cuts = handed_out_by_part(workload, cuts)
        priced = in_parts(machine, setting, priced, [cut.closing_op for cut in cuts])
    frames = step_frames(
        workers=plan.workers,
        num_buckets=len(cuts),
        accumulate=plan.accumulate,
        has_buffers=workload.buffer_bytes > 0,
        execution=plan.execution,
        sync=plan.sync,
        has_rows=bool(rows_beside(workload, plan)),
    )
    pieces = _held(machine, plan, setting, priced, cuts, workload.buffer_bytes)
    reads, pieces = _read_late(workload, plan, setting, pieces)
    communication_s, slowdown, assumed = _communication(
        machine, workload, plan, setting, priced, cuts
    )
    encoded, told = encodings(machine, plan, setting, cuts)
    notes = [*_untraced(workload, plan), *priced.notes, *assumed, *told]
    gap_s = replay_s = 0.0
    if MODES[plan.execution].is_replayed_on(setting.device):
        list_ = prices(machine, setting)
        gap_s = list_.dispatch("graph_kernel")
        replay_s = list_.dispatch("graph_replay") + CALL_DISPATCHES * list_.dispatch("forward")
        name = next(frame.name for frame in frames if pieces.get(frame.name))
        pieces[name] = (loading(list_, workload, pieces[name][0]), *pieces[name])
        if workload.is_optimizer_outside:
            held = [p for frame, ps in pieces.items() if frame != "optimizer" for p in ps]
            graph_s = sum(p.lane_s + (gap_s if p.has_kernel else 0.0) for p in held)
            # The optimizer steps behind the replay, and is issued while the graph runs.
            _, replay_s, _ = issued(priced.optimizer, replay_s, replay_s + graph_s)
        notes += list_.notes
    return StepModel(
        frames,
        pieces,
        communication_s,
        slowdown,
        gap_s,
        replay_s,
        tuple(dict.fromkeys(notes)),
        priced.own_kernels,
        priced.own_bytes,
        encoded,
        reads,
    )


def _read_late(
    workload: Workload, plan: Plan, setting: Setting, pieces: dict[str, tuple[Piece, ...]]
) -> tuple[tuple[LateRead, ...], dict[str, tuple[Piece, ...]]]:
    """Where forward waits for held buckets (nowhere on a GPU), and the pieces without their update."""
    if plan.workers == 1 or setting.device == "cuda" or not holds(plan.sync):
        return (), pieces
    reads = late_reads(workload, plan.sync, pieces["forward"], pieces["optimizer"])
    return reads, pieces | {"optimizer": early_update(pieces["optimizer"], reads)}


def _communication(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    setting: Setting,
    priced: PricedStep,
    cuts: Sequence[BucketCut],
) -> tuple[dict[str, float], dict[Lane, float], list[str]]:
    """Seconds of each frame on the communication lane, which lanes hinder which, and what was assumed."""
    if plan.workers == 1:
        return {}, {}, []
    if exchanges_parameters(plan):
        pieces = (*priced.forward, *priced.backward, *priced.optimizer)
        computing_s = sum(piece.lane_s for piece in pieces)
        seconds, assumed = local_steps_seconds(
            machine,
            plan,
            setting,
            cuts,
            workload.buffer_bytes,
            computing_s,
            # Work without dispatch: the length of a kernel is what communication meets.
            [piece.work_s for piece in pieces if piece.has_kernel],
        )
        return seconds, {}, list(assumed)
    is_cut = len(cuts) > 1 and is_compiled_in_parts(plan, setting.device)
    notes = [CUT_IN_PARTS] if is_cut else []
    seconds, assumed = communication_seconds(
        machine, plan, setting, cuts, workload.buffer_bytes, rows_beside(workload, plan)
    )
    if replaces_update(plan.sync):
        updates_s = update_seconds(plan.sync, plan.workers, priced.optimizer, cuts)
        for name, update_s in zip(frame_names(plan.sync, len(cuts)), updates_s, strict=True):
            seconds[name] += update_s
        notes += [PUSHED_ROWS] if sent_by_rows(workload, plan.sync) else []
    if holds(plan.sync) and setting.device == "cuda":
        notes.append(HELD_ON_GPU)
    kernels_s = [piece.work_s for piece in priced.backward if piece.has_kernel]
    slowdown, note = overlap_slowdown(machine, setting, kernels_s, plan.sync)
    return seconds, slowdown, [*notes, *assumed, *([note] if note else [])]


def as_run(workload: Workload, plan: Plan) -> Workload:
    """The step as it was traced for what a plan runs.

    The compiler may lay out images with their channels innermost by itself.
    """
    memory_format = plan.memory_format
    if MODES[plan.execution].is_compiled and lays_out(workload):
        memory_format = "channels_last"
    found = workload.at(plan.precision, memory_format)
    if not sends_buffers(plan.sync):
        found = msgspec.structs.replace(found, buffer_bytes=0)
    return found


def _untraced(workload: Workload, plan: Plan) -> list[str]:
    """What is assumed where the step was not traced as the plan runs it; tf32 has the same operators."""
    if plan.memory_format not in ("as-is", workload.memory_format):
        note = f"{workload.name} was not traced in channels-last memory: assumed to take as long as it is"
        return [note]
    if plan.precision in (workload.precision, "tf32"):
        return []
    note = (
        f"{workload.name} was not traced in {plan.precision}: assumed to have the operators of its trace "
        f"{workload.precision}; trace it with precisions=({plan.precision!r},)"
    )
    return [note]


def rows_beside(workload: Workload, plan: Plan) -> tuple[SparseGradient, ...]:
    """The sparse gradients that have a frame of their own: those of several workers who update themselves."""
    if plan.workers == 1 or replaces_update(plan.sync):
        return ()
    return sent_by_rows(workload, plan.sync)


def exchanges_parameters(plan: Plan) -> bool:
    """Whether workers train alone for some steps, so that no step exchanges gradients."""
    return plan.workers > 1 and trains_apart(plan.sync)


def _held(
    machine: Machine,
    plan: Plan,
    setting: Setting,
    priced: PricedStep,
    cuts: Sequence[BucketCut],
    buffer_bytes: int,
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of every frame that computes."""
    forward = tuple(p.divided(plan.accumulate) for p in priced.forward)
    backward = tuple(p.divided(plan.accumulate) for p in priced.backward)
    mode = MODES[plan.execution]
    if mode.is_one_program:
        # One frame, so micro-batches stand one after the other in it.
        return {WHOLE_STEP: (forward + backward) * plan.accumulate + priced.optimizer}
    pieces = {f"micro/{index}": forward + backward for index in range(plan.accumulate - 1)}
    parts = num_shards(plan.sync, plan.workers)
    # Fewer bytes in as many calls: an optimizer loops over parts as over whole parameters.
    update = tuple(piece.divided(parts) for piece in priced.optimizer)
    if plan.workers > 1 and replaces_update(plan.sync):
        update = values_pieces(prices(machine, setting), cuts)
    pieces |= {"forward": forward, "optimizer": update}
    if plan.workers == 1 or exchanges_parameters(plan):
        return pieces | {"backward": backward}
    # Decoding comes first: the update waits for it, and nothing hides it.
    pieces["optimizer"] = (*decoding_pieces(machine, plan, setting, cuts), *update)
    copies = [
        (
            *copy_pieces(machine, setting, cuts, number),
            *encoding_pieces(machine, plan, setting, cut, number),
        )
        for number, cut in enumerate(cuts)
    ]
    pieces |= segments(backward, cuts, copies)
    buffers = buffer_pieces(machine, setting, buffer_bytes)
    return pieces | {"backward/0": (*buffers, *pieces["backward/0"])}


def segments(
    backward: Sequence[Piece],
    cuts: Sequence[BucketCut],
    copies: Iterable[Iterable[tuple[int, Piece]]],
) -> dict[str, tuple[Piece, ...]]:
    """The pieces of `backward/0 ... K`: split after the op that closes each bucket, with its copies.

    Cuts are in launch order; `copies` are, for each, what is copied into it and after which operator.
    """
    after: dict[int, list[Piece]] = {}
    for bucket in copies:
        for op, piece in bucket:
            after.setdefault(op, []).append(piece)
    parts: list[list[Piece]] = [[] for _ in range(len(cuts) + 1)]
    current = 0
    for piece in backward:
        # Buckets close in launch order, so that one pass over the operators is enough.
        while current < len(cuts) and piece.op > cuts[current].closing_op:
            current += 1
        parts[current].append(piece)
        parts[current].extend(after.pop(piece.op, ()))
    for op, left in after.items():  # a gradient that becomes ready outside backward
        number = next((i for i, cut in enumerate(cuts) if cut.closing_op >= op), len(cuts))
        parts[number].extend(left)
    return {f"backward/{number}": tuple(part) for number, part in enumerate(parts)}


def _check(workload: Workload, plan: Plan, setting: Setting) -> None:
    if not workload.ops:
        raise WorkloadError(
            f"wanted a workload with operators, got none in {workload.name}; trace the step again"
        )
    check_plan(plan, setting.device)
    check_rows(workload, plan)
    if plan.accumulate > max(1, workload.samples):
        raise PlanError(
            f"wanted at least accumulate={plan.accumulate} samples in a worker's batch, got "
            f"{workload.samples} in {workload.name}; lower accumulate"
        )
