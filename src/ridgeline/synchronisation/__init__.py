"""How workers synchronise gradients: a table of algorithms, one of compressions, and what follows from them.

An entry says all that anybody needs to know of a word in `Sync`: its frames, its traffic, its bytes on the
wire, the memory traffic of its codec, its options, whether it keeps the maths, and where it is offered. Plan,
planner, simulator, probe, runtime and reports ask here; none spells a word of the tables itself.

To add an algorithm or a compression, write its transport or codec and assign its entry:

    from ridgeline.synchronisation import ALGORITHMS, Algorithm

    ALGORITHMS["mine"] = Algorithm(name="mine", label="mine", frame="mine", transport="package.module:Class",
                                   devices=("cpu", "cuda"))
"""

from ridgeline.synchronisation.checks import check_sync, check_words
from ridgeline.synchronisation.costs import (
    bucket_operations,
    codec_bytes,
    flags_of,
    gathering_bytes,
    gathering_of,
    handed_bytes,
    link_bytes,
    num_shards,
    operations,
    shards_update,
    state_bytes,
    traffic_of,
    why_losing,
    wire_bytes,
)
from ridgeline.synchronisation.entries import (
    Algorithm,
    CollectiveTraffic,
    Compression,
    ExchangeKind,
    MemoryPasses,
    Option,
    OptionValue,
)
from ridgeline.synchronisation.names import (
    GATHERING,
    algorithm_of,
    bucket_of,
    frame_names,
    is_bucket_frame,
    is_exchange_frame,
    words_of,
)
from ridgeline.synchronisation.payloads import (
    factor_rank,
    kept_elements,
    share_elements,
    update_shard_elements,
)
from ridgeline.synchronisation.rhythm import (
    cut_fragments,
    delay_of,
    due_fragment,
    fragments_on_their_way,
    landing_fragment,
    outer_bytes,
    outer_values,
    trains_apart,
)
from ridgeline.synchronisation.searched_rhythms import (
    LEAST_EXCHANGES,
    LEAST_GAIN,
    RHYTHMS,
    Rhythm,
    changed_words,
    rhythm_words,
)
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    REHEARSAL,
    UNCOMPRESSED,
    changing_options,
    is_exact,
    offered,
    offered_compressions,
    unsearched,
    values_of,
)

__all__ = [
    "ALGORITHMS",
    "COMPRESSIONS",
    "DEFAULT_ALGORITHM",
    "GATHERING",
    "LEAST_EXCHANGES",
    "LEAST_GAIN",
    "REHEARSAL",
    "RHYTHMS",
    "UNCOMPRESSED",
    "Algorithm",
    "CollectiveTraffic",
    "Compression",
    "ExchangeKind",
    "MemoryPasses",
    "Option",
    "OptionValue",
    "Rhythm",
    "algorithm_of",
    "bucket_of",
    "bucket_operations",
    "changed_words",
    "changing_options",
    "check_sync",
    "check_words",
    "codec_bytes",
    "cut_fragments",
    "delay_of",
    "due_fragment",
    "factor_rank",
    "flags_of",
    "fragments_on_their_way",
    "frame_names",
    "gathering_bytes",
    "gathering_of",
    "handed_bytes",
    "is_bucket_frame",
    "is_exact",
    "is_exchange_frame",
    "kept_elements",
    "landing_fragment",
    "link_bytes",
    "num_shards",
    "offered",
    "offered_compressions",
    "operations",
    "outer_bytes",
    "outer_values",
    "rhythm_words",
    "shards_update",
    "share_elements",
    "state_bytes",
    "traffic_of",
    "trains_apart",
    "unsearched",
    "update_shard_elements",
    "values_of",
    "why_losing",
    "wire_bytes",
    "words_of",
]
