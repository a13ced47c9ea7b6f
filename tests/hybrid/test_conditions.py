"""Expressions of guards, put together as one function."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.programs.watches import conditions
from ridgeline.programs.watches.conditions import Conditions, reader

INNER = SimpleNamespace(x=[1, 2, {"k": 3}], y=SimpleNamespace(x=[4, 5, {"k": 6}]))
SCOPE: dict[str, Any] = {"G": {"a": INNER}, "join": lambda a, b: [a, b]}
ARGUMENTS: dict[str, Any] = {"model": INNER, "batch": (7, [8, INNER])}

bases = st.sampled_from(
    ["L['model']", "L['model'].y", "L['batch'][1][1]", "G['a']", "join(G['a'], L['model'])[1]"]
)
ends = st.sampled_from(["", ".x", ".x[0]", ".x[-1]['k']", ".x[0] + 1", ".x[1:]", ".y.x"])


def joined(base: str, end: str) -> str:
    return f"{base}{end}" if not base.endswith(".y") or ".y" not in end else base


@given(st.lists(st.builds(joined, bases, ends), max_size=6))
def test_a_reader_gives_what_expressions_are(expressions: list[str]) -> None:
    wanted = [eval(text, SCOPE, {"L": ARGUMENTS}) for text in expressions]
    found = reader(expressions, SCOPE)(ARGUMENTS)
    assert [*found] == wanted
    plain = [
        text for text in expressions if "+" not in text and ":" not in text and "(" not in text
    ]
    again = reader(plain, SCOPE)(ARGUMENTS)
    assert all(
        a is eval(text, SCOPE, {"L": ARGUMENTS}) for a, text in zip(again, plain, strict=True)
    )


def test_a_sum_is_not_taken_for_an_attribute_of_its_end() -> None:
    scope = {"a": SimpleNamespace(real=1.0), "b": SimpleNamespace(real=2.0), "c": 1.0, "d": 2j}
    assert reader(["(c + d).real", "c + d.real", "a.real"], scope)({}) == (1.0, 1.0, 1.0)


def test_expressions_are_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's guards are put together five times when it is read, and once more where tensors moved."""
    parsed: list[str] = []
    parse = ast.parse

    def counted(text: str, **more: Any) -> ast.AST:
        parsed.append(text)
        return parse(text, **more)

    monkeypatch.setattr(conditions.ast, "parse", counted)
    conditions._path.cache_clear()
    for _ in range(3):
        both = Conditions(SCOPE)
        both.value_of("L['model'].x[0]")
        both.value_of("L['model'].x")
    assert parsed == ["L['model'].x[0]", "L['model'].x"]
