"""How workers synchronise gradients: a table of algorithms, one of compressions, and what follows from them.

An entry says all that anybody needs to know of a word in `Sync`: its frames, its traffic, its bytes on the
wire, the memory traffic of its codec, its options, whether it keeps the maths, and where it is offered. Plan,
planner, simulator, probe, runtime and reports ask here; none spells a word of the tables itself.

To add an algorithm or a compression, write its transport or codec and assign its entry:

    from ridgeline.synchronisation import ALGORITHMS, Algorithm

    ALGORITHMS["mine"] = Algorithm(name="mine", label="mine", frame="mine", transport="package.module:Class")
"""

from ridgeline.synchronisation.checks import check_sync as check_sync
from ridgeline.synchronisation.checks import check_words as check_words
from ridgeline.synchronisation.checks import without_named_workers as without_named_workers
from ridgeline.synchronisation.costs import bucket_operations as bucket_operations
from ridgeline.synchronisation.costs import codec_bytes as codec_bytes
from ridgeline.synchronisation.costs import flags_of as flags_of
from ridgeline.synchronisation.costs import gathering_bytes as gathering_bytes
from ridgeline.synchronisation.costs import gathering_of as gathering_of
from ridgeline.synchronisation.costs import handed_bytes as handed_bytes
from ridgeline.synchronisation.costs import link_bytes as link_bytes
from ridgeline.synchronisation.costs import num_shards as num_shards
from ridgeline.synchronisation.costs import operations as operations
from ridgeline.synchronisation.costs import replaces_update as replaces_update
from ridgeline.synchronisation.costs import sends_buffers as sends_buffers
from ridgeline.synchronisation.costs import serving_bytes as serving_bytes
from ridgeline.synchronisation.costs import serving_updates as serving_updates
from ridgeline.synchronisation.costs import shards_update as shards_update
from ridgeline.synchronisation.costs import state_bytes as state_bytes
from ridgeline.synchronisation.costs import state_parts as state_parts
from ridgeline.synchronisation.costs import steps_between_meetings as steps_between_meetings
from ridgeline.synchronisation.costs import traffic_of as traffic_of
from ridgeline.synchronisation.costs import uses_kernels as uses_kernels
from ridgeline.synchronisation.costs import why_losing as why_losing
from ridgeline.synchronisation.costs import wire_bytes as wire_bytes
from ridgeline.synchronisation.entries import Algorithm as Algorithm
from ridgeline.synchronisation.entries import CollectiveTraffic as CollectiveTraffic
from ridgeline.synchronisation.entries import Compression as Compression
from ridgeline.synchronisation.entries import ExchangeKind as ExchangeKind
from ridgeline.synchronisation.entries import MemoryPasses as MemoryPasses
from ridgeline.synchronisation.entries import Option as Option
from ridgeline.synchronisation.entries import OptionValue as OptionValue
from ridgeline.synchronisation.holding import HELD as HELD
from ridgeline.synchronisation.holding import holds as holds
from ridgeline.synchronisation.holding import launch_order as launch_order
from ridgeline.synchronisation.holding import num_held as num_held
from ridgeline.synchronisation.names import GATHERING as GATHERING
from ridgeline.synchronisation.names import SPARSE_ROWS as SPARSE_ROWS
from ridgeline.synchronisation.names import algorithm_of as algorithm_of
from ridgeline.synchronisation.names import bucket_of as bucket_of
from ridgeline.synchronisation.names import frame_names as frame_names
from ridgeline.synchronisation.names import is_bucket_frame as is_bucket_frame
from ridgeline.synchronisation.names import is_exchange_frame as is_exchange_frame
from ridgeline.synchronisation.names import words_of as words_of
from ridgeline.synchronisation.payloads import factor_rank as factor_rank
from ridgeline.synchronisation.payloads import kept_elements as kept_elements
from ridgeline.synchronisation.payloads import share_elements as share_elements
from ridgeline.synchronisation.payloads import update_shard_elements as update_shard_elements
from ridgeline.synchronisation.rhythm import cut_fragments as cut_fragments
from ridgeline.synchronisation.rhythm import delay_of as delay_of
from ridgeline.synchronisation.rhythm import due_fragment as due_fragment
from ridgeline.synchronisation.rhythm import fragments_on_their_way as fragments_on_their_way
from ridgeline.synchronisation.rhythm import landing_fragment as landing_fragment
from ridgeline.synchronisation.rhythm import outer_bytes as outer_bytes
from ridgeline.synchronisation.rhythm import outer_values as outer_values
from ridgeline.synchronisation.rhythm import trains_apart as trains_apart
from ridgeline.synchronisation.searched_rhythms import LEAST_EXCHANGES as LEAST_EXCHANGES
from ridgeline.synchronisation.searched_rhythms import LEAST_GAIN as LEAST_GAIN
from ridgeline.synchronisation.searched_rhythms import RHYTHMS as RHYTHMS
from ridgeline.synchronisation.searched_rhythms import Rhythm as Rhythm
from ridgeline.synchronisation.searched_rhythms import changed_words as changed_words
from ridgeline.synchronisation.sparse_rows import RowsToSend as RowsToSend
from ridgeline.synchronisation.sparse_rows import rows_bytes as rows_bytes
from ridgeline.synchronisation.sparse_rows import rows_memory_bytes as rows_memory_bytes
from ridgeline.synchronisation.sparse_rows import rows_traffic as rows_traffic
from ridgeline.synchronisation.sync import DEFAULT_ALGORITHM as DEFAULT_ALGORITHM
from ridgeline.synchronisation.sync import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from ridgeline.synchronisation.sync import MIB as MIB
from ridgeline.synchronisation.sync import UNCOMPRESSED as UNCOMPRESSED
from ridgeline.synchronisation.sync import Sync as Sync
from ridgeline.synchronisation.tables import ALGORITHMS as ALGORITHMS
from ridgeline.synchronisation.tables import COMPRESSIONS as COMPRESSIONS
from ridgeline.synchronisation.tables import REHEARSAL as REHEARSAL
from ridgeline.synchronisation.tables import changing_options as changing_options
from ridgeline.synchronisation.tables import is_exact as is_exact
from ridgeline.synchronisation.tables import offered as offered
from ridgeline.synchronisation.tables import offered_compressions as offered_compressions
from ridgeline.synchronisation.tables import tried_last as tried_last
from ridgeline.synchronisation.tables import unsearched as unsearched
from ridgeline.synchronisation.tables import values_of as values_of
