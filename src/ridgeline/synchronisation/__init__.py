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
    operations,
    state_bytes,
    traffic_of,
    wire_bytes,
)
from ridgeline.synchronisation.entries import (
    Algorithm,
    Compression,
    Option,
    OptionValue,
    Passes,
    Traffic,
)
from ridgeline.synchronisation.names import (
    algorithm_of,
    bucket_of,
    frame_names,
    is_bucket_frame,
    words_of,
)
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
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
    "UNCOMPRESSED",
    "Algorithm",
    "Compression",
    "Option",
    "OptionValue",
    "Passes",
    "Traffic",
    "algorithm_of",
    "bucket_of",
    "bucket_operations",
    "check_sync",
    "check_words",
    "codec_bytes",
    "frame_names",
    "is_bucket_frame",
    "is_exact",
    "offered",
    "offered_compressions",
    "operations",
    "state_bytes",
    "traffic_of",
    "unsearched",
    "values_of",
    "wire_bytes",
    "words_of",
]
