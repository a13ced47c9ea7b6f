"""`ridgeline`: measure, trace, plan, simulate, train, verify, scaling, report, bench, kvserver.

Exit status: 0 fine, 1 something the user can fix, 2 wrong usage, 3 prediction and measurement differ
by more than the tolerance.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ridgeline.cli.command import NOT_VERIFIED, USER_ERROR, Output, Verb, add_output_flags
from ridgeline.codec import VERSION
from ridgeline.errors import RidgelineError, VerificationError

VERBS = {
    "measure": "probe this machine and print its ceilings with their spread",
    "trace": "list the operators of a training step; nothing runs",
    "plan": "rank the ways to run a training step, with reasons",
    "simulate": "predict a training step, also on other machines",
    "train": "measure, trace, choose, train, verify and report",
    "verify": "compare a predicted with a measured timeline",
    "scaling": "compare runs by their number of workers, with laws through them",
    "report": "write the report of a run again",
    "bench": "run an experiment that compares Ridgeline with alternatives",
    "kvserver": "serve a part of an asynchronous key-value store",
}
"""Verb to its line in the help; the verb lives in `ridgeline.cli.<verb>`."""

_INTERRUPTED = 130
"""Exit status after Ctrl-C, by the custom of shells: 128 plus the number of the signal."""
_UNREAD = 141
"""Exit status when the reader of the output went away; likewise."""
_NOWHERE = (
    "wanted a working directory, got one that was removed since this shell went there; change to one that is "
    "there, and try again"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    if not _is_somewhere():
        return _fail(_NOWHERE, USER_ERROR)
    try:
        # Only the module of the verb is imported, so that help and mistakes are answered at once.
        args = _parsed(words)
    except SystemExit as leaving:  # argparse leaves after help (0) and wrong usage (2)
        return leaving.code if isinstance(leaving.code, int) else USER_ERROR
    except KeyboardInterrupt:  # while the verb is imported
        return _fail("interrupted", _INTERRUPTED)
    output = Output(is_json=args.json, is_quiet=args.quiet, stdout=sys.stdout)
    # What a task file prints while it runs in this process would be in the middle of the document.
    aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    verb: Verb = args.command
    try:
        with aside:
            return verb.run(args, output)
    except VerificationError as error:
        return _fail(str(error), NOT_VERIFIED)
    except RidgelineError as error:
        return _fail(str(error), USER_ERROR)
    except BrokenPipeError:
        # The reader of our output has closed it; what Python still flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except OSError as error:
        return _fail(_os_error(error), USER_ERROR)
    except KeyboardInterrupt as interrupt:
        return _fail("; ".join(["interrupted", *map(str, interrupt.args)]), _INTERRUPTED)


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line; only the module of `verb` is imported.

    Args:
        verb: The verb whose arguments are wanted; None describes all verbs by one line each.
    """
    parser = argparse.ArgumentParser(
        prog="ridgeline",
        description="PyTorch training as fast as the machine allows, and a measurement of what is left.",
        epilog="TASK is a built-in name (mlp, resnet18, gpt2) or a Python file with `def task() -> rl.Task`.",
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {VERSION}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, line in VERBS.items():
        if name == verb:
            command = load_verb(name)
            own = verbs.add_parser(name, help=line, description=type(command).__doc__)
            command.prepare_parser(own)
            add_output_flags(own)
            # A flag that a verb does not have is shown with the usage of that verb.
            own.set_defaults(command=command, parser=own)
        else:
            # A line in the list; whoever asks for its help gets the parser above.
            verbs.add_parser(name, help=line, add_help=False)
    return parser


def _open_streams() -> None:
    """Let standard streams that the caller has closed lead nowhere.

    Else the next files would be opened in their places, and get what libraries print.
    """
    # In this order, since the system gives the lowest number that is free.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open to the end


def _is_somewhere() -> bool:
    """Whether there is a working directory: without one, libraries that torch loads end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; what is wrong is told by the parser of its verb."""
    parser = make_parser(words[0] if words and words[0] in VERBS else None)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        # Behind flags of nobody's the verb was not looked for, and its parser has no arguments.
        vars(args).get("parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def load_verb(name: str) -> Verb:
    """The command of a verb, from its module: `MeasureCommand` of `cli/measure.py`."""
    module = importlib.import_module(f"ridgeline.cli.{name}")
    command: Verb = getattr(module, f"{name.capitalize()}Command")()
    return command


def _os_error(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"wanted to read or write a file, got: {error.strerror or error}{where}; check path and room"


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"ridgeline: {message}\n")
    return status
