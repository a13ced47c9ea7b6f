"""Nobody but the tables spells the name of a synchronisation algorithm, or the head of its frames."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import ridgeline as rl
from ridgeline.laws.collectives import CollectiveOperation
from ridgeline.synchronisation import ALGORITHMS

PACKAGE = Path(rl.__file__).parent
TABLES = "synchronisation"
OPERATIONS = frozenset(get_args(CollectiveOperation))
SPELLED = {
    "__init__.py": frozenset({"kvstore"}),
    "cli/bench.py": frozenset({"kvstore"}),
    "experiments/allreduce/sweep.py": frozenset({"all_reduce"}),
    "experiments/kvstore/__init__.py": frozenset({"kvstore"}),
    "experiments/sync/steps.py": frozenset({"all_reduce"}),
    "experiments/ways/result.py": frozenset({"kvstore"}),
    "experiments/ways/text.py": frozenset({"kvstore"}),
    "laws/collectives.py": OPERATIONS,
    "laws/intensity.py": OPERATIONS,
    "machine/machine.py": OPERATIONS,
    "probe/rates/collectives.py": OPERATIONS,
    "capture/flat_program.py": frozenset({"tree"}),
}
"""Files in which such a word means something else: a collective of MPI's vocabulary, a nest of values, a module or an experiment."""
WORDS = frozenset(word for entry in ALGORITHMS.values() for word in (entry.name, entry.frame))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Lines and values of the strings of a program, docstrings apart; of f-strings each fixed part."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def spelled(source: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """Where a string is a word of the tables, or begins like the name of a bucket's frame."""
    return [
        (line, text)
        for line, text in texts(source)
        if (word := text.partition("/")[0]) in WORDS and word not in allowed
    ]


def test_the_rule_sees_words_and_frames() -> None:
    """Equal strings, heads of frames, f-strings and defaults; not docstrings, calls of torch, or longer words."""
    source = (
        '"""all_reduce"""\n'
        'a = "all_reduce"\n'
        'b = name.startswith("all_reduce/")\n'
        'c = f"ring/{k}"\n'
        "def f(x='two_shot'):\n"
        '    """ring"""\n'
        "    dist.all_reduce(x)\n"
        'd = "string", "all_reduce_names", "a ring of buffers"\n'
    )
    assert [line for line, _ in spelled(source)] == [2, 3, 4, 5]
    assert spelled(source, frozenset({"all_reduce", "ring"})) == [(5, "two_shot")]


def test_only_the_tables_spell_algorithms() -> None:
    """Whoever needs a name, a frame or a price of one asks the tables."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    others = {name: path for name, path in files.items() if not name.startswith(f"{TABLES}/")}
    assert len(files) - len(others) > 3
    found = {
        name: spelled(path.read_text(), SPELLED.get(name, frozenset()))
        for name, path in others.items()
    }
    assert {name: places for name, places in found.items() if places} == {}


def test_no_exception_is_left_over() -> None:
    """A file that spells none of its words needs no exception."""
    for name, words in SPELLED.items():
        seen = {text for _, text in spelled((PACKAGE / name).read_text())}
        assert seen & words, name
