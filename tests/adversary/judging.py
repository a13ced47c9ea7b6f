"""A program in one mode beside plain PyTorch: equal, refused, or a failure with its kind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors

from adversary.comparing import Difference, differences
from adversary.devices import execution_of, is_replayed
from adversary.portraits import Ambient
from adversary.program import Program
from adversary.rounding import SEEDS, OtherRounding
from adversary.worlds import ONE_PROGRAM, World, in_mode, run_plain_call, run_plain_step
from ridgeline.errors import RidgelineError

Outcome = Literal["equal", "refused", "unclear", "failed"]
"""`unclear`: as far from plain PyTorch as that is from itself where it rounds otherwise; no proof of anything."""
MOST_SHOWN = 6
NARROW_WORDS = ("bf16", "fp16", "half", "bfloat16", "autocast without", "assigned in double")
"""In the names of changes. Values that are assigned in double were computed in single precision."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program in a mode.

    `kind` names a failure in a few words; `call` is the number of the call, -1 for making the mode; `paths`
    are the first leaves that differ, as expressions over `w`.
    """

    mode: str
    outcome: Outcome
    kind: str = ""
    call: int = -1
    detail: str = ""
    paths: tuple[str, ...] = ()


def judge(program: Program, path: Path, mode: str) -> Verdict:
    """Run the rendered program at `path` in a mode and beside it; the process is afterwards as before."""
    with _quiet(), _process_kept():
        try:
            subject, oracle = (World(path, is_replayed=is_replayed(mode)) for _ in range(2))
        except RuntimeError as error:  # features that torch itself does not put together
            return Verdict(mode, "unclear", detail=f"making it raises {error}")
        try:
            return _judged(program, path, subject, oracle, mode)
        finally:
            subject.close()
            oracle.close()
            torch._dynamo.reset()


def _judged(program: Program, path: Path, subject: World, oracle: World, mode: str) -> Verdict:
    run_plain(program, oracle)
    torch.manual_seed(2)
    with contextlib.ExitStack() as stack:
        before = Ambient.now()
        start = subject.portrait(with_gradients=False)
        try:
            stack.enter_context(in_mode(subject, mode))
        except RidgelineError as error:
            return _refused(mode, -1, error, subject, (start, before))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            return _raised(mode, -1, error)
        made = subject.portrait(with_gradients=False)
        if verdict := _compared(mode, -1, start, made, before, Ambient.now(), is_narrow=False):
            return verdict
        is_narrow, start_of_calls = False, Ambient.now()
        for index, call in enumerate(program.calls):
            is_narrow = is_narrow or any(word in f"{call}" for word in NARROW_WORDS)
            plainly = functools.partial(_run_plainly, program, path, mode, index, start_of_calls)
            verdict = _call(mode, index, subject, oracle, is_narrow=is_narrow, plainly=plainly)
            if verdict is not None:
                return verdict
    return Verdict(mode, "equal")


def run_plain(program: Program, world: World) -> None:
    """Have the world's calls made by plain PyTorch."""
    (run_plain_call if program.purpose == "call" else run_plain_step)(world)


def _run_plainly(
    program: Program,
    path: Path,
    mode: str,
    index: int,
    begin: Ambient,
    around: contextlib.AbstractContextManager[Any],
) -> dict[str, Any] | None:
    """What plain PyTorch leaves after call number `index` inside of a context, None where it raises.

    Ambient state stays.
    """
    now = Ambient.now()
    begin.restore()  # or the model would be made in the default dtype that a call has set
    world = World(path, is_replayed=is_replayed(mode))
    run_plain(program, world)
    begin.restore()
    try:
        with around, contextlib.suppress(Exception):  # what raises says nothing
            for number in range(index + 1):
                world.call(number)
            return world.portrait(with_gradients=_has_gradients(mode))
    finally:
        world.close()
        now.restore()
    return None


def _has_gradients(mode: str) -> bool:
    return execution_of(mode) not in ONE_PROGRAM


def _call(
    mode: str,
    index: int,
    subject: World,
    oracle: World,
    *,
    is_narrow: bool,
    plainly: Callable[[contextlib.AbstractContextManager[Any]], dict[str, Any] | None],
) -> Verdict | None:
    """One call of both; None where both are equal and can go on."""
    has_gradients = _has_gradients(mode)
    before = Ambient.now()
    wanted_error = None
    try:
        oracle.call(index)
    except Exception as error:  # noqa: BLE001 - what plain PyTorch refuses, a mode must refuse
        wanted_error = error
    wanted_ambient = Ambient.now()
    before.restore()
    last = []
    subject.before = lambda: last.append((subject.portrait(with_gradients=False), Ambient.now()))
    try:
        subject.call(index)
    except RidgelineError as error:
        if not last:  # something that the script itself does before the call
            return Verdict(mode, "refused", call=index, detail=_reason(error))
        return _refused(mode, index, error, subject, last[-1])
    except Exception as error:  # noqa: BLE001 - a raw error where eager has none is the finding
        if wanted_error is not None:
            return Verdict(mode, "equal", call=index, detail=f"both raise {type(error).__name__}")
        return _raised(mode, index, error)
    wanted: dict[str, Any] | None = oracle.portrait(with_gradients=has_gradients)
    if wanted_error is not None:
        detail = f"eager raises {type(wanted_error).__name__}: {_first_line(wanted_error)}"
        # Eager's autograd refuses what a program, which keeps values of its own, computes rightly.
        is_overwritten = "modified by an inplace operation" in str(wanted_error)
        wanted = plainly(allow_mutation_on_saved_tensors()) if is_overwritten else None
        if wanted is None:
            return Verdict(mode, "failed", "no error where eager raises", index, detail)
    verdict = _compared(
        mode,
        index,
        wanted,
        subject.portrait(with_gradients=has_gradients),
        wanted_ambient,
        Ambient.now(),
        is_narrow=is_narrow,
        others=lambda: [
            other for seed in SEEDS if (other := plainly(OtherRounding(seed))) is not None
        ],
    )
    if wanted_error is None or verdict is not None:
        return verdict
    return Verdict(mode, "equal", call=index, detail=f"as with kept values, where {detail}")


def _refused(
    mode: str,
    index: int,
    error: RidgelineError,
    subject: World,
    before: tuple[dict[str, Any], Ambient],
) -> Verdict:
    """A refusal is right if it left everything as it was."""
    now = subject.portrait(with_gradients=False)
    # What stood before was looked at inside of the call's contexts, which have ended with the error.
    ambient = Ambient.now()._replace(modes=before[1].modes)
    verdict = _compared(mode, index, before[0], now, before[1], ambient, is_narrow=False)
    if verdict is None:
        return Verdict(mode, "refused", call=index, detail=_reason(error))
    detail = f"{_reason(error)}\n{verdict.detail}"
    return dataclasses.replace(verdict, kind=f"refused, but {verdict.kind}", detail=detail)


def _compared(
    mode: str,
    index: int,
    wanted: dict[str, Any],
    got: dict[str, Any],
    wanted_ambient: Ambient,
    got_ambient: Ambient,
    *,
    is_narrow: bool,
    others: Callable[[], list[dict[str, Any]]] | None = None,
) -> Verdict | None:
    sides = wanted | wanted_ambient.draw(), got | got_ambient.draw()
    found = differences(*sides, is_narrow=is_narrow)
    if others is not None and any(item.what == "value" for item in found):
        found = differences(*sides, is_narrow=is_narrow, others=others())
        if not found:
            return Verdict(mode, "unclear", call=index, detail="so far apart is plain PyTorch, too")
    if not found:
        return None
    paths = tuple(item.path for item in found[:MOST_SHOWN])
    detail = "\n".join(f"{item.path}: {item.what}: {item.detail}" for item in found[:MOST_SHOWN])
    return Verdict(mode, "failed", _kind(found), index, detail, paths)


def _kind(found: list[Difference]) -> str:
    """The most telling difference: a wrong result first, then state, then random state."""
    first = found[0]
    if first.path.startswith("result"):
        place = "result"
    elif first.path.startswith("w.optimizer"):
        place = "optimizer"
    elif any(name in first.path for name in ("w.", "globals()")):
        place = "state"
    else:
        place = first.path
    return f"{place}: {first.what}"


def _raised(mode: str, index: int, error: BaseException) -> Verdict:
    lines = "".join(traceback.format_exception(error)[-8:])
    return Verdict(mode, "failed", f"raises {type(error).__name__}", index, lines)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _reason(error: RidgelineError) -> str:
    """Its first line, and the second of a list: what a graph cannot hold."""
    first, *more = str(error).strip().splitlines()
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    before = Ambient.now()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        before.restore()
