"""The house: rooms of a size that can be looked over, and a plan that names files that are there."""

import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ridgeline"
MOST_MODULES = 15


def test_no_folder_has_more_modules_than_one_looks_over() -> None:
    """`__init__.py` apart: it says what the folder is."""
    counts = Counter(
        path.parent for path in PACKAGE.rglob("*.py") if path.stem.strip("_") == path.stem
    )
    assert {str(at): count for at, count in counts.items() if count > MOST_MODULES} == {}
    assert counts.total() > 500


def test_the_plan_of_the_house_names_files_that_are_there() -> None:
    """Each by the end of its path, as the architecture's tables shorten it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.py)`", text))
    assert len(named) > 100
    there = [
        path.as_posix() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [
        name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)
    ] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions too, and those for types alone: a reader follows them as well."""
    graph = grimp.build_graph("ridgeline", exclude_type_checking_imports=False, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(list(TopologicalSorter(imported).static_order())) == len(imported) > 500
