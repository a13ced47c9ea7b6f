"""The modules of a step that a child finds by no search: the script itself, and files run by their path.

Pickle writes the names of modules only. A framework that runs a configuration file, or a test runner,
registers what it ran under a name of its own; nothing on the module path has that name.
"""

import ast
import importlib.util
import runpy
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

from ridgeline.errors import CaptureError

MAIN = "__main__"


def unfound_modules(payload: Path) -> dict[str, str]:
    """Of the modules that a saved payload names, those that a new process does not find: name to file.

    Raises:
        CaptureError: the main script is one of them and is no file, or running it would run its program.
    """
    with zipfile.ZipFile(payload) as archive:
        text = b"".join(
            archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")
        )
    # A name is looked up by `c`, its module and the end of a line: protocol 2 of pickle, torch's default.
    named = [name for name in [*sys.modules] if f"c{name}\n".encode() in text]
    found = {name: file for name in named if name != MAIN and (file := _file_run_by_path(name))}
    return found | ({MAIN: _main_script()} if MAIN in named else {})


def import_modules(modules: dict[str, str]) -> None:
    """Run each file under its name; the main script last, and without what it does as a script."""
    for name, file in modules.items():
        if name != MAIN:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            # Before it runs: dataclasses and pickle look the module up by its name meanwhile.
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    if MAIN in modules:
        module = type(sys)(MAIN)
        module.__dict__.update(runpy.run_path(modules[MAIN], run_name="__mp_main__"))
        # By both names: what was pickled names `__main__`, what the script defines now `__mp_main__`.
        sys.modules[MAIN] = sys.modules["__mp_main__"] = module


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


def _main_script() -> str:
    script = getattr(sys.modules[MAIN], "__file__", None)
    if script is None or not Path(script).is_file():
        raise CaptureError(
            "wanted functions and classes that a new process can import, got some that were typed into this "
            "session; put them into a file and import it"
        )
    if not _is_guarded(Path(script).read_text(encoding="utf-8")):
        raise CaptureError(
            f"wanted a script that can be imported without running, got {script} without a line "
            '`if __name__ == "__main__":`, which defines parts of the step; put what it runs under that line'
        )
    return str(Path(script).resolve())


def _is_guarded(source: str) -> bool:
    """Whether a script keeps what it runs under `if __name__ == "__main__":`, as importing it demands."""
    tests = [ast.unparse(node.test) for node in ast.parse(source).body if isinstance(node, ast.If)]
    return any("__name__" in test and "__main__" in test for test in tests)
