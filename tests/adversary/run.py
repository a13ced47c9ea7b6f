"""Run programs of the adversary: `python tests/adversary/run.py --programs 2000 --seed 1 --out DIR`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import queue
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from adversary.children import Child
from adversary.devices import EMULATED_MODES, GPU_MODES, device_of, warm_calls
from adversary.excluded import excluded
from adversary.findings import Findings
from adversary.making import each, make
from adversary.program import Program
from adversary.worlds import MODES, purpose_of


class Ended(BaseException):
    """SIGTERM: what is known by then is written."""


def _end(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def main() -> int:
    """Run, report, and exit with 1 if any program failed."""
    wanted = _arguments()
    findings = Findings(wanted.out)
    begin = time.monotonic()
    jobs: queue.SimpleQueue[tuple[Program | int, str]] = queue.SimpleQueue()
    for job in (listed := _jobs(wanted)):
        jobs.put(job)
    with contextlib.ExitStack() as stack:
        lanes = [
            [stack.enter_context(child) for child in _children(wanted, n)]
            for n in range(wanted.jobs)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(wanted.jobs))
        signal.signal(signal.SIGTERM, _end)
        try:
            for done in [pool.submit(_work, wanted, lane, jobs, findings, begin) for lane in lanes]:
                done.result()
        except Ended:
            findings.is_over.set()
            for child in itertools.chain(*lanes):
                child.kill()
    _report(findings, wanted, time.monotonic() - begin, len(listed))
    return 1 if findings.kinds else 0


def _children(wanted: argparse.Namespace, number: int) -> tuple[Child, Child]:
    """Those of a lane: the one that runs programs, and the one that runs failures with the compiler."""
    gpu = wanted.gpus[number % len(wanted.gpus)] if wanted.gpus else ""
    interprets = wanted.compiler == "interpret"
    return (
        Child(wanted.limit_s, interprets=interprets, device=wanted.device, gpu=gpu),
        Child(wanted.limit_s, interprets=False, device=wanted.device, gpu=gpu),
    )


def _work(
    wanted: argparse.Namespace,
    children: Sequence[Child],
    jobs: queue.SimpleQueue[tuple[Program | int, str]],
    findings: Findings,
    begin: float,
) -> None:
    """Run programs until there are no more."""
    child, compiling = children
    confirms = wanted.compiler == "interpret" and wanted.confirm
    while time.monotonic() - begin < wanted.stop_after_s and not findings.is_over.is_set():
        try:
            job, mode = jobs.get_nowait()
        except queue.Empty:
            return
        known = set(excluded(mode)) if wanted.new else set()
        known |= findings.blamed.get(mode, set()) if wanted.once else set()
        if isinstance(job, Program) and known.intersection(job.words()):
            continue  # its feature failed without the change, or at another place
        made = (
            make(job, purpose_of(mode), {*wanted.exclude, *known}, warm_calls(mode))
            if isinstance(job, int)
            else job
        )
        verdict, program = child.examine(made, mode, shrinks=not wanted.no_shrink)
        if findings.add(verdict, program, made.seed):
            is_sure = not confirms or (
                compiling.examine(program, mode, shrinks=False)[0].outcome == "failed"
            )
            print(findings.write(verdict, program, is_confirmed=is_sure), flush=True)


def _jobs(wanted: argparse.Namespace) -> list[tuple[Program | int, str]]:
    """Programs, or the seeds of those that are made when their turn comes, with the modes to run them in."""
    if wanted.each or wanted.only:
        programs = [
            (program, mode)
            for mode in wanted.modes
            for program in each(purpose_of(mode), warm_calls(mode))
        ]
        only = set(wanted.only)
        return [job for job in programs if not only or only.intersection(job[0].words())]
    seeds = range(wanted.seed, wanted.seed + wanted.programs)
    return [(seed, mode) for seed in seeds for mode in wanted.modes]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--programs", type=int, default=100, help="seeds to run (default 100)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the modes")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="default: all of the device")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/adversary"), help="for scripts of failures"
    )
    parser.add_argument("--jobs", type=int, default=1, help="child processes (default 1)")
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="seconds for a program in a mode"
    )
    parser.add_argument(
        "--stop-after-s", type=float, default=math.inf, help="begin no program then"
    )
    parser.add_argument(
        "--exclude", nargs="*", default=[], help="features and changes to leave out"
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="keep failing programs as they are"
    )
    parser.add_argument(
        "--once", action="store_true", help="leave what failed in a mode out of its later programs"
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="instead of seeds, a program for every entry of the grammar",
    )
    parser.add_argument("--new", action="store_true", help="leave out what `excluded.py` lists")
    parser.add_argument("--only", nargs="*", default=[], help="like --each, for these entries")
    parser.add_argument(
        "--confirm", action="store_true", help="run the first of each kind with the compiler too"
    )
    parser.add_argument(
        "--compiler",
        choices=("interpret", "inductor"),
        default="interpret",
        help="run captured programs operator by operator (fast), or compile them (seconds each)",
    )
    parser.add_argument(
        "--gpus", nargs="*", default=[], metavar="ID", help="child processes take them in turns"
    )
    parser.add_argument("--json", type=Path, help="for the counts; also written on SIGTERM")
    wanted = parser.parse_args()
    of_device = [
        mode for mode in (*MODES, *EMULATED_MODES, *GPU_MODES) if device_of(mode) == wanted.device
    ]
    if wanted.compiler == "inductor":  # of whose kernels an emulated graph knows nothing
        emulated = {mode for mode in EMULATED_MODES if "compiled" in mode or "regional" in mode}
        of_device = [mode for mode in of_device if mode not in emulated]
    wanted.modes = wanted.modes or of_device
    if unknown := sorted({*wanted.modes} - {*of_device}):
        parser.error(f"wanted modes out of {', '.join(of_device)}, got {', '.join(unknown)}")
    return wanted


def _kinds(findings: Findings) -> list[str]:
    return [
        f"{count:4} x {title}{' (not with the compiler)' * (title in findings.unconfirmed)}"
        for title, count in findings.kinds.most_common()
    ]


def _report(findings: Findings, wanted: argparse.Namespace, seconds: float, num_jobs: int) -> None:
    told = findings.told(wanted.modes)
    if wanted.json is not None:
        about = {
            "seeds": None if wanted.each or wanted.only else [wanted.seed, wanted.programs],
            "compiler": wanted.compiler,
            "device": wanted.device,
            "torch": torch.__version__,
            "excluded": wanted.new,
            "wanted": num_jobs,
            "seeds_in_all_modes": sum(n == len(wanted.modes) for n in findings.finished.values()),
            "seconds": round(seconds, 1),
            "jobs": wanted.jobs,
        }
        wanted.json.write_text(json.dumps(about | told, indent=1) + "\n")
    rate = told["runs"] / seconds
    lines = [
        f"{told['runs']} of {num_jobs} runs in {seconds:.0f} s: {rate:.2f} programs a second in a mode",
        "",
    ]
    lines += [
        f"{mode:30}" + "".join(f"{n} {count:5}   " for n, count in findings.counts(mode).items())
        for mode in wanted.modes
    ]
    lines += ["", *_kinds(findings)]
    for mode in wanted.modes:
        words = findings.blamed.get(mode, set())
        if words:
            lines += ["", f"{mode} fails with: {', '.join(sorted(words))}"]
        if wanted.each:
            cured = sorted(excluded(mode) - words)
            lines += [f"{mode} is excluded from, and does not fail with: {', '.join(cured)}"]
    text = "\n".join(lines) + "\n"
    (wanted.out / "report.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
