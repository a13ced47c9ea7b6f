"""What every verb of the command line is: a class that describes its arguments and runs.

A verb lives in a module of its own name, `ridgeline.cli.<verb>`, as a class `Command`. Its module is
imported only when the verb is used; what needs torch is imported inside `run`, and what draws on a terminal
with the first line there: servers draw nothing. The result goes to stdout, everything on the way there to
stderr.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from ridgeline.codec import Noun, encode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FINE = 0
USER_ERROR = 1
USAGE = 2
NOT_VERIFIED = 3


class Verb(Protocol):
    """A verb; its docstring is its help text."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's own arguments; `--json` and `-q` are there already."""

    def run(self, args: argparse.Namespace, output: "Output") -> int:
        """Do it and return the exit status; raise `RidgelineError` for what the user can fix."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a verb shows its result and its progress.

    Attributes:
        is_json: The result is one JSON document instead of text for people.
        is_quiet: No progress.
        stdout: Where the result goes; None: what is `sys.stdout` then.
    """

    is_json: bool = False
    is_quiet: bool = False
    stdout: TextIO | None = None

    def progress(self, line: str) -> None:
        """One line about what happens now, on stderr."""
        if not self.is_quiet:
            _console(sys.stderr).print(line, style="dim", markup=False)

    def result(self, value: Noun | dict[str, Any], *shown: "RenderableType") -> None:
        """The result on stdout: a noun as its file has it, a dict of values as plain JSON, or text.

        Args:
            value: What `--json` prints.
            shown: What people see instead.
        """
        try:
            self._show(value, shown)
        except OSError as error:
            # A full disk names no file; a reader that has gone is told by the kind of the error.
            error.filename = error.filename or "standard output"
            raise

    def _show(self, value: Noun | dict[str, Any], shown: tuple["RenderableType", ...]) -> None:
        if self.is_json:
            # `sys.stdout` leads to stderr meanwhile (see `main`), so what it was before is kept.
            target = self.stdout or sys.stdout
            target.write(json_text(value))
            # A reader that has gone shows here, and not where the interpreter flushes at its end.
            target.flush()
            return
        terminal = _console()
        for part in shown:
            terminal.print(part)


def _console(file: IO[str] | None = None) -> "Console":
    from ridgeline.reporting.terminal.text import console

    return console(file)


def json_text(value: Noun | dict[str, Any]) -> str:
    """A noun as its file has it, a dict of values as indented JSON; ends with a line break."""
    if isinstance(value, Noun):
        return encode(value).decode() + "\n"
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=1) + "\n"


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every verb has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
