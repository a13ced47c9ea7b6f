"""What an error says in one line."""

import pytest

from ridgeline.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("\n one \ntwo", "one"),
        ("backend='inductor' raised:\nRuntimeError: odd\n\nSet more", "backend='inductor' raised: RuntimeError: odd"),
        ("it raised:", "it raised:"),
        ("It fails\n  Explanation: at f(*(x,), **{}): got OSError('no')\n  Hint: ask", "It fails: OSError('no')"),
        ("It fails\n  Explanation: nobody knows\n", "It fails"),
        ("It fails\n  Explanation: the function `pack_it` in file `/a/b.py` is not read", "It fails: pack_it"),
        ("It fails at `mix`\n  Explanation: nobody knows `mix`", "It fails at `mix`"),
        ("It fails\n  Explanation: `a + b` of `/a/b.py`", "It fails"),
        ("", "no message"),
        (" \n ", "no message"),
    ],
)  # fmt: skip
def test_it_is_the_first_and_the_one_that_it_announces(text, line) -> None:
    assert first_line(ValueError(text)) == line
