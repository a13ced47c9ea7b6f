"""The command line as a whole: verbs, flags, exit statuses, and what it does not import."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import main as main_module
from ridgeline.cli.main import VERBS, load_verb, make_parser
from ridgeline.codec import VERSION
from ridgeline.errors import RidgelineError, VerificationError

OUTPUT = {"--help", "--json", "--quiet"}
TASK = {"TASK", "--data", "--batch-size"}
# Adding a flag is a decision: a plan is a file, and most settings belong there.
FLAGS = {
    "measure": OUTPUT | {"--quick", "--full", "--refresh", "--output"},
    "trace": OUTPUT | TASK | {"--workers", "--machine", "--output"},
    "plan": OUTPUT
    | TASK
    | {"--machine", "--devices", "--steps", "--allow", "--explain", "--output"},
    "simulate": OUTPUT
    | TASK
    | {"--machine", "--devices", "--scaling", "--cluster", "--stragglers", "--what-if"}
    | {"--intensity", "--report"},
    "verify": OUTPUT | {"A", "B", "--tolerance", "--machine", "--workload"},
    "report": OUTPUT | {"RUN_DIR"},
}


def flags_of(verb: str) -> set[str]:
    parser = argparse.ArgumentParser()
    load_verb(verb).prepare_parser(parser)
    main_module.add_output_flags(parser)
    return {
        action.option_strings[-1] if action.option_strings else str(action.metavar)
        for action in parser._actions
    }


@pytest.mark.parametrize("verb", sorted(FLAGS))
def test_flags_are_frozen(verb: str) -> None:
    """Each verb has exactly the flags that are listed here."""
    assert flags_of(verb) == FLAGS[verb]


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(run, verb: str) -> None:
    """Help of a verb is its docstring and one line for each argument, and exits with 0."""
    ran = run(verb, "--help")
    assert ran.status == 0
    doc = type(load_verb(verb)).__doc__
    assert " ".join(doc.split())[:40] in " ".join(ran.out.split())
    assert "--json" in ran.out


def test_help_lists_every_verb(run) -> None:
    """The overview names all verbs with their line."""
    ran = run("--help")
    assert ran.status == 0
    for verb, line in VERBS.items():
        assert f"    {verb:<10}{line}" in ran.out


def test_version(run) -> None:
    """`--version` prints the version."""
    assert run("--version").out == f"ridgeline {VERSION}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["measure", "--help"],
        ["verify", "--help"],
        ["report", "--help"],
        ["plan", "--help"],
        ["trace", "--help"],
        ["simulate", "--help"],
    ],
)
def test_help_needs_no_torch(words: list[str]) -> None:
    """Neither the overview nor the help of a verb imports torch, so they answer at once."""
    code = (
        "import sys; from ridgeline.cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(status or ('torch' in sys.modules) * 9)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert ran.returncode == 0


def test_verify_and_report_need_no_torch(run_dir) -> None:
    """Looking at results works on a computer without torch."""
    code = (
        "import sys; sys.modules['torch'] = None; from ridgeline.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    for words in (
        ["verify", run_dir / "predicted.json", run_dir / "measured.json"],
        ["report", run_dir],
    ):
        ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["tain"],
        ["trace"],
        ["plan", "mlp", "--devices", "0"],
        ["plan", "mlp", "--devices", "two"],
        ["verify"],
        ["verify", "a", "b", "--tolerance", "-1"],
        ["report", "a", "b"],
        ["measure", "--colour"],
        ["measure", "--quick", "--full"],
    ],
)
def test_wrong_usage_exits_with_2(run, words: list[str]) -> None:
    """What the parser refuses exits with 2 and says how it is used."""
    ran = run(*words)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("usage: ridgeline")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "mlp", "--devices", "two"), "wanted a whole number, got 'two'"),
        (("verify", "a", "b", "--tolerance", "x"), "wanted a number above 0, got 'x'"),
        (("train", "mlp", "--seed", "x"), "wanted a whole number, got 'x'"),
        *(
            (
                (verb, "mlp", "--allow", "bf16", "--allow", "speed"),
                (
                    "wanted a change of the maths out of tf32, bf16, random, compression, local-steps, "
                    "got 'speed'"
                ),
            )
            for verb in ("plan", "train")
        ),
    ],
)
def test_words_of_the_wrong_kind_are_named(run, words: tuple[str, ...], told: str) -> None:
    """In words for people, not by the name of a function."""
    assert run(*words).err.endswith(f": {told}\n")


class Failing:
    """A verb that fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Takes nothing."""

    def run(self, args: argparse.Namespace, output: object) -> int:
        """Fails."""
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RidgelineError("wanted x, got y"), 1, "ridgeline: wanted x, got y\n"),
        (VerificationError("off by 20 %"), 3, "ridgeline: off by 20 %\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            1,
            (
                "ridgeline: wanted to read or write a file, got: No such file or directory (a.json); "
                "check path and room\n"
            ),
        ),
        (KeyboardInterrupt(), 130, "ridgeline: interrupted\n"),
    ],
)
def test_errors_become_exit_statuses(run, monkeypatch, error, status: int, message: str) -> None:
    """What the user can mend is one line on stderr and a status, never a traceback."""
    monkeypatch.setattr(main_module, "load_verb", lambda name: Failing(error))
    ran = run("measure")
    assert (ran.status, ran.out, ran.err) == (status, "", message)


@pytest.mark.parametrize(
    ("words", "by"),
    [
        (("report", "somewhere", "--nosuch"), "ridgeline report"),
        (("verify", "a", "b", "c"), "ridgeline verify"),
        (("--nosuch", "report", "somewhere"), "ridgeline"),
    ],
)
def test_unknown_arguments_are_told_by_their_verb(run, words: tuple[str, ...], by: str) -> None:
    """The usage shown is that of the verb, which says what it takes."""
    done = run(*words)
    assert done.status == 2
    assert done.err.startswith(f"usage: {by} [-h]")
    assert f"{by}: error: unrecognized arguments: " in done.err


def test_an_interrupt_while_a_verb_is_imported(run, monkeypatch) -> None:
    """Ends like one while it runs."""

    def interrupted(name: str) -> Failing:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "load_verb", interrupted)
    ran = run("measure")
    assert (ran.status, ran.out, ran.err) == (130, "", "ridgeline: interrupted\n")


def test_our_own_mistakes_are_not_hidden(run, monkeypatch) -> None:
    """An error that nobody raised on purpose keeps its traceback."""
    monkeypatch.setattr(main_module, "load_verb", lambda name: Failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run("measure")


def test_a_reader_that_leaves_is_no_error() -> None:
    """`ridgeline ... | head` ends quietly."""
    code = (
        "import os, sys; from ridgeline.cli.main import main; from ridgeline.cli import main as m\n"
        "class V:\n"
        "    'doc'\n"
        "    def prepare_parser(self, parser): pass\n"
        "    def run(self, args, output):\n"
        "        sys.stdin.read()\n"
        "        output.result({'x': 'y' * 1_000_000}); sys.stdout.flush(); return 0\n"
        "m.load_verb = lambda name: V()\n"
        "sys.exit(main(['measure', '--json']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("from ridgeline.cli import main as m", "import ridgeline.cli.main; m = sys.modules['ridgeline.cli.main']")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    process.stdin.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (141, b"")


def test_only_the_used_verb_is_imported(monkeypatch) -> None:
    """Making the parser of one verb loads the module of that verb and of no other."""
    loaded = []
    monkeypatch.setattr(
        main_module, "load_verb", lambda name: loaded.append(name) or Failing(RidgelineError())
    )
    make_parser("trace")
    make_parser()
    assert loaded == ["trace"]


def in_process(*words: str, before: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, by a shell that does something before."""
    line = f'{before}exec "$@"'
    command = ["sh", "-c", line, "sh", sys.executable, "-m", "ridgeline", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def test_a_working_directory_that_was_removed_is_told(tmp_path: Path) -> None:
    """Before anything is done: libraries would end the process with words of their own."""
    place = tmp_path / "gone"
    place.mkdir()
    # Read from elsewhere, since a path relative to nothing leads nowhere.
    ran = in_process("report", str(tmp_path), before='rmdir "$PWD"; ', cwd=place)
    assert (ran.returncode, ran.stdout) == (1, "")
    # The interpreter may have had words of its own about that before.
    assert ran.stderr.splitlines()[-1] == (
        "ridgeline: wanted a working directory, got one that was removed since this shell went there; change "
        "to one that is there, and try again"
    )


def test_streams_that_are_closed_lead_nowhere(run_dir) -> None:
    """A result is not shown in another stream's place, and no file is opened as one of them."""
    ran = in_process("report", str(run_dir), "--json", before="exec <&- >&-; ")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    code = (
        "import os; from ridgeline.cli.main import main; main(['--version']); "
        "os._exit(os.open(os.devnull, os.O_RDONLY))"
    )
    line = f'exec "{sys.executable}" -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line], check=False).returncode > 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="wants a device that is always full")
def test_a_result_that_has_no_room_is_told(run_dir) -> None:
    """By the stream that it was for."""
    for flags in ((), ("--json",)):
        ran = in_process("report", str(run_dir), *flags, before="exec >/dev/full; ")
        assert ran.returncode == 1
        assert ran.stderr == (
            "ridgeline: wanted to read or write a file, got: No space left on device (standard output); "
            "check path and room\n"
        )
