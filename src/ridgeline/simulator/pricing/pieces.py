"""A step priced: every operator with its seconds, and what the runtime adds around the operators.

A piece is the smallest thing on the compute lane: one operator, or the copy of a gradient into its
bucket. Pieces are made once per machine, workload, setting and precision, and then only arranged.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ridgeline.machine import Machine, Setting
from ridgeline.plan import Precision, Sync, aligned_elements, cut_buckets
from ridgeline.simulator.pricing.costs import Prices, prices
from ridgeline.simulator.pricing.dataflow import element_bytes
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.simulator.pricing.sparse_rows import sent_by_rows
from ridgeline.workload import Op, Parameter, Workload

LAUNCH_DISPATCHES = 27
"""Host cost of sending one bucket operator by operator on a GPU, in dispatches of a forward operator.

Source: two H200s, hosts with 12 to 14 us a dispatch; a ResNet-18 step with seven buckets instead of two took
0.38 and 0.55 ms more for each, of which 0.3 ms were seen in the calls (copy, collective, events, mark).
"""


class Piece(NamedTuple):
    """One operator of a step with its cost; seconds throughout.

    `work_s` is what scales with the batch, `fixed_s` what every call costs on its lane besides (on the
    CPU, the dispatch), `host_s` what issuing costs on the host lane (on GPUs). `op` is -1 for what is
    not an operator of the workload; a kernel that was fused has the first of its `members` there. The host
    issues a piece that `waits` only when the device has done what came before.
    """

    name: str
    module: str
    op: int = -1
    work_s: float = 0.0
    fixed_s: float = 0.0
    host_s: float = 0.0
    ideal_s: float = 0.0
    roofline_s: float = 0.0
    bound: str = "memory"
    source: str = "assumed"
    flops: int = 0
    num_bytes: int = 0
    has_kernel: bool = False
    members: tuple[int, ...] = ()
    waits: bool = False

    @property
    def lane_s(self) -> float:
        """Seconds on the compute lane."""
        return self.work_s + self.fixed_s

    def divided(self, parts: int) -> "Piece":
        """The same operator on one of `parts` equal parts of the batch: less work, as many calls."""
        if parts == 1:
            return self
        return self._replace(
            work_s=self.work_s / parts,
            ideal_s=self.ideal_s / parts,
            roofline_s=self.roofline_s / parts,
            flops=self.flops // parts,
            num_bytes=self.num_bytes // parts,
        )


def issued(
    pieces: Iterable[Piece], host_s: float, device_s: float
) -> tuple[list[float], float, float]:
    """When the host has issued each piece, when all of them, and when the device is done with them.

    An operator that hands values to the host (the number of rows of a sparse gradient) is issued when the
    device has done all that came before; what it waits for by itself is in its host time, which was measured.

    The host begins at `host_s`; at `device_s` the device is done with what was issued before.
    """
    times: list[float] = []
    for piece in pieces:
        if piece.waits:
            host_s = max(host_s, device_s)
        host_s += piece.host_s
        times.append(host_s)
        if piece.has_kernel:
            device_s = max(device_s, host_s) + piece.lane_s
    return times, host_s, device_s


ADDITIVE = ("work_s", "fixed_s", "host_s", "ideal_s", "roofline_s", "flops", "num_bytes")
"""Fields of a piece that add up where several are one."""


class PricedStep(NamedTuple):
    """The operators of a step by phase, priced, and the notes about what was assumed.

    `own_kernels` are those that a compiler writes itself, `own_bytes` what they move.
    """

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    optimizer: tuple[Piece, ...]
    notes: tuple[str, ...]
    own_kernels: int = 0
    own_bytes: int = 0


class BucketCut(NamedTuple):
    """Gradients that travel together: bytes, the op after which they may, and (op, bytes) of each.

    They are of one dtype, whose elements have `element_bytes`. In memory they are `num_elements`, with what
    aligns them, of parameters of these `shapes`.
    """

    num_bytes: int
    closing_op: int
    members: tuple[tuple[int, int], ...]
    element_bytes: int
    num_elements: int
    shapes: tuple[tuple[int, ...], ...]


@kept_by_identity(64)
def price_step(
    machine: Machine, workload: Workload, setting: Setting, precision: Precision = "as-is"
) -> PricedStep:
    """Every operator of the workload with its cost; made once and kept.

    The workload is that of one worker; `precision` as of `op_seconds`.

    Raises:
        MachineError: the profile lacks a ceiling that an operator needs.
    """
    list_ = Prices(machine, setting, precision)
    by_phase: dict[str, list[Piece]] = {"forward": [], "backward": [], "optimizer": []}
    for index, op in enumerate(workload.ops):
        by_phase[op.phase].append(_price_op(list_, index, op))
    forward, backward, optimizer = map(tuple, by_phase.values())
    return PricedStep(forward, backward, optimizer, list_.notes)


def _price_op(list_: Prices, index: int, op: Op) -> Piece:
    cost = list_.op(op)
    dispatch_s = list_.dispatch(op.phase)
    work_s, fixed_s, host_s = cost.seconds, 0.0, 0.0
    has_kernel = op.family != "view" and not op.runs_on_host
    if list_.setting.device == "cuda":
        # The dispatch was measured on the device, so it contains the launch; it is a mean over all
        # operators, and one with a kernel is never issued faster than a bare launch.
        least_s = list_.dispatch("launch") if has_kernel else 0.0
        issue_s = list_.issue(op)
        host_s = max(dispatch_s if issue_s is None else issue_s, least_s)
    elif cost.has_dispatch:
        # A timed call contains its dispatch, which a smaller batch would pay as well.
        fixed_s = min(dispatch_s, cost.seconds)
        work_s = cost.seconds - fixed_s
    else:
        fixed_s = dispatch_s
    return Piece(
        name=op.name,
        module=op.module,
        op=index,
        work_s=work_s,
        fixed_s=fixed_s,
        host_s=host_s,
        ideal_s=cost.ideal_s,
        roofline_s=cost.roofline_s,
        bound=cost.bound,
        source=cost.source,
        flops=op.flops,
        num_bytes=op.bytes_moved,
        has_kernel=has_kernel,
        waits=list_.setting.device == "cuda" and op.waits_for_device,
    )


def bucket_gradients(workload: Workload, sync: Sync) -> tuple[Parameter, ...]:
    """The parameters that buckets are cut from, in the order in which the reducer expects them.

    Sparse gradients travel beside them, unless parameters are exchanged.

    Those that receive gradients come in ready order; trainable ones that receive none follow, in reverse
    order of registration, and travel with whatever is open at the end of backward.
    """
    ready = set(workload.ready_order)
    rest = [p for p in workload.parameters if p.is_trainable and p.name not in ready]
    apart = {one.parameter.name for one in sent_by_rows(workload, sync)}
    found = (*workload.gradients, *reversed(rest))
    return tuple(p for p in found if p.name not in apart) if apart else found


_SIGNALS = Parameter(name="", shape=(1,), dtype="float32", num_bytes=4, is_trainable=True)
"""Of this the runtime has a bucket where all gradients are sparse, for what workers tell each other."""


def cut_workload(workload: Workload, sync: Sync) -> tuple[BucketCut, ...]:
    """The buckets of a workload in launch order, each with the op of backward that closes it.

    Buckets start in order, so one waits for those before it even if it is full earlier.
    """
    gradients = bucket_gradients(workload, sync)
    if not gradients and workload.ready_order:
        gradients = (_SIGNALS,)
    last_op = max((i for i, op in enumerate(workload.ops) if op.phase == "backward"), default=-1)
    cuts = []
    reached = -1
    for cut in cut_buckets([(p.num_bytes, p.dtype) for p in gradients], sync.bucket_bytes):
        mine = [gradients[index] for index in cut]
        # An unused parameter has no operator, and travels with the end of backward.
        members = tuple((p.ready_op if p.ready_op >= 0 else last_op, p.num_bytes) for p in mine)
        reached = max(reached, *(op for op, _ in members))
        num_bytes = sum(p.num_bytes for p in mine)
        each = element_bytes(mine[0].dtype)
        num_elements = sum(aligned_elements(p.num_bytes // each, each) for p in mine)
        shapes = tuple(p.shape for p in mine)
        cuts.append(BucketCut(num_bytes, reached, members, each, num_elements, shapes))
    return tuple(cuts)


def handed_out_by_part(workload: Workload, cuts: Sequence[BucketCut]) -> tuple[BucketCut, ...]:
    """The buckets of a step that is compiled in parts: the gradients of each come when its part is over.

    A part ends with what follows the last gradient in the same module, the last one with backward.
    """
    backward = [index for index, op in enumerate(workload.ops) if op.phase == "backward"]
    found: list[BucketCut] = []
    for number, cut in enumerate(cuts):
        end, module = cut.closing_op, workload.ops[cut.closing_op].module
        for index in (index for index in backward if index > end):
            if number < len(cuts) - 1 and workload.ops[index].module != module:
                break
            end = index
        members = tuple((end, num_bytes) for _, num_bytes in cut.members)
        found.append(cut._replace(closing_op=end, members=members))
    return tuple(found)


def copy_pieces(
    machine: Machine, setting: Setting, cuts: Sequence[BucketCut], number: int
) -> tuple[tuple[int, Piece], ...]:
    """The copies of a bucket's gradients into it: (op after which it happens, piece).

    On the CPU every gradient is copied as soon as it is made, at the rate of all buckets together: what is
    written to was last touched a step ago. On a GPU one launch copies the bucket, and what else sending it
    costs the host is with it.

    Raises:
        MachineError: no ceiling in bytes per second was measured.
    """
    list_, cut = prices(machine, setting), cuts[number]
    module = f"bucket/{number}"
    if setting.device == "cuda":
        return ((cut.closing_op, _sending(list_, "bucket_copy", module, cut.num_bytes)),)
    dispatch_s = list_.dispatch("backward")
    total = sum(size for each in cuts for _, size in each.members)
    whole_s = list_.copy_seconds(2 * total) if total else 0.0
    found: list[tuple[int, Piece]] = []
    for op, size in cut.members:
        if size:
            seconds = whole_s * size / total
            piece = memory_piece(list_, "bucket_copy", module, 2 * size)
            at_once = piece._replace(work_s=seconds, roofline_s=seconds, fixed_s=dispatch_s)
            found.append((op, at_once))
    return tuple(found)


def buffer_pieces(machine: Machine, setting: Setting, num_bytes: int) -> tuple[Piece, ...]:
    """The copy from which the buffers are sent; on the CPU it is taken to cost nothing.

    Raises:
        MachineError: no ceiling in bytes per second was measured.
    """
    if not num_bytes or setting.device != "cuda":
        return ()
    return (_sending(prices(machine, setting), "buffers_copy", "buffers", num_bytes),)


def _sending(list_: Prices, name: str, module: str, num_bytes: int) -> Piece:
    """One launch on a GPU that copies what is sent then, and what sending costs the host."""
    host_s = LAUNCH_DISPATCHES * list_.dispatch("forward")
    return memory_piece(list_, name, module, 2 * num_bytes)._replace(host_s=host_s)


def memory_piece(list_: Prices, name: str, module: str, num_bytes: int) -> Piece:
    """Work of the runtime that reads and writes `num_bytes` in total.

    Raises:
        MachineError: no ceiling in bytes per second was measured.
    """
    seconds = list_.copy_seconds(num_bytes)
    return Piece(
        name,
        module,
        work_s=seconds,
        roofline_s=seconds,
        source="curve",
        num_bytes=num_bytes,
        has_kernel=True,
    )
