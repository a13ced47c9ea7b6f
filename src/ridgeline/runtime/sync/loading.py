"""The class behind an entry of `synchronisation`: imported when a plan first needs it."""

import importlib
from typing import Any

from ridgeline.errors import PlanError
from ridgeline.plan import Sync
from ridgeline.runtime.sync.codecs.codec import Codec
from ridgeline.runtime.sync.codecs.compressed import Compressed
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, values_of
from ridgeline.workers.world import World


def make_transport(sync: Sync, world: World) -> Transport:
    """What carries out a plan's algorithm, around its compression if there is one.

    Args:
        sync: Was checked for this world; see `synchronisation.check_sync`.
        world: This worker's place; size at least 2.

    Raises:
        PlanError: the entry names no class.
    """
    options = values_of(sync)
    transport: Transport = load(ALGORITHMS[sync.algorithm].transport)(world, options)
    entry = COMPRESSIONS[sync.compression]
    if not entry.codec:
        return transport
    codec: Codec = load(entry.codec)(options)
    return Compressed(transport, codec, entry)


def load(reference: str) -> Any:
    """The object of a reference `"package.module:name"`.

    Raises:
        PlanError: there is no such module, or no such name in it.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"wanted an entry whose class can be imported, got {reference!r} ({error}); write it as "
            "'package.module:Class'"
        ) from error
