"""The key-value store: tensors by key, pushed to, pulled from, and updated where they lie.

A push sums what devices and workers bring, which is all that training needs to know; a pull gives
what came of it. The names are those of MXNet's KVStore.
"""

from ridgeline.runtime.kvstore.kinds import KINDS as KINDS
from ridgeline.runtime.kvstore.kinds import create as create
from ridgeline.runtime.kvstore.store import KVStore as KVStore
from ridgeline.runtime.kvstore.updaters import register_updater as register_updater
from ridgeline.runtime.kvstore.values.reading import Reading as Reading
