"""A child process that takes programs from its standard input, and says on its output what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from adversary.devices import device_of
from adversary.interpreting import interpreted
from adversary.judging import Verdict, judge
from adversary.program import Program, from_json, to_json
from adversary.rendering import render
from adversary.shrinking import shrink

LOST = "but the device is lost"
"""Ends the kind of such a failure; each program after it would fail, too."""


def examine(program: Program, mode: str, folder: Path, *, shrinks: bool) -> tuple[Verdict, Program]:
    """The verdict on a program, and the program; made small if it failed and `shrinks`."""

    def judged(one: Program) -> Verdict:
        path = folder / f"program_{one.seed}.py"
        path.write_text(render(one, device_of(mode)))
        if device_of(mode) == "cpu":
            return judge(one, path, mode)
        return _with_device(mode, lambda: judge(one, path, mode))

    verdict = judged(program)
    if verdict.outcome != "failed" or verdict.kind.endswith(LOST) or not shrinks:
        return verdict, program
    begun = dataclasses.replace(program, calls=program.calls[: max(1, verdict.call + 1)])
    start = begun if _is_alike(judged(begun), verdict) else program
    small = shrink(start, lambda one: _is_alike(judged(one), verdict))
    return judged(small), small


def _with_device(mode: str, judged: Callable[[], Verdict]) -> Verdict:
    """A verdict, which is a failure where a capture has left a device on which nothing can run any more."""
    try:
        verdict = judged()
    except RuntimeError as error:
        verdict = Verdict(mode, "failed", "judging it", detail=_told(error))
    try:
        torch.randn(2, device="cuda").sum().item()  # random numbers too: they are refused first
    except RuntimeError as error:
        name = verdict.outcome if verdict.outcome != "failed" else verdict.kind
        detail = f"{verdict.detail}\n{_told(error)}"
        return Verdict(mode, "failed", f"{name}, {LOST}", verdict.call, detail)
    return verdict


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-8:])


def _is_alike(verdict: Verdict, other: Verdict) -> bool:
    return verdict.outcome == "failed" and verdict.kind == other.kind


def serve(requests: TextIO, replies: TextIO, folder: Path, *, interprets: bool) -> None:
    """One line of JSON a request (`program`, `mode`, `shrinks`), one a reply (`verdict`, `program`)."""
    with contextlib.ExitStack() as stack:
        if interprets:
            stack.enter_context(interpreted())
        for request in _lines(requests):
            program = from_json(json.dumps(request["program"]))
            verdict, program = examine(program, request["mode"], folder, shrinks=request["shrinks"])
            reply = {
                "verdict": dataclasses.asdict(verdict),
                "program": json.loads(to_json(program)),
            }
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
            # What steps and captures collect while a program runs, they look for in its own objects alone: in
            # torch's hundreds of thousands it would take half of all the time.
            gc.collect()
            gc.freeze()


def _lines(requests: TextIO) -> Iterator[dict[str, Any]]:
    for line in requests:
        yield json.loads(line)


if __name__ == "__main__":
    # What programs and compilers print goes elsewhere: this process's standard output is for replies.
    replies, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, replies, Path(sys.argv[1]), interprets="--interpret" in sys.argv)
