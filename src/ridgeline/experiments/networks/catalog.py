"""The catalog: all networks, by name and kind."""

from collections.abc import Sequence

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


def catalog() -> dict[str, Network]:
    """Name to network, those whose packages are missing included."""
    return {network.name: network for family in FAMILIES for network in family.NETWORKS}


def chosen(
    names: Sequence[str] = (), kinds: Sequence[str] = (), *, several_workers: bool = False
) -> list[Network]:
    """Networks of these names or kinds, in the order of the catalog.

    Args:
        names: Exact names; none: all.
        kinds: Networks whose kind contains one of these, such as "recurrent" or "classifier"; none: all.
        several_workers: Only those that take part where several workers train together.

    Raises:
        TaskError: a name or kind is unknown, or nothing is left.
    """
    everything = catalog()
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
        and (network.several_workers or not several_workers)
    ]
    if not found:
        raise TaskError(
            "wanted at least one network, got names and kinds that no network has together; leave one out"
        )
    return found
