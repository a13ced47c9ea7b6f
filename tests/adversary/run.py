"""Run programs of the adversary: `python tests/adversary/run.py --programs 2000 --seed 1 --out DIR`."""

from __future__ import annotations

import argparse
import math
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from adversary.children import Child
from adversary.devices import EMULATED_MODES, GPU_MODES, device_of, warm_calls
from adversary.excluded import excluded
from adversary.judging import Outcome, Verdict
from adversary.making import each, make
from adversary.program import Program
from adversary.scripts import script
from adversary.worlds import MODES, purpose_of


class Findings:
    """Verdicts counted, and one script for each kind of failure; used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.unconfirmed: set[str] = set()
        self.blamed: dict[str, set[str]] = {}
        self._folder = folder
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, verdict: Verdict, program: Program) -> bool:
        """Count a verdict; True if it is the first failure of its kind."""
        with self._lock:
            self.outcomes[verdict.mode, verdict.outcome] += 1
            if verdict.outcome != "failed":
                return False
            title = _title(verdict, program)
            self.kinds[title] += 1
            self.blamed.setdefault(verdict.mode, set()).update(blamed(program))
            return self.kinds[title] == 1

    def write(self, verdict: Verdict, program: Program, *, is_confirmed: bool) -> None:
        """A script for a kind of failure; `is_confirmed`: it fails with the compiler as well."""
        title = _title(verdict, program)
        if not is_confirmed:
            self.unconfirmed.add(title)
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:150]
        (self._folder / f"{name}.py").write_text(script(program, verdict))
        mark = "" if is_confirmed else " (not with the compiler)"
        print(f"seed {program.seed}: {title}{mark}", flush=True)


def _title(verdict: Verdict, program: Program) -> str:
    return f"{verdict.mode} {verdict.kind} [{', '.join(program.words())}]"


def blamed(program: Program) -> tuple[str, ...]:
    """What to leave out of later programs, so that other failures show."""
    words = program.words()
    return tuple(word for word in words if "/" in word) or words[-1:]


def main() -> int:
    """Run, report, and exit with 1 if any program failed."""
    wanted = _arguments()
    findings = Findings(wanted.out)
    begin = time.monotonic()
    jobs = _jobs(wanted)
    lanes = [jobs[lane :: wanted.jobs] for lane in range(wanted.jobs)]

    def work(lane: list[tuple[Program | int, str]]) -> None:
        interprets = wanted.compiler == "interpret"
        with (
            Child(wanted.limit_s, interprets=interprets, device=wanted.device) as child,
            Child(wanted.limit_s, interprets=False, device=wanted.device) as compiling,
        ):
            for job, mode in lane:
                if time.monotonic() - begin > wanted.stop_after_s:
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
                if findings.add(verdict, program):
                    is_sure = not (interprets and wanted.confirm) or (
                        compiling.examine(program, mode, shrinks=False)[0].outcome == "failed"
                    )
                    findings.write(verdict, program, is_confirmed=is_sure)

    with ThreadPoolExecutor(wanted.jobs) as pool:
        for done in [pool.submit(work, lane) for lane in lanes]:
            done.result()
    _report(findings, wanted, time.monotonic() - begin)
    return 1 if findings.kinds else 0


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


def _report(findings: Findings, wanted: argparse.Namespace, seconds: float) -> None:
    num_runs = findings.outcomes.total()
    lines = [
        f"{num_runs} runs in {seconds:.0f} s: {num_runs / seconds:.2f} programs a second in a mode",
        "",
    ]
    for mode in wanted.modes:
        counts = {name: findings.outcomes[mode, name] for name in get_args(Outcome)}
        lines.append(
            f"{mode:30}" + "".join(f"{name} {count:5}   " for name, count in counts.items())
        )
    lines += ["", *_kinds(findings)]
    for mode in wanted.modes:
        words = findings.blamed.get(mode, set())
        lines += ["", f"{mode} fails with: {', '.join(sorted(words))}"]
        if wanted.each:
            cured = sorted(excluded(mode) - words)
            lines += [f"{mode} is excluded from, and does not fail with: {', '.join(cured)}"]
    text = "\n".join(lines) + "\n"
    (wanted.out / "report.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
