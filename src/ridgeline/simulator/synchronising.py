"""What exchanging the gradients costs on a machine: collectives, the codec's work beside them, bytes sent.

What a bucket needs is told by the entries of the plan's `Sync` (see `synchronisation`); what that takes, by
the machine's size tables and its memory bandwidth.
"""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.laws.collectives import CollectiveOperation
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan, Sync
from ridgeline.simulator.communication import CommunicationCost, CostTable, find_table, table_cost
from ridgeline.simulator.costs import prices
from ridgeline.simulator.pieces import BucketCut, Piece, cut_workload, memory_piece
from ridgeline.synchronisation import (
    GATHERING,
    CollectiveTraffic,
    codec_bytes,
    delay_of,
    frame_names,
    gathering_bytes,
    gathering_of,
    handed_bytes,
    outer_bytes,
    shards_update,
    traffic_of,
    values_of,
)
from ridgeline.workload import Workload


class BucketPrices:
    """Seconds in which a bucket is reduced over the workers, by its size."""

    def __init__(self, machine: Machine, sync: Sync, setting: Setting) -> None:
        self.sync = sync
        self._machine = machine
        self._setting = setting
        self._tables: dict[CollectiveOperation, CostTable] = {}

    def cost(
        self, num_bytes: int, element_bytes: int, shapes: Sequence[tuple[int, ...]] = ()
    ) -> CommunicationCost:
        """The cost of a bucket: its collectives, one after the other.

        Args:
            num_bytes: Gradients in it.
            element_bytes: Of one element of them.
            shapes: Of the parameters in it, where they are known.

        Raises:
            MachineError: no table of a collective was measured.
        """
        num_elements = -(-num_bytes // element_bytes)
        return self._priced(
            traffic_of(self.sync, num_elements, element_bytes, self._setting.workers, shapes)
        )

    def gathering_cost(self, num_bytes: int) -> CommunicationCost:
        """The cost of bringing the updated parameters of a bucket of so many bytes to all workers.

        Raises:
            MachineError: no table of a collective was measured.
        """
        return self._priced(gathering_of(self.sync, num_bytes, self._setting.workers))

    def _priced(self, parts: Sequence[CollectiveTraffic]) -> CommunicationCost:
        costs = [table_cost(self._table(part.operation), part.num_bytes) for part in parts]
        notes = dict.fromkeys(cost.note for cost in costs if cost.note)
        return CommunicationCost(sum(cost.seconds for cost in costs), "; ".join(notes))

    def _table(self, operation: CollectiveOperation) -> CostTable:
        if operation not in self._tables:
            self._tables[operation] = find_table(self._machine, operation, self._setting)
        return self._tables[operation]


def communication_seconds(
    machine: Machine, plan: Plan, setting: Setting, cuts: Sequence[BucketCut], buffer_bytes: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of every frame on the communication lane, and what was assumed.

    Args:
        machine: Its size tables are read.
        plan: How gradients are synchronised.
        setting: Workers, several.
        cuts: The buckets.
        buffer_bytes: Of the model's buffers, which follow worker 0.

    Raises:
        MachineError: no table of a collective was measured.
    """
    seconds: dict[str, float] = {}
    notes: dict[str, None] = {}
    bucket = BucketPrices(machine, plan.sync, setting)
    for name, cut in zip(frame_names(plan, len(cuts)), cuts, strict=True):
        seconds[name], note = bucket.cost(cut.num_bytes, cut.element_bytes, cut.shapes)
        notes[note] = None
    if shards_update(plan.sync):
        gathered = [bucket.gathering_cost(cut.num_bytes) for cut in cuts]
        moved = sum(gathering_bytes(plan.sync, cut.num_bytes, plan.workers) for cut in cuts)
        copying_s = prices(machine, setting).copy_seconds(moved)
        seconds[GATHERING] = copying_s + sum(cost.seconds for cost in gathered)
        notes |= dict.fromkeys(cost.note for cost in gathered)
    if buffer_bytes:
        cost = table_cost(find_table(machine, "broadcast", setting), buffer_bytes)
        seconds["broadcast_buffers"] = cost.seconds
        notes[cost.note] = None
    return seconds, tuple(note for note in notes if note)


def local_steps_seconds(
    machine: Machine,
    plan: Plan,
    setting: Setting,
    cuts: Sequence[BucketCut],
    buffer_bytes: int,
    computing_s: float,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of a step for the exchange of parameters every `every` steps, and what that is a share of.

    Args:
        machine: Its size tables and its memory bandwidth are read.
        plan: How parameters are exchanged, and how often.
        setting: Workers, several.
        cuts: The parameters as they travel.
        buffer_bytes: Of the model's buffers, which follow worker 0 at each exchange.
        computing_s: Seconds of a step without exchange; those of a delay hide what travels meanwhile.

    Raises:
        MachineError: no table of a collective, or no ceiling in bytes per second, was measured.

    Source: collectives by their tables, the codec and the outer optimizer by the bytes that they move.
    """
    seconds, assumed = communication_seconds(machine, plan, setting, cuts, buffer_bytes)
    moved = sum(
        outer_bytes(plan.sync, cut.num_bytes)
        + sum(codec_bytes(plan.sync, cut.num_bytes, plan.workers))
        for cut in cuts
    )
    whole_s = sum(seconds.values()) + prices(machine, setting).copy_seconds(moved)
    (name,) = frame_names(plan, 1)
    every, delay = plan.sync.every, delay_of(plan.sync)
    note = (
        f"parameters are exchanged every {every} steps, which takes {units.seconds(whole_s)}: each step "
        f"is given 1/{every} of it, while a measured median step has none of it"
    )
    if delay:
        travelling_s = sum(seconds[name] for name in frame_names(plan, len(cuts)))
        fragments = int(values_of(plan.sync)["fragments"])
        hidden_s = min(travelling_s, fragments * delay * computing_s)
        note = f"{note}, and {units.seconds(hidden_s)} of it hide behind the {delay} steps of the delay"
        whole_s -= hidden_s
    return {name: whole_s / every}, (*assumed, note)


def encoding_pieces(
    machine: Machine, plan: Plan, setting: Setting, cut: BucketCut, number: int
) -> tuple[tuple[int, Piece], ...]:
    """What encoding a bucket adds to backward: (op after which it happens, piece); nothing without a codec.

    Raises:
        MachineError: no ceiling in bytes per second was measured.

    Source: bytes read and written, at the machine's measured memory bandwidth.
    """
    num_bytes, _ = codec_bytes(plan.sync, cut.num_bytes, plan.workers)
    piece = _codec_piece(machine, setting, "bucket_encode", num_bytes, number)
    return tuple((cut.closing_op, found) for found in piece)


def decoding_pieces(
    machine: Machine, plan: Plan, setting: Setting, cuts: Sequence[BucketCut]
) -> tuple[Piece, ...]:
    """What decoding the buckets adds before the optimizer; nothing without a codec.

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
    """One kernel, or on a CPU one operator, that moves so many bytes."""
    if not num_bytes:
        return ()
    list_ = prices(machine, setting)
    piece = memory_piece(list_, name, f"bucket/{number}", num_bytes)
    if setting.device == "cuda":
        return (piece._replace(host_s=list_.dispatch("forward")),)
    return (piece._replace(fixed_s=list_.dispatch("backward")),)


def sent_bytes(workload: Workload, plan: Plan) -> tuple[int, ...]:
    """Bytes that a worker hands to the collectives at once, by bucket, to be held against a run's count.

    In a step, or where parameters are exchanged, in an exchange of all of them.

    Args:
        workload: The step of one worker.
        plan: Its workers, bucket sizes, algorithm and compression are used.
    """
    if plan.workers == 1:
        return ()
    return tuple(
        handed_bytes(plan.sync, cut.num_elements, cut.element_bytes, plan.workers, cut.shapes)
        for cut in cut_workload(workload, plan.sync.bucket_bytes)
    )
