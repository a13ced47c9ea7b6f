"""Levels: a reader of a package follows no long chain of imports inside it to the module that imports none."""

from collections.abc import Mapping
from graphlib import TopologicalSorter

import grimp
import pytest

MOST_LEVELS = 7


def levels(imported: Mapping[str, set[str]]) -> int:
    """How many units the longest chain of imports has; 0 of none, 1 where none imports another.

    Args:
        imported: The units that each one imports.
    """
    height: dict[str, int] = {}
    for unit in TopologicalSorter(imported).static_order():
        height[unit] = 1 + max((height[other] for other in imported.get(unit, ())), default=0)
    return max(height.values(), default=0)


def units_of(package: str, graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """What the modules and packages that lie directly in a package import of each other."""
    depth = package.count(".") + 2

    def unit(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    inside = graph.find_descendants(package)
    found: dict[str, set[str]] = {unit(module): set() for module in inside}
    for module in inside:
        for other in graph.find_modules_directly_imported_by(module) & inside:
            found[unit(module)] |= {unit(other)} - {unit(module)}
    return found


@pytest.mark.parametrize(
    ("imported", "count"),
    [
        ({}, 0),
        ({"a": set(), "b": set()}, 1),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, 3),
        ({"a": {"d"}, "b": {"c"}, "c": {"d"}, "d": set()}, 3),
    ],
)
def test_levels_are_the_units_of_the_longest_chain(
    imported: dict[str, set[str]], count: int
) -> None:
    """Also where a shorter one leads to the same end."""
    assert levels(imported) == count


def test_no_package_has_more_levels_than_one_follows() -> None:
    """Imports within functions too, and those for types alone.

    A package inside another is one unit of it, and is held to as many levels of its own.
    """
    graph = grimp.build_graph("ridgeline", exclude_type_checking_imports=False, cache_dir=None)
    inner = graph.find_descendants("ridgeline")
    assert (
        levels(units_of("ridgeline", graph)) > MOST_LEVELS
    )  # rooms go in no circle; their floors are drawn
    packages = [package for package in inner if graph.find_children(package)]
    found = {package: levels(units_of(package, graph)) for package in packages}
    assert {name: count for name, count in found.items() if count > MOST_LEVELS} == {}
    assert len(found) > 80
