"""The catalog: all networks, by name and kind, and those that a user's files add."""

import importlib.util
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import TaskError
from ridgeline.experiments.networks.families import (
    convolutions,
    dense_prediction,
    generative,
    graphs,
    hugging_face,
    language,
    perceptrons,
    points,
    recommenders,
    recurrent,
    series,
    speech,
    torchvision_classifiers,
)
from ridgeline.experiments.networks.network import Network

FAMILIES = (
    torchvision_classifiers,
    convolutions,
    hugging_face,
    language,
    recurrent,
    recommenders,
    graphs,
    dense_prediction,
    generative,
    speech,
    series,
    points,
    perceptrons,
)


def catalog(sources: Sequence[str] = ()) -> dict[str, Network]:
    """Name to network, those whose packages are missing included.

    Args:
        sources: Python files of the user's, each with `NETWORKS`, a sequence of `Network`; they are run.

    Raises:
        TaskError: a file cannot be run, has no such sequence, or a name is there already.
    """
    # In the order of the tables, which is that of a result and of the page, too.
    found = {network.name: network for family in FAMILIES for network in family.NETWORKS}
    for source in sources:
        for network in networks_in(source):
            if network.name in found:
                raise TaskError(
                    f"wanted networks of new names, got a second {network.name!r} in {source}; rename it"
                )
            found[network.name] = network
    return found


def networks_in(source: str) -> tuple[Network, ...]:
    """The networks that a Python file names in `NETWORKS`; it may import what lies beside it."""
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(f"networks_of_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TaskError(f"wanted a Python file with networks, got {source}; name a file *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # what the compiler traces is looked up by its module
    if str(path.parent) not in sys.path:
        # At the end, so that what lies beside a file hides no installed module.
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TaskError(
            f"wanted a Python file with networks, got {type(error).__name__} while running {source}: "
            f"{error}; fix the file"
        ) from error
    named = getattr(module, "NETWORKS", None)
    networks = tuple(named) if isinstance(named, Sequence) else ()
    if not networks or not all(isinstance(one, Network) for one in networks):
        raise TaskError(
            f"wanted NETWORKS, a sequence of ridgeline.experiments.networks.network.Network, in {source}, "
            f"got {reprlib.repr(named)}; see the guide on measuring your own networks"
        )
    return networks


def chosen(
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    *,
    sources: Sequence[str] = (),
    several_workers: bool = False,
) -> list[Network]:
    """Networks of these names or kinds, in the order of the catalog.

    Args:
        names: Exact names; none: all.
        kinds: Networks whose kind contains one of these, such as "recurrent" or "classifier"; none: all.
        sources: Files with more networks; where neither names nor kinds are given, only theirs are taken.
        several_workers: Of networks that are not named, only those meant for several workers together.

    Raises:
        TaskError: a name or kind is unknown, or nothing is left.
    """
    everything = catalog(sources)
    if sources and not names and not kinds:
        # What the catalog has is measured elsewhere; a user who adds files asks about those.
        for name in catalog():
            del everything[name]
    known_kinds = sorted({network.kind for network in everything.values()})
    for wanted, known, what in (
        (names, list(everything), "networks"),
        (kinds, known_kinds, "kinds"),
    ):
        for one in wanted:
            fits = one in known if what == "networks" else any(one in kind for kind in known)
            if not fits:
                raise TaskError(
                    f"wanted {what} out of {', '.join(known)}, got {one!r} for the experiment networks; "
                    "name some of those"
                )
    found = [
        network
        for network in everything.values()
        if (not names or network.name in names)
        and (not kinds or any(kind in network.kind for kind in kinds))
        and (network.several_workers or not several_workers or network.name in names)
    ]
    if not found:
        raise TaskError(
            "wanted at least one network, got names and kinds that no network has together; leave one out"
        )
    return found
