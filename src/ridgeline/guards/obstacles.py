"""What stopped torch's compiler as it read a program, in words and with the line."""

import re
from pathlib import Path

from ridgeline.errors import first_line

_PLACE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_READER = str(Path(__file__).with_name("reading.py"))
_WORDS = {
    "data-dependent": "a branch on the value of a tensor",
    "Unsupported Tensor.requires_grad_() call": (
        "requires_grad_() of a tensor that it is given, which stays changed behind it: call it on a copy, as "
        "in x.clone().requires_grad_()"
    ),
}
"""What is found in an error, and what is said of it."""


def obstacle(error: BaseException) -> str:
    """What stopped the compiler: the first line of its error, and the line of the program."""
    text = str(error)
    # Within what it quotes of another error, lines end in two characters.
    first = first_line(error, type(error).__name__).partition("\\n")[0]
    what = next((words for mark, words in _WORDS.items() if mark in text), first)
    places = [match for match in _PLACE.findall(text) if match[0] != _READER]
    where = f" ({Path(places[-1][0]).name}:{places[-1][1]} in {places[-1][2]})" if places else ""
    return what.rstrip(".") + where
