"""What an entry of the tables says: the types of algorithms, compressions, options and traffic."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from ridgeline.machine import Operation
from ridgeline.synchronisation.searched import everywhere

OptionValue = bool | int | float | str
Options = Mapping[str, OptionValue]
ExchangeKind = Literal["sum", "scatter", "swap", "gather"]
Shape = tuple[int, ...]
WireBytes = Callable[[int, int, int, Options], int]
ShapedBytes = Callable[[Sequence[Shape], int, Options], int]


class Option(NamedTuple):
    """A setting of an algorithm or a compression, by its name in `Sync.options`.

    Attributes:
        name: Key in `Sync.options`.
        kind: `bool`, `int`, `float` (whole numbers are accepted, too) or `str`.
        default: What holds where a plan does not say.
        least: Smallest number; None for no limit.
        most: Largest number; None for no limit.
        is_exact: Whether values other than the default keep the maths.
        changes_shapes: Whether with other values than the default what is sent changes its shape now and
            then, which a captured step cannot follow.
        among: The words that a text may be; empty for any.
        names_workers: Whether a value names each worker, so that it holds for one number of them.
    """

    name: str
    kind: type
    default: OptionValue
    least: float | None = None
    most: float | None = None
    is_exact: bool = True
    changes_shapes: bool = False
    among: tuple[str, ...] = ()
    names_workers: bool = False


class CollectiveTraffic(NamedTuple):
    """One collective that a bucket costs; its size counts as in the machine's size tables.

    Of scattering and gathering ones that is the whole tensor, not a worker's share.
    """

    operation: Operation
    num_bytes: int


class MemoryPasses(NamedTuple):
    """Memory traffic of a codec, bytes read plus bytes written per byte of the bucket."""

    encode: float
    decode: float


def one_all_reduce(payload_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """The traffic of an algorithm that all-reduces the payload."""
    return (CollectiveTraffic("all_reduce", payload_bytes),)


def nothing_more(payload_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """The traffic behind the optimizer of an algorithm that brings the whole mean to all before it."""
    return ()


def no_state(num_elements: int, element_bytes: int, options: Options) -> int:
    """The state of what remembers nothing from one step to the next."""
    return 0


def no_objection(workers: int, options: Options) -> str:
    """What works with any number of workers and any options."""
    return ""


def evenly(workers: int, options: Options) -> float:
    """All links carry what `traffic` says."""
    return 1.0


class Algorithm(NamedTuple):
    """One way to make the mean of a bucket over the workers.

    Attributes:
        name: Word in plans, and key in `ALGORITHMS`.
        label: Words for people.
        frame: Head of its frames' names; bucket `k` is `frame/k`. No head of another frame of a step.
        transport: `"package.module:Class"` of the runtime's class that carries it out; empty where this
            release knows the word and does not run it.
        devices: Kinds of device on which it is offered, `cpu` and `cuda`.
        traffic: (payload bytes, workers) to the collectives of one bucket.
        uses_kernels: Whether kernels on the device move the bytes, so that computing and communicating slow
            each other down as was measured; else copies beside them do.
        shards_update: Whether each worker gets the mean of its part of every bucket alone, updates the
            parameters of that part alone and keeps the optimizer's state for it alone.
        gathering: (payload bytes, workers) to the collectives that bring the updated parameters of one bucket
            to all, behind the optimizer.
        is_exact: Whether the result is the plain mean, up to the order of additions.
        joining: `"package.module:function"` that makes the synchronizer where something else than the
            worker's own optimizer updates the parameters (see `sync.joining.join_others`); else empty.
        busiest: (workers, options) to how many times what `traffic` says passes through the busiest link.
        remark: What a table of all ways says of it besides its price.
        objection: As of `Compression`.
        options: What `Sync.options` may set.
        least_workers: Fewer of several workers are refused; a single worker exchanges nothing.
        is_tried_last: Whether the plan that won is tried with it, where a search does not compare it.
        unsearched: (device, workers) to why a search does not compare it there; empty where it does.
    """

    name: str
    label: str
    frame: str
    transport: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    traffic: Callable[[int, int], tuple[CollectiveTraffic, ...]] = one_all_reduce
    uses_kernels: bool = True
    shards_update: bool = False
    gathering: Callable[[int, int], tuple[CollectiveTraffic, ...]] = nothing_more
    is_exact: bool = True
    joining: str = ""
    busiest: Callable[[int, Options], float] = evenly
    remark: str = ""
    objection: Callable[[int, Options], str] = no_objection
    options: tuple[Option, ...] = ()
    least_workers: int = 2
    is_tried_last: bool = False
    unsearched: Callable[[str, int], str] = everywhere

    @property
    def runs(self) -> bool:
        """Whether this release carries it out."""
        return bool(self.transport)

    @property
    def replaces_update(self) -> bool:
        """Whether something else than the worker's own optimizer updates the parameters."""
        return bool(self.joining)


class Compression(NamedTuple):
    """One way to send less than the gradients themselves.

    Attributes:
        name: Word in plans, and key in `COMPRESSIONS`.
        label: Words for people, to precede "gradients".
        wire_bytes: (elements of a bucket, bytes of each, workers, options) to the bytes of a worker's
            payload.
        shaped_bytes: (shapes of the parameters in a bucket, its elements with what aligns them, options) to
            the same, where it depends on the shapes; `wire_bytes` is then for one parameter, or a guess.
        codec: `"package.module:Class"` of the runtime's class that encodes and decodes; empty where this
            release knows the word and does not run it, or where nothing is encoded.
        devices: Kinds of device on which it is offered.
        codec_passes: Memory traffic per byte of the bucket, to encode it and to decode one payload; by these
            it is priced where it was not timed.
        exchange: `sum`: the algorithm adds up encoded payloads. `scatter`: each worker decodes its share of
            all payloads and adds these up, and all gather the encoded means. `gather`: every worker gathers
            all payloads and decodes each. See `exchange_among`.
        is_exact: Whether what arrives is what was sent.
        state_bytes: (elements, bytes of each, options) to the bytes that it remembers.
        options: What `Sync.options` may set.
        rounds: Collectives, one after the other, among which `sum` divides a payload.
        objection: (workers, options) to why a plan with these options is refused; empty where it is not.
    """

    name: str
    label: str
    wire_bytes: WireBytes
    shaped_bytes: ShapedBytes | None = None
    codec: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    codec_passes: MemoryPasses = MemoryPasses(0.0, 0.0)
    exchange: ExchangeKind = "sum"
    is_exact: bool = False
    state_bytes: Callable[[int, int, Options], int] = no_state
    options: tuple[Option, ...] = ()
    rounds: int = 1
    objection: Callable[[int, Options], str] = no_objection

    def exchange_among(self, workers: int) -> ExchangeKind:
        """What `exchange` means for so many workers: two of them `swap` what more of them `scatter`.

        That is as many bytes, but one collective in place of two, and the mean is not encoded again.
        """
        return "swap" if self.exchange == "scatter" and workers == 2 else self.exchange

    @property
    def encodes(self) -> bool:
        """Whether the bucket is sent in another form than its own."""
        # A word of which this release knows no codec is still priced by what it would move.
        return bool(self.codec) or not self.is_exact or self.codec_passes != (0.0, 0.0)

    @property
    def has_state(self) -> bool:
        """Whether it remembers something from one step to the next, such as what it left out."""
        return self.state_bytes is not no_state

    @property
    def runs(self) -> bool:
        """Whether this release carries it out; what encodes nothing needs no codec."""
        return bool(self.codec) or not self.encodes
