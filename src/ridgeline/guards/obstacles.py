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
_WORDS = {
    "data-dependent": "a branch on the value of a tensor",
    "Unsupported Tensor.requires_grad_() call": _LEFT_CHANGED,
    "setattr() on Tensor.requires_grad": _LEFT_CHANGED,
}
"""What is found in an error, and what is said of it."""


def obstacle(error: BaseException) -> str:
    """What stopped the compiler: the first line of its error, and the innermost line of the program's own."""
    text = str(error)
    # Within what it quotes of another error, lines end in two characters.
    first = first_line(error, type(error).__name__).partition("\\n")[0]
    what = next((words for mark, words in _WORDS.items() if mark in text), first)
    places = [match for match in _PLACE.findall(text) if not is_machinery(match[0])]
    own = [match for match in places if not (is_torchs(match[0]) or is_standard(match[0]))]
    place = (own or places)[-1:]
    where = "".join(f" ({Path(file).name}:{line} in {name})" for file, line, name in place)
    return what.rstrip(".") + where
