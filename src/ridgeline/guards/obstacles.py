"""What stopped torch's compiler as it read a program, in words and with the line."""

import re
from pathlib import Path

from ridgeline.errors import first_line
from ridgeline.reach.owners import is_machinery, is_standard, is_torchs

_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_LEFT_CHANGED = (
    "requires_grad_() of a tensor that it is given, which stays changed behind it: call it on a copy, as "
    "in x.clone().requires_grad_()"
)
_OF_PYTHON = "where a captured program does not look"
_NUMPYS = (
    "a branch on a number of NumPy's, whose value a program leaves open; make it Python's own, by item(), "
    "where it is set"
)
_DRAWN = (
    f"a draw from a torch.Generator, whose state is kept {_OF_PYTHON}; draw outside and pass what it gives, "
    "or draw without it"
)
_WORDS = tuple(
    (re.compile(mark), words)
    for mark, words in (
        (
            r"attempted to jump with .*NumpyNdarrayVariable",
            _NUMPYS,
        ),
        (r"data-dependent", "a branch on the value of a tensor"),
        (r"Unsupported Tensor\.requires_grad_\(\) call", _LEFT_CHANGED),
        (r"setattr\(\) on Tensor\.requires_grad", _LEFT_CHANGED),
        (
            r"Failed to convert args/kwargs to proxy(?s:.*)\(Generator\)",
            _DRAWN,
        ),
        (
            r"is_inference_mode_enabled during tracing",
            f"a call of torch.is_inference_mode_enabled(), {_OF_PYTHON}",
        ),
        (
            r"enter a `RLock` context manager",
            "a lock, as the first read of a functools.cached_property takes one; read that once before",
        ),
        (
            r"functools\.py\", line \d+, in dispatch",
            f"a call of a functools.singledispatch function, which looks for types {_OF_PYTHON}",
        ),
        (
            r"trace method `(\w+)` of class `(\w+)`",
            r"\1() of a \2, which torch's compiler cannot follow",
        ),
        (
            r"op returned non-Tensor(?s:.*)target: <function (\w+) ",
            r"a call of \1(), which gives no tensor",
        ),
    )
)
"""What is found in an error, and what is said of it."""


def obstacle(error: BaseException) -> str:
    """What stopped the compiler: the first line of its error, and the innermost line of the program's own."""
    text = str(error)
    # Within what it quotes of another error, lines end in two characters.
    first = first_line(error, type(error).__name__).partition("\\n")[0]
    found = ((mark.search(text), words) for mark, words in _WORDS)
    what = next((match.expand(words) for match, words in found if match), first)
    places = [match for match in _PLACE.findall(text) if not is_machinery(match[0])]
    own = [match for match in places if not (is_torchs(match[0]) or is_standard(match[0]))]
    place = (own or places)[-1:]
    where = "".join(f" ({Path(file).name}:{line} in {name})" for file, line, name in place)
    return what.rstrip(".") + where
