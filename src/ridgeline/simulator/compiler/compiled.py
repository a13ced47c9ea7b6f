"""A priced step after torch's compiler: fused runs as single pieces, calls of programs instead of operators.

The model is simple on purpose, and every part of it is stated in the notes of a prediction: which operators
become one kernel is told by `fusion` (or by the compiler's code, where that was read: `made`), such a kernel
takes as long as its bytes at the measured bandwidth (on a CPU, and what its operators were timed to take
beyond theirs), and the host pays for calling the program and each of its kernels.
"""

from collections.abc import Sequence

from ridgeline.compiled_program import CompilerProgram
from ridgeline.execution import MODES, Form
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan, Precision
from ridgeline.simulator.compiler.beside import ASSUMED, hide_weight_gradients
from ridgeline.simulator.compiler.call_costs import CALLS, assumed_calls, handing
from ridgeline.simulator.compiler.coverage import why_unread
from ridgeline.simulator.compiler.fused_optimizer import fused_optimizer
from ridgeline.simulator.compiler.fusion import (
    Run,
    blocks_of,
    fused_runs,
    is_loop,
    parts_of,
    run_alone,
)
from ridgeline.simulator.compiler.layout import conversion_bytes, lays_out
from ridgeline.simulator.compiler.library_inputs import copied_bytes
from ridgeline.simulator.compiler.made import KERNEL_RATE, price_made
from ridgeline.simulator.compiler.replaying import with_replayed_model
from ridgeline.simulator.compiler.rewriting import rewritten_seconds, takes_by_index
from ridgeline.simulator.compiler.second_stages import second_stages
from ridgeline.simulator.pricing.costs import Prices, prices
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.simulator.pricing.pieces import Piece, PricedStep, price_step
from ridgeline.simulator.pricing.value_checks import value_checks
from ridgeline.workload import CLIPPING, Op, Phase, Workload


def price_execution(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    plan: Plan,
    programs: tuple[CompilerProgram, ...] = (),
) -> PricedStep:
    """The operators of a step as a plan's execution mode runs them, priced; made once and kept.

    Args:
        machine: Measured ceilings and timings.
        workload: The step of one worker; what was traced in the plan's precision is priced as it is.
        setting: How the device is shared.
        plan: Of a replayed graph only what the runtime changes for it is priced here (the optimizer in
            its fused form, weight gradients beside the chain); the rest is left to the clock.
        programs: What the compiler made of this step; none: what it makes is assumed.

    Raises:
        MachineError: the profile lacks a ceiling that an operator needs.
    """
    mode = MODES[plan.execution]
    # A trace in the plan's own precision has its operators: casting them again would count twice.
    precision = "as-is" if workload.precision == plan.precision else plan.precision
    if mode.form in CALLS:
        owns_random = plan.random == "compiled"
        priced = _price_compiled(machine, workload, setting, precision, mode.form, owns_random)
        reason = why_unread(workload, plan, programs)
        if reason:
            note = f"the kernels of {plan.execution} stay as assumed: {reason}"
            priced = priced._replace(notes=(*priced.notes, note))
        elif programs:
            priced = _price_read(machine, workload, setting, precision, mode.form, programs)
        if (reason or not programs) and plan.memory_format == "as-is" and lays_out(workload):
            conversion = _conversion(Prices(machine, setting, precision), priced, workload)
            # Only where it is assumed: what was read of the compiler has these kernels already.
            priced = priced._replace(forward=(conversion, *priced.forward))
    else:
        priced = price_step(machine, workload, setting, precision)
    if mode.replays_model:
        priced = with_replayed_model(Prices(machine, setting, precision), workload, priced)
    is_replayed = mode.is_replayed_on(setting.device)
    if not mode.checks_values_on(setting.device):
        priced = _without(priced, value_checks(workload))
    has_beside = plan.kernels == "combined" or mode.is_one_program or plan.workers > 1
    if mode.is_compiled and is_replayed and has_beside and mode.form != "packaged":
        hidden = hide_weight_gradients(workload, priced.backward)
        if hidden != priced.backward:
            priced = priced._replace(backward=hidden, notes=(*priced.notes, ASSUMED))
    # Clipping is no part of the fused kernel.
    clipping = tuple(p for p in priced.optimizer if p.module == CLIPPING)
    updating = [p for p in priced.optimizer if p.module != CLIPPING]
    is_fused = mode.is_replayed or plan.optimizer == "fused"
    if not (is_fused and setting.device == "cuda" and workload.fused_optimizer_bytes and updating):
        return priced
    fused = fused_optimizer(Prices(machine, setting, precision), updating, workload)
    return priced._replace(optimizer=(*clipping, fused))


@kept_by_identity(64)
def _price_compiled(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    precision: Precision,
    form: Form,
    owns_random: bool,
) -> PricedStep:
    priced = price_step(machine, workload, setting, precision)
    list_ = Prices(machine, setting, precision)
    runs = fused_runs(workload, form, owns_random=owns_random)
    compiled = _Compiled(list_, workload, form, runs, owns_random=owns_random)
    forward = compiled.pieces("forward", priced.forward)
    backward = compiled.pieces("backward", priced.backward)
    optimizer = compiled.pieces("optimizer", priced.optimizer)
    # Behind the pieces, for which dispatches are looked up.
    notes = (*priced.notes, *list_.notes, *_assumptions(workload, form, runs))
    return PricedStep(
        forward,
        backward,
        optimizer,
        tuple(dict.fromkeys(notes)),
        own_kernels=compiled.own_kernels,
        own_bytes=compiled.own_bytes,
    )


def _price_read(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    precision: Precision,
    form: Form,
    programs: tuple[CompilerProgram, ...],
) -> PricedStep:
    """The step as the compiler's code has it."""
    list_ = Prices(machine, setting, precision)
    compiled = _Compiled(list_, workload, form, ())
    read = price_made(
        list_,
        workload,
        price_step(machine, workload, setting, precision),
        programs,
        call=compiled.call,
        kernel=compiled.kernel,
        has_optimizer=form in ("step-graph", "packaged"),
    )
    notes = (*read.notes, assumed_calls(form))
    return read._replace(notes=tuple(dict.fromkeys(notes)))


def in_parts(
    machine: Machine, setting: Setting, priced: PricedStep, closing_ops: Sequence[int]
) -> PricedStep:
    """A step whose forward pass was compiled whole, compiled in parts: the same kernels, and more calls.

    `closing_ops` are the operators of backward behind which its parts end, in order.
    """
    # Behind the last bucket nothing is cut: the last part ends with backward.
    ends = closing_ops[:-1]
    if not ends or not priced.forward:
        return priced
    list_ = prices(machine, setting)
    backward: list[Piece] = []
    left = list(ends)
    for piece in priced.backward:
        backward.append(piece)
        # Buckets may close at one operator: then several programs begin behind it.
        while left and piece.op > left[0]:
            left.pop(0)
            # Behind the piece: what is no operator counts to the part that the piece before it has opened.
            backward.append(_call(list_, "backward", piece, CALLS["compiled"]["backward"].call))
    # Every part is also called in forward, whose guards run once more each.
    call = _call(list_, "forward", priced.forward[0], CALLS["compiled"]["forward"].call)
    calls = [call] * len(ends)
    return priced._replace(forward=(*calls, *priced.forward), backward=tuple(backward))


def _call(list_: Prices, phase: Phase, first: Piece, dispatches: float) -> Piece:
    """Calling the program of which `first` is the first operator."""
    return _issued(
        list_, Piece(f"call compiled {phase}", first.module, bound="dispatch"), dispatches
    )


def _issued(list_: Prices, piece: Piece, dispatches: float) -> Piece:
    """On a GPU a library's operator is issued as it is without the compiler: no faster."""
    # In dispatches, so that a slow host is slow here as well.
    seconds = dispatches * list_.dispatch("forward")
    if list_.setting.device == "cuda":
        return piece._replace(host_s=max(seconds, piece.host_s))
    return piece._replace(fixed_s=seconds)


def _without(priced: PricedStep, left_out: frozenset[int]) -> PricedStep:
    """The step without the pieces of some operators; a kernel that others share stays."""
    if not left_out:
        return priced

    def kept(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(p for p in pieces if not left_out.issuperset(p.members or (p.op,)))

    return priced._replace(forward=kept(priced.forward), backward=kept(priced.backward))


def _conversion(list_: Prices, priced: PricedStep, workload: Workload) -> Piece:
    """What the compiler's own change of memory format moves; most of it is part of other kernels."""
    num_bytes = conversion_bytes(workload)
    return Piece(
        "convert_layout",
        priced.forward[0].module,
        work_s=list_.copy_seconds(num_bytes),
        roofline_s=list_.least_copy_seconds(num_bytes),
        num_bytes=num_bytes,
        has_kernel=True,
    )


class _Compiled:
    """Turns the pieces of the eager step into those of a compiled one."""

    def __init__(
        self,
        list_: Prices,
        workload: Workload,
        form: Form,
        runs: Sequence[Run],
        *,
        owns_random: bool = False,
    ) -> None:
        self._owns_random = owns_random
        self._on_gpu = list_.setting.device == "cuda"
        self._list = list_
        self._workload = workload
        self._ops = workload.ops
        self._calls = CALLS[form]
        self._part = parts_of(workload, form)
        self._blocks = blocks_of(workload) if form == "regional" else {}
        self._runs = {run.ops[0]: run for run in runs}
        self._fused = {index for run in runs for index in run.ops}
        self.own_kernels = self.own_bytes = 0

    def pieces(self, phase: Phase, eager: Sequence[Piece]) -> tuple[Piece, ...]:
        """A phase as the compiled step runs it: a run stands where its first operator stood."""
        found: list[Piece] = []
        # By operator, since a run takes pieces that stand further down.
        by_op = {piece.op: piece for piece in eager}
        called: set[object] = set()
        for piece in eager:
            op = self._ops[piece.op]
            part = self._part(op)
            if part is None:
                found.append(piece)
                continue
            # A program is called where its first operator stood; the others are inside of it.
            if part not in called:
                called.add(part)
                found.append(self.call(phase, piece))
            run = self._runs.get(piece.op)
            if run is not None:
                joined = self._joined(run, by_op)._replace(members=run.ops)
                found.append(self.kernel(phase, joined))
            elif piece.op not in self._fused and _has_work(op):
                copied = copied_bytes(self._workload, piece.op, self._is_loop)
                if copied:
                    found.append(self.kernel(phase, self._copy(piece, copied)))
                found.append(self.kernel(phase, self._alone(piece, op)))
        return tuple(piece for piece in found if piece.lane_s or piece.host_s or piece.has_kernel)

    def _joined(self, run: Run, by_op: dict[int, Piece]) -> Piece:
        """One kernel for a run: its bytes at the measured bandwidth, and no more than its parts took.

        Small tensors stay in the caches of a CPU, where exponentials and the like take longer than the bytes.
        """
        members = [by_op[index] for index in run.ops]
        # A CPU adds up the parts of a sum within one loop.
        stages = sum(second_stages(self._ops[index]) for index in run.ops) if self._on_gpu else 0
        self.own_kernels += 1 + stages
        self.own_bytes += run.num_bytes
        apart_s = sum(piece.work_s for piece in members)
        # Fusing never makes operators slower than they were apart.
        least_s = min(self._list.least_copy_seconds(run.num_bytes), apart_s)
        taken_s = min(apart_s, least_s + sum(self._computing_s(by_op[index]) for index in run.ops))
        if self._on_gpu:
            copied_s = self._list.copy_seconds(run.num_bytes) / KERNEL_RATE
            # What the smallest kernel takes: a second stage reduces a few numbers.
            smallest_s = self._list.copy_seconds(1) / KERNEL_RATE
            # Elements that lie anywhere are read no faster within a larger kernel.
            strewn_s = sum(self._strewn_s(by_op[index]) for index in run.ops)
            taken_s = max(least_s, min(copied_s + strewn_s, apart_s)) + stages * smallest_s
        return members[0]._replace(
            name=_name(members),
            work_s=taken_s,
            ideal_s=0.0,
            roofline_s=least_s,
            bound="memory",
            source="assumed",
            flops=sum(piece.flops for piece in members),
            num_bytes=run.num_bytes,
            has_kernel=True,
        )

    def _computing_s(self, piece: Piece) -> float:
        """What an operator was timed to take over the seconds of its bytes: exponentials and the like."""
        if piece.source != "timing":
            return 0.0
        return max(0.0, piece.work_s - self._list.copy_seconds(self._ops[piece.op].bytes_moved))

    def _strewn_s(self, piece: Piece) -> float:
        """What taking elements by index was timed to take over the seconds of its bytes."""
        return self._computing_s(piece) if takes_by_index(self._ops[piece.op]) else 0.0

    def _alone(self, piece: Piece, op: Op) -> Piece:
        """A kernel of one operator: a library's, or the compiler's where it writes such loops itself."""
        if self._is_loop(op):
            run = run_alone(self._workload, piece.op)
            return self._joined(run, {piece.op: piece})._replace(name=piece.name)
        if not self._on_gpu:
            return piece
        precision = self._workload.precision
        return piece._replace(work_s=rewritten_seconds(self._list, op, piece.work_s, precision))

    def _is_loop(self, op: Op) -> bool:
        return is_loop(op, on_gpu=self._on_gpu, owns_random=self._owns_random)

    def _copy(self, piece: Piece, num_bytes: int) -> Piece:
        """What is written out for the library that runs the piece."""
        run = Run((piece.op,), num_bytes // 2, num_bytes - num_bytes // 2)
        # In place of the attention's own seconds, which would bound those of the copy in `_joined`.
        whole = piece._replace(work_s=self._list.copy_seconds(num_bytes) / KERNEL_RATE, flops=0)
        return self._joined(run, {piece.op: whole})._replace(name="copy_for_library")

    def kernel(self, phase: Phase, piece: Piece) -> Piece:
        """The piece, issued by a compiled program."""
        return _issued(self._list, piece, self._calls["forward" if self._on_gpu else phase].kernel)

    def call(self, phase: Phase, first: Piece) -> Piece:
        """Calling the program of which `first` is the first operator."""
        handed = handing(phase, self._workload) if self._on_gpu else 0.0
        return _call(self._list, phase, first, self._calls[phase].call + handed)


def _has_work(op: Op) -> bool:
    """Views and empty results vanish from compiled programs."""
    return op.family != "view" and (op.family != "other" or bool(op.flops or op.bytes_moved))


def _name(members: Sequence[Piece]) -> str:
    """`fused_native_batch_norm_relu`: the operators of a kernel, each once, as Inductor names kernels."""
    words = dict.fromkeys(piece.name.split(".")[1] for piece in members if "." in piece.name)
    shown = list(words)[:4]
    more = f"_and_{len(words) - 4}_more" if len(words) > 4 else ""
    return f"fused_{'_'.join(shown)}{more}"


def _assumptions(workload: Workload, form: Form, runs: Sequence[Run]) -> tuple[str, ...]:
    if form == "regional" and not blocks_of(workload):
        return (
            "assumed: no module path names numbered blocks, so that none is compiled by itself",
        )
    count = sum(len(run.ops) for run in runs)
    fused = (
        f"assumed: compiling makes {len(runs)} kernels of {count} elementwise operators, normalisations, "
        "reductions and copies between contractions, as fast as their bytes at the measured bandwidth"
    )
    if workload.device == "cpu":
        fused += ", and what their operators were timed to compute besides"
    return fused, assumed_calls(form)
