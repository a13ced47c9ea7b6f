"""What exchanging the gradients costs on a machine: collectives, the codec's work beside them, bytes sent.

The entries of the plan's `Sync` say what a bucket needs (see `synchronisation`); the machine's size tables
and its memory bandwidth say how long that takes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.exchange.codecs import CodecCost, CodecPrices
from ridgeline.simulator.exchange.communication import (
    CommunicationCost,
    collective_seconds,
    overlap_slowdown,
)
from ridgeline.simulator.pricing.costs import prices
from ridgeline.simulator.pricing.pieces import BucketCut, Piece, cut_workload, memory_piece
from ridgeline.simulator.pricing.sparse_rows import SparseGradient, rows_note
from ridgeline.synchronisation import (
    GATHERING,
    SPARSE_ROWS,
    CollectiveTraffic,
    codec_bytes,
    cut_fragments,
    delay_of,
    flags_of,
    frame_names,
    gathering_bytes,
    gathering_of,
    handed_bytes,
    outer_bytes,
    rows_memory_bytes,
    rows_traffic,
    serving_bytes,
    shards_update,
    traffic_of,
    trains_apart,
    values_of,
)
from ridgeline.timeline import Lane
from ridgeline.workload import Workload


class BucketPrices:
    """Seconds in which a bucket is reduced over the workers, by its size; on a GPU without its codec."""

    def __init__(self, machine: Machine, sync: Sync, setting: Setting) -> None:
        self.sync = sync
        self._machine = machine
        self._setting = setting
        self._codec = CodecPrices(machine, sync, setting)

    def whole_seconds(self, num_bytes: int, element_bytes: int) -> float:
        """Seconds on the communication lane, with encoding where a CPU does it there; arguments as in `cost`.

        Raises:
            MachineError: no table of a collective was measured, or nothing from which the cost of
                encoding follows.
        """
        seconds = self.cost(num_bytes, element_bytes).seconds
        if self._setting.device == "cuda":
            return seconds
        return seconds + self._codec.seconds(num_bytes)

    def cost(
        self, num_bytes: int, element_bytes: int, shapes: Sequence[tuple[int, ...]] = ()
    ) -> CommunicationCost:
        """The cost of a bucket: its collectives, one after the other.

        `num_bytes` are gradients, `element_bytes` an element, of parameters of these shapes, where known.

        Raises:
            MachineError: no table of a collective was measured.
        """
        num_elements = -(-num_bytes // element_bytes)
        return self.priced(
            traffic_of(self.sync, num_elements, element_bytes, self._setting.workers, shapes)
        )

    def priced(self, parts: Sequence[CollectiveTraffic]) -> CommunicationCost:
        """The cost of some collectives, one after the other.

        Raises:
            MachineError: no table of a collective was measured.
        """
        costs = [
            collective_seconds(self._machine, part.operation, part.num_bytes, self._setting)
            for part in parts
        ]
        notes = dict.fromkeys(cost.note for cost in costs if cost.note)
        return CommunicationCost(sum(cost.seconds for cost in costs), "; ".join(notes))


def communication_seconds(
    machine: Machine,
    plan: Plan,
    setting: Setting,
    cuts: Sequence[BucketCut],
    buffer_bytes: int,
    rows: Sequence[SparseGradient] = (),
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of every frame on the communication lane, and what was assumed.

    The workers, several, have the buckets `cuts`, buffers that follow worker 0, and sparse gradients (`rows`)
    beside them.

    Raises:
        MachineError: no table of a collective was measured.
    """
    seconds: dict[str, float] = {}
    notes: dict[str, None] = {}
    bucket = BucketPrices(machine, plan.sync, setting)

    def add(name: str, cost: CommunicationCost, moved_bytes: int = 0) -> None:
        copying_s = prices(machine, setting).copy_seconds(moved_bytes) if moved_bytes else 0.0
        seconds[name] = seconds.get(name, 0.0) + cost.seconds + copying_s
        notes[cost.note] = None

    names = frame_names(plan.sync, len(cuts))
    for name, cut in zip(names, cuts, strict=True):
        served = serving_bytes(plan.sync, cut.num_bytes, plan.workers)
        add(name, bucket.cost(cut.num_bytes, cut.element_bytes, cut.shapes), served)
    if flags := flags_of(plan.sync, sum(len(cut.shapes) for cut in cuts)):
        # Flags of all buckets travel with the last one, as in `Reducer._exchange`.
        add(names[-1], bucket.priced(flags))
    if shards_update(plan.sync):
        sizes = [cut.num_bytes for cut in cuts]
        moved = sum(gathering_bytes(plan.sync, size, plan.workers) for size in sizes)
        parts = [part for size in sizes for part in gathering_of(plan.sync, size, plan.workers)]
        add(GATHERING, bucket.priced(parts), moved)
    if buffer_bytes:
        add("broadcast_buffers", bucket.priced((CollectiveTraffic("broadcast", buffer_bytes),)))
    if rows:
        notes[rows_note(rows)] = None
        sent = [one.to_send for one in rows]
        gathered = bucket.priced(rows_traffic(sent, plan.workers))
        add(SPARSE_ROWS, gathered, rows_memory_bytes(sent, plan.workers))
    return seconds, tuple(filter(None, notes))


def local_steps_seconds(
    machine: Machine,
    plan: Plan,
    setting: Setting,
    cuts: Sequence[BucketCut],
    buffer_bytes: int,
    computing_s: float,
    kernels_s: Sequence[float] = (),
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of a step for the exchange of parameters every `every` steps, and what that is a share of.

    Args:
        machine: Its size tables, its codecs and its memory bandwidth are read.
        plan: How parameters are exchanged, and how often.
        setting: Workers, several.
        cuts: The parameters as they travel.
        buffer_bytes: Of the model's buffers, which follow worker 0 at each exchange.
        computing_s: Seconds of a step without exchange; those of a delay hide what travels meanwhile.
        kernels_s: Of each kernel of such a step.

    Raises:
        MachineError: no table of a collective, or no ceiling in bytes per second, was measured.

    Source: collectives by their tables, the outer optimizer by the bytes that it moves.
    """
    # An exchange of parameters has the collectives of one of gradients, with nothing to hide behind.
    seconds, assumed = communication_seconds(machine, plan, setting, cuts, buffer_bytes)
    whole_s = sum(seconds.values()) + prices(machine, setting).copy_seconds(
        sum(outer_bytes(plan.sync, cut.num_bytes) for cut in cuts)
    )
    (name,) = frame_names(plan.sync, 1)
    notes = list(assumed)
    # On a GPU codecs are kernels in the stream, and were not timed: bytes decide.
    if setting.device == "cpu":
        codec = CodecPrices(machine, plan.sync, setting)
        codec_s = sum(codec.seconds(cut.num_bytes, cut.shapes) for cut in cuts)
        notes += codec.notes
    else:
        moved = sum(sum(codec_bytes(plan.sync, cut.num_bytes, plan.workers)) for cut in cuts)
        codec_s = prices(machine, setting).copy_seconds(moved)
    whole_s += codec_s
    every, delay = plan.sync.every, delay_of(plan.sync)
    note = (
        f"parameters are exchanged every {every} steps, which takes {units.seconds(whole_s)}: each step "
        f"is given 1/{every} of it, while a measured median step has none of it"
    )
    if delay:
        travelling_s = codec_s + sum(seconds[name] for name in frame_names(plan.sync, len(cuts)))
        slowdown, told = overlap_slowdown(machine, setting, kernels_s, plan.sync)
        # Each fragment travels behind steps of its own, so they hide one by one.
        shares = [travelling_s * share for share in fragment_shares(plan.sync, cuts)]
        parts = [hidden_behind(share_s, delay * computing_s, slowdown) for share_s in shares]
        beside = Beside(sum(p.hidden_s for p in parts), sum(p.lost_s for p in parts))
        notes.append(told)
        note = (
            f"{note}, and {units.seconds(beside.hidden_s)} of it hide behind the {delay} steps of the delay, "
            f"which take {units.seconds(beside.lost_s)} longer beside it"
        )
        # What is hidden is no wait any more, and what the steps lose to it is.
        whole_s += beside.lost_s - beside.hidden_s
    return {name: whole_s / every}, (*filter(None, notes), note)


def fragment_shares(sync: Sync, cuts: Sequence[BucketCut]) -> list[float]:
    """Which part of all bytes each fragment of the parameters has, in the order of their exchanges."""
    sizes = [size for cut in cuts for _, size in cut.members]
    fragments = cut_fragments(sizes, int(values_of(sync)["fragments"]))
    total = max(1, sum(sizes))
    return [sum(sizes[place] for place in places) / total for places in fragments]


class Beside(NamedTuple):
    """Of what travels beside steps: the seconds that are hidden, and by how many the steps are longer."""

    hidden_s: float
    lost_s: float


def hidden_behind(travelling_s: float, steps_s: float, slowdown: Mapping[Lane, float]) -> Beside:
    """What of an exchange is hidden behind some steps, where each slows the other while both go on.

    The seconds are those with nothing beside; `slowdown`: how many times as long each takes beside the other.
    """
    compute, communication = (slowdown.get(lane, 1.0) for lane in ("compute", "communication"))
    # While both go on each is slowed; whichever ends first ends that.
    both_s = min(travelling_s * communication, steps_s * compute)
    return Beside(both_s / communication, both_s * (1.0 - 1.0 / compute))


def encodings(
    machine: Machine, plan: Plan, setting: Setting, cuts: Sequence[BucketCut]
) -> tuple[dict[str, CodecCost], tuple[str, ...]]:
    """What encodes for each collective of a step in the thread of its lane, and what was assumed.

    Nothing on a GPU, without a codec, and where parameters are exchanged: see `local_steps_seconds`.

    Raises:
        MachineError: neither the codec nor a ceiling in bytes per second was measured.
    """
    codec = CodecPrices(machine, plan.sync, setting)
    if setting.device == "cuda" or not codec.is_needed or trains_apart(plan.sync):
        return {}, ()
    names = frame_names(plan.sync, len(cuts))
    costs = (codec.encoding(cut.num_bytes, cut.shapes) for cut in cuts)
    return dict(zip(names, costs, strict=True)), codec.notes


def encoding_pieces(
    machine: Machine, plan: Plan, setting: Setting, cut: BucketCut, number: int
) -> tuple[tuple[int, Piece], ...]:
    """What encoding a bucket on a GPU adds to backward: (op after which it happens, piece).

    Raises:
        MachineError: no ceiling in bytes per second was measured.

    Source: bytes read and written, at the machine's measured memory bandwidth.
    """
    num_bytes, _ = codec_bytes(plan.sync, cut.num_bytes, plan.workers)
    pieces = _codec_piece(machine, setting, "bucket_encode", num_bytes, number)
    return tuple((cut.closing_op, piece) for piece in pieces)


def decoding_pieces(
    machine: Machine, plan: Plan, setting: Setting, cuts: Sequence[BucketCut]
) -> tuple[Piece, ...]:
    """What decoding the buckets on a GPU adds before the optimizer; nothing without a codec.

    Raises:
        MachineError: no ceiling in bytes per second was measured.
    """
    found: list[Piece] = []
    for number, cut in enumerate(cuts):
        _, num_bytes = codec_bytes(plan.sync, cut.num_bytes, plan.workers)
        found += _codec_piece(machine, setting, "bucket_decode", num_bytes, number)
    return tuple(found)


def _codec_piece(
    machine: Machine, setting: Setting, name: str, num_bytes: int, number: int
) -> tuple[Piece, ...]:
    """One kernel that moves `num_bytes`; on a CPU the communication lane has it, see `encodings`."""
    if not num_bytes or setting.device == "cpu":
        return ()
    list_ = prices(machine, setting)
    piece = memory_piece(list_, name, f"bucket/{number}", num_bytes)
    # Issued operator by operator, so it costs the host one dispatch.
    return (piece._replace(host_s=list_.dispatch("forward")),)


def sent_bytes(workload: Workload, plan: Plan) -> tuple[int, ...]:
    """Bytes that a worker hands to the collectives at once, by bucket, to be held against a run's count.

    In a step, or where parameters are exchanged, in an exchange of all of them.

    The workload is that of one worker.
    """
    if plan.workers == 1:
        return ()
    return tuple(
        handed_bytes(plan.sync, cut.num_elements, cut.element_bytes, plan.workers, cut.shapes)
        for cut in cut_workload(workload, plan.sync)
    )
