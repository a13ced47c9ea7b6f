"""What a plan may say of synchronisation, and what of that this release runs."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ridgeline.errors import PlanError
from ridgeline.synchronisation.entries import Algorithm, Compression, Option
from ridgeline.synchronisation.holding import HELD, holds
from ridgeline.synchronisation.rhythm import (
    DELAY,
    check_option_of_rhythm,
    check_rhythm,
    delay_of,
    trains_apart,
)
from ridgeline.synchronisation.sync import Sync
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
    offered,
    offered_compressions,
    options_of,
    values_of,
)

_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


class _Reasons(NamedTuple):
    """Why workers that do not update all parameters themselves neither train alone nor have codecs."""

    against_apart: str
    against_codecs: str


_SHARDED = _Reasons(
    "each worker has the optimizer's state of its part alone, and cannot train alone",
    "codecs bring the whole mean to all workers",
)
_REPLACED = _Reasons(
    "a worker has no optimizer state to train alone with",
    "codecs bring the mean to all workers, not to who updates",
)


def check_words(sync: Sync) -> None:
    """Raise a PlanError for words that are in no table, and for options that those words do not have."""
    for field, word, known in (
        ("algorithm", sync.algorithm, tuple(ALGORITHMS)),
        ("compression", sync.compression, tuple(COMPRESSIONS)),
    ):
        if word not in known:
            raise PlanError(
                f"wanted sync.{field} to be one of {_listed(known)}, got {word!r} in the plan; choose one of "
                "those"
            )
    # A plan made in Python is not checked by its types, as one that is loaded is.
    if not isinstance(sync.options, Mapping):
        raise PlanError(
            f"wanted sync.options as a dictionary, got {sync.options!r} in the plan; for example {{}}"
        )
    options = {option.name: option for option in options_of(sync)}
    for name, value in sync.options.items():
        if name not in options:
            # An option of another rhythm is known: what it goes with says more than a list of names.
            check_option_of_rhythm(sync, name)
            words = f"one of {_listed(tuple(options))}" if options else "empty"
            raise PlanError(
                f"wanted sync.options to be {words} with algorithm={sync.algorithm!r} and "
                f"compression={sync.compression!r}, got {name!r} in the plan; leave it out"
            )
        _check_option(options[name], value)


def _check_option(option: Option, value: object) -> None:
    field = f"sync.options[{option.name!r}]"
    # Whole numbers stand for floats, too: people write `momentum=0`.
    numbers = (int, float) if option.kind is float else option.kind
    # True is an int, which no option for a number means.
    is_fit = isinstance(value, numbers) and (option.kind is bool or not isinstance(value, bool))
    if not is_fit:
        raise PlanError(
            f"wanted {field} as {_KINDS[option.kind]}, got {value!r} in the plan; for example "
            f"{option.default!r}"
        )
    if option.among and value not in option.among:
        raise PlanError(
            f"wanted {field} to be one of {_listed(option.among)}, got {value!r} in the plan; choose one of "
            "those"
        )
    if isinstance(value, int | float):
        # Negated, so that NaN, for which every comparison is false, is refused as well.
        if option.least is not None and not value >= option.least:
            raise _outside(field, f">= {option.least:g}", option, value)
        if option.most is not None and not value <= option.most:
            raise _outside(field, f"<= {option.most:g}", option, value)


def _outside(field: str, range_: str, option: Option, value: object) -> PlanError:
    return PlanError(
        f"wanted {field} {range_}, got {value!r} in the plan; for example {option.default!r}"
    )


def check_sync(sync: Sync, workers: int, device: str) -> None:
    """Raise a PlanError for what this release does not run, be it to train or to predict."""
    # Entries before their options: objections of one that does not run here would mislead.
    algorithm = ALGORITHMS[sync.algorithm]
    _check_entry("algorithm", algorithm, ALGORITHMS, offered(device), device)
    compression = COMPRESSIONS[sync.compression]
    _check_entry("compression", compression, COMPRESSIONS, offered_compressions(device), device)
    if objection := compression.objection(workers, values_of(sync)):
        raise PlanError(objection)
    # One worker exchanges nothing, so a plan for several may be tried alone.
    if 1 < workers < algorithm.least_workers:
        raise PlanError(
            f"wanted workers >= {algorithm.least_workers} for sync.algorithm={sync.algorithm!r}, got "
            f"workers={workers} in the plan; use more, or another algorithm"
        )
    if objection := algorithm.objection(workers, values_of(sync)):
        raise PlanError(objection)
    check_rhythm(sync, workers)
    if delay_of(sync):
        wanted = {"algorithm": DEFAULT_ALGORITHM}
        _check_goes_with(DELAY, sync, wanted, "that does not run during steps")
    if holds(sync):  # received bucket by bucket, in any order, while the next step has begun
        alone = {"compression": UNCOMPRESSED, "every": 1}
        _check_goes_with(HELD, sync, alone, "what is held is the mean of plain gradients")
    if algorithm.shards_update or algorithm.replaces_update:
        _check_updated_elsewhere(sync, workers, _SHARDED if algorithm.shards_update else _REPLACED)


def without_named_workers(sync: "Sync") -> "Sync":
    """What holds for another number of workers, too: without the options that name each of them."""
    named = {option.name for option in options_of(sync) if option.names_workers}
    kept = {name: value for name, value in sync.options.items() if name not in named}
    return msgspec.structs.replace(sync, options=kept) if kept != sync.options else sync


def _check_goes_with(option: Option, sync: Sync, wanted: Mapping[str, object], why: str) -> None:
    """Refuse an option where other fields of the plan's `sync` have other values than it goes with."""
    for field, value in wanted.items():
        if (got := getattr(sync, field)) != value:
            raise PlanError(
                f"wanted sync.{field}={value!r} for sync.options[{option.name!r}], got {got!r} in the plan; "
                f"{why}: leave one of them out"
            )


def _check_updated_elsewhere(sync: Sync, workers: int, reasons: _Reasons) -> None:
    """Refuse what does not go with workers that do not update all of the parameters themselves."""
    if trains_apart(sync) and workers > 1:
        raise PlanError(
            f"wanted sync.every=1 for sync.algorithm={sync.algorithm!r}, got {sync.every} in the plan; "
            f"{reasons.against_apart}: exchange in every step, or use another algorithm"
        )
    if COMPRESSIONS[sync.compression].encodes:
        raise PlanError(
            f"wanted sync.compression={UNCOMPRESSED!r} for sync.algorithm={sync.algorithm!r}, got "
            f"{sync.compression!r} in the plan; {reasons.against_codecs}: leave it out, or use another "
            "algorithm"
        )


def _check_entry(
    field: str,
    entry: Algorithm | Compression,
    table: Mapping[str, Algorithm] | Mapping[str, Compression],
    names: tuple[str, ...],
    device: str,
) -> None:
    if not entry.runs:
        running = _listed(tuple(name for name, known in table.items() if known.runs))
        raise PlanError(
            f"wanted sync.{field} to be one of {running}, got {entry.name!r} in the plan; this release "
            "runs no other"
        )
    if device not in entry.devices:
        raise PlanError(
            f"wanted sync.{field} to be one of {_listed(names)} on {device}, got {entry.name!r} in the plan; "
            "this release runs no other there"
        )


def _listed(words: tuple[object, ...]) -> str:
    return ", ".join(repr(word) for word in words)
