"""The size budget: files and functions that have outgrown one idea.

Prints what exceeds the wanted sizes, and exits with 1 if anything exceeds the hard ones.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "benchmarks")
WANTED_FILE_LINES = 300
HARD_FILE_LINES = 400
WANTED_FUNCTION_LINES = 60
HARD_FUNCTION_LINES = 70


def main() -> int:
    """Measure every Python file of the project; 0 when the hard budget holds."""
    root = Path(__file__).resolve().parent.parent
    num_over = 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for lines, wanted, hard, what in _sizes(path, path.relative_to(root)):
                if lines > wanted:
                    verdict = "OVER BUDGET" if lines > hard else "long"
                    print(f"{verdict}: {what} has {lines} lines (wanted {wanted}, at most {hard})")
                num_over += lines > hard
    if num_over:
        print(f"{num_over} over budget; give each idea a file or function of its own")
    return 1 if num_over else 0


def _sizes(path: Path, name: Path) -> Iterator[tuple[int, int, int, str]]:
    """(lines, wanted, hard, what) of a file and of each of its functions."""
    text = path.read_text(encoding="utf-8")
    yield len(text.splitlines()), WANTED_FILE_LINES, HARD_FILE_LINES, str(name)
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            what = f"{name}:{node.lineno} {node.name}"
            yield lines, WANTED_FUNCTION_LINES, HARD_FUNCTION_LINES, what


if __name__ == "__main__":
    sys.exit(main())
