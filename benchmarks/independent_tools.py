"""What `ridgeline measure --full` says of a host, beside tools that others wrote, in turns within minutes.

    python benchmarks/independent_tools.py [--turns 7] [--folder .] [--only storage vectors]

Memory and vectors stand beside likwid-bench, storage beside fio, a packet over loopback beside qperf, and
matrix products beside NumPy's OpenBLAS. Tools that are not installed are named and left out (Debian and
Ubuntu: `apt-get install likwid fio qperf`). Both sides do the same: as many bytes, threads and blocks, direct
I/O where the file system has it. The bar is five per cent; `between turns` is how far each side
is from itself.
The latency of memory has no row: lmbench and Intel's checker are in no distribution's free packages.
"""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline import units
from ridgeline.experiments.memory.loopback import MESSAGE_BYTES, loopback_latency
from ridgeline.experiments.result_files import (
    file_name,
    now,
    parser_of,
    quartiles,
    say,
    this_hardware,
)
from ridgeline.experiments.turns import take_turns
from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.probe.files.blocks import rate_of, seconds_of
from ridgeline.probe.files.storage import BLOCK_BYTES, PIECE_BYTES, Scratch
from ridgeline.probe.host.memory_levels import Run, Walked, enough
from ridgeline.probe.native import multiply_adds
from ridgeline.probe.timing import sample

RESULTS = Path(__file__).parent / "results"
BAR = 0.05
FILE_BYTES = 256 << 20
COPIED_BYTES = 64 << 20
STORAGE_S = 2
MANY = 16
PACKETS = 3000
LARGE_PAGES = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for large pages (glibc 2.35 on), as our loops do."""
LIMIT_S = 120.0
"""Of one call of a tool."""


class Pair(NamedTuple):
    """One figure of ours and the same one of another tool, in one unit, one sample a call."""

    kind: str
    name: str
    tool: str
    unit: str
    ours: Callable[[], float]
    theirs: Callable[[], float]


def main() -> None:
    """Measure all pairs, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="whose drive is timed")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    args = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    rows = []
    with contextlib.ExitStack() as stack:
        for kind in args.only:
            if KINDS[kind].tool in missing:
                say(f"! {kind}: {KINDS[kind].tool} is not installed")
                continue
            for pair in KINDS[kind].pairs(args.folder, stack):
                say(f"{kind}: {pair.name}, beside {pair.tool}")
                rows.append(_compared(pair, args.turns))
    result = {
        "what": "probes beside independent tools",
        "date": now(),
        "turns": args.turns,
        "missing": missing,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "rows": rows,
    }
    for row in rows:
        print(
            f"{row['name']:48s} ours {row['ours']['median']:.4g} {row['unit']}, {row['tool']} "
            f"{row['theirs']['median']:.4g}: {row['difference']:+.1%} "
            f"(between turns {row['ours_scatter']:.1%}, {row['theirs_scatter']:.1%})"
        )
    far = sum(abs(row["difference"]) > BAR for row in rows)
    print(f"{len(rows) - far} of {len(rows)} within {BAR:.0%}")
    place = RESULTS / file_name("independent_tools", this_hardware("cpu"))
    place.write_text(json.dumps(result, indent=1) + "\n")


def _compared(pair: Pair, turns: int) -> dict[str, Any]:
    taken = take_turns({"ours": pair.ours, "theirs": pair.theirs}, turns=turns)
    ours, theirs = quartiles(taken["ours"]), quartiles(taken["theirs"])
    return {
        **{key: getattr(pair, key) for key in ("kind", "name", "tool", "unit")},
        "ours": ours,
        "theirs": theirs,
        # Turn by turn, since the machine changes between turns.
        "difference": statistics.median(
            a / b - 1 for a, b in zip(taken["ours"], taken["theirs"], strict=True)
        ),
        "ours_scatter": (ours["high"] - ours["low"]) / ours["median"],
        "theirs_scatter": (theirs["high"] - theirs["low"]) / theirs["median"],
    }


def _said(command: list[str], pattern: str) -> float:
    """The number behind a pattern in what a tool prints."""
    done = _run(command)
    found = re.search(pattern, done.stdout)
    if found is None:
        raise ValueError(f"wanted {pattern!r} from {command[0]}, got: {done.stdout[-500:]}")
    return float(found[1])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True, env=LARGE_PAGES
    )


def _likwid(kernel: str, num_bytes: int, threads: int, what: str) -> Callable[[], float]:
    # Its kilobytes are thousands of bytes.
    command = ["likwid-bench", "-t", kernel, "-w", f"S0:{num_bytes // 1000}kB:{threads}"]
    return lambda: 1e6 * _said(command, rf"{what}:\s+([\d.]+)")


def memory(folder: Path, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Reading in order with one core, by size; copying with as many threads as torch has."""
    for kib in (16, 256, 64 * 1024):
        yield _reading(stack.enter_context(Walked(kib << 10)), kib << 10)
    threads = torch.get_num_threads()
    source = torch.rand(COPIED_BYTES // 4)
    copied = torch.empty_like(source)
    yield Pair(
        "memory",
        f"copying {units.num_bytes(COPIED_BYTES)}, {threads} threads",
        "likwid-bench copy_avx",
        "B/s",
        lambda: (
            2 * COPIED_BYTES / statistics.median(sample(lambda: copied.copy_(source), seconds=0.2))
        ),
        _likwid("copy_avx", 2 * COPIED_BYTES, threads, "MByte/s"),
    )


def _reading(walked: Walked, num_bytes: int) -> Pair:
    word = walked.timed_word()
    name = f"reading {units.num_bytes(num_bytes)} in order, one core"
    theirs = _likwid("load_avx", num_bytes, 1, "MByte/s")
    return Pair("memory", name, "likwid-bench load_avx", "B/s", lambda: WORD_BYTES / word(), theirs)


def vectors(folder: Path, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Multiply-adds of 32-bit floats in wide vectors, one core."""
    loops = multiply_adds()
    for bits, kernel in ((256, "peakflops_sp_avx_fma"), (512, "peakflops_sp_avx512_fma")):
        if bits in loops:
            yield _vector(loops[bits], bits, kernel)


def _vector(run: Run, bits: int, kernel: str) -> Pair:
    operations = enough(run, 48, 0.05)
    flops = 2 * (bits // 32) * operations
    name, tool = f"multiply-adds in {bits} bit, one core", f"likwid-bench {kernel}"
    theirs = _likwid(kernel, 16 << 10, 1, "MFlops/s")
    return Pair("vectors", name, tool, "FLOP/s", lambda: flops / run(operations), theirs)


def products(folder: Path, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Matrix products by torch and by NumPy, each with all cores."""
    for size in (512, 2048):
        yield _product(size)


def _product(size: int) -> Pair:
    a, b = torch.rand(size, size), torch.rand(size, size)
    out = torch.empty_like(a)
    x, y, z = a.numpy(), b.numpy(), np.empty((size, size), np.float32)

    def rate(multiply: Callable[[], object]) -> float:
        return 2.0 * size**3 / statistics.median(sample(multiply, seconds=0.3))

    return Pair(
        "products",
        f"product of {size} x {size}",
        "NumPy",
        "FLOP/s",
        lambda: rate(lambda: torch.mm(a, b, out=out)),
        lambda: rate(lambda: np.dot(x, y, out=z)),
    )


def storage(folder: Path, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Reads at random and in order, appends with fsync; fio issues them as ours, one thread after another."""
    scratch = stack.enter_context(Scratch(folder))
    scratch.write(FILE_BYTES)
    beside = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
    yield from (_reads(scratch, beside, threads, at_random=True) for threads in (1, MANY))
    yield _reads(scratch, beside, 1, at_random=False)
    appended = {"filename": beside / "appended", "file_append": 1, "fsync": 1, "direct": 0}
    yield Pair(
        "storage",
        "appending 4 KiB with fsync",
        "fio",
        "B/s",
        lambda: BLOCK_BYTES / seconds_of(scratch.append(512, STORAGE_S)).value,
        # A file of its own, which grows, through the cache.
        lambda: _fio("write", bs=BLOCK_BYTES, size=FILE_BYTES, **appended),
    )


def _reads(scratch: Scratch, beside: Path, threads: int, *, at_random: bool) -> Pair:
    block = BLOCK_BYTES if at_random else PIECE_BYTES
    read = scratch.read_at_random if at_random else scratch.read
    options = {
        "filename": beside / "file", "size": FILE_BYTES, "bs": block, "numjobs": threads,
        "direct": int(scratch.is_direct),
    }  # fmt: skip
    return Pair(
        "storage",
        f"reading {units.num_bytes(block)} {'at random' if at_random else 'in order'}, {threads} at once",
        "fio",
        "B/s",
        lambda: rate_of(read(threads, STORAGE_S), block).value,
        lambda: _fio("randread" if at_random else "read", **options),
    )


def _fio(way: str, **options: object) -> float:
    """Bytes a second."""
    given = [f"--{name}={value}" for name, value in options.items()]
    command = [
        "fio",
        "--name=one",
        f"--rw={way}",
        "--ioengine=psync",
        "--thread",
        "--group_reporting",
        *given,
    ]
    command += ["--time_based", f"--runtime={STORAGE_S}", "--output-format=json"]
    done = _run(command)
    sides = json.loads(done.stdout)["jobs"][0]
    return float(sides["write" if way == "write" else "read"]["bw_bytes"])


def packets(folder: Path, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """4 KiB one way over loopback, as half of a round trip over TCP."""
    server = subprocess.Popen(["qperf"], stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    command = ["qperf", "-m", str(MESSAGE_BYTES), "-t", "2", "--wait_server", "10"]
    command += ["127.0.0.1", "tcp_lat"]
    yield Pair(
        "packets",
        "4 KiB to another process",
        "qperf tcp_lat",
        "s",
        _packet_s,
        lambda: 1e-6 * _said(command, r"latency\s+=\s+([\d.]+) us"),
    )


def _packet_s() -> float:
    measured = loopback_latency(PACKETS).measured
    if measured is None:
        raise ValueError("wanted the latency of a packet over loopback, got none")
    return measured.value


class Kind(NamedTuple):
    """A tool, and the pairs that it takes part in."""

    tool: str
    pairs: Callable[[Path, contextlib.ExitStack], Iterator[Pair]]


KINDS = {
    "memory": Kind("likwid-bench", memory),
    "vectors": Kind("likwid-bench", vectors),
    "products": Kind("python3", products),
    "storage": Kind("fio", storage),
    "packets": Kind("qperf", packets),
}
TOOLS = sorted({kind.tool for kind in KINDS.values()})


if __name__ == "__main__":
    main()
