"""The modules of a step that a child finds by no search: files run by their path.

Pickle writes the names of modules only. A framework that runs a configuration file, or a test runner,
registers what it ran under a name of its own; nothing on the module path has that name.
"""

import importlib.util
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path


def unfound_modules(payload: Path) -> dict[str, str]:
    """Of the modules that a saved payload names, those that a new process does not find: name to file."""
    with zipfile.ZipFile(payload) as archive:
        text = b"".join(
            archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")
        )
    # A name is looked up by `c`, its module and the end of a line: protocol 2 of pickle, torch's default.
    named = [name for name in [*sys.modules] if f"c{name}\n".encode() in text]
    return {name: file for name in named if (file := _file_run_by_path(name))}


def import_modules(modules: dict[str, str]) -> None:
    """Run each file under its name."""
    for name, file in modules.items():
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        # Before it runs: dataclasses and pickle look the module up by its name meanwhile.
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _file_run_by_path(name: str) -> str | None:
    """The source of a module that no search finds; None for one that is found, or has no source."""
    file = getattr(sys.modules[name], "__file__", None)
    package, _, last = name.rpartition(".")
    places = getattr(sys.modules.get(package), "__path__", None) if package else None
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        return None
    is_found = (not package or places is not None) and PathFinder.find_spec(
        name if places is not None else last, places
    )
    return None if is_found else str(Path(file).resolve())
