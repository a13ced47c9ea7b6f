"""Saved programs, damaged at random: each file is refused, or computes what it was saved with.

    python tests/hybrid/damaged_packages.py [FILES] [SEED]

saves a callable and a training step by torch's own compiler, and loads FILES (10,000) damaged copies of them. Says
how many were refused; ends with status 1 where one was accepted and computes something else. `test_damaged_packages.py`
loads a few hundred.
"""

import faulthandler
import random
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._inductor import config

import ridgeline as rl
from ridgeline.errors import PackageError
from ridgeline.packages.archive import METADATA, ROOT, SEAL

Answer = list[Tensor]
"""What a loaded program computes, and the state that it leaves."""
HEADER_BYTES = 30
"""Of a member in a zip archive, before its name."""
ENTRY_BYTES, LENGTHS_AT, OFFSET_AT = 46, 28, 42
"""Of an entry in the directory of an archive: before its name, and where the lengths of what follows and the place
of the member stand. Source: PKWARE's APPNOTE, 4.3.12."""
LONGEST = 64
"""Bytes that are damaged at a stretch."""


def save_callable(folder: Path) -> Path:
    """A saved module of two layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    path = folder / "callable.pt2"
    with config.patch(compile_threads=1), rl.hybridize(net, torch.ones(4, 6), mode="packaged") as h:
        h.save(path)
    return path


def save_step(folder: Path) -> Path:
    """A training step, saved after three."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 3))
    path, optimizer = folder / "step.pt2", torch.optim.AdamW(net.parameters(), 0.01)
    plan = rl.Plan(execution="packaged")
    with (
        config.patch(compile_threads=1),
        rl.TrainStep(net, loss_fn, optimizer, plan, device="cpu") as step,
    ):
        for _ in range(3):
            step(torch.ones(4, 6))
        step.save(path)
    return path


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Of a model of three outputs."""
    return model(batch).square().mean()


def answer(loaded: Any) -> Answer:
    """What it computes of fixed inputs and random numbers: twice, since the second call sees what the first left."""
    torch.manual_seed(1)
    computed = [loaded(torch.linspace(-1.0, 2.0, 24).reshape(4, 6)) for _ in range(2)]
    state = loaded.state() if callable(loaded.state) else loaded.state
    return [*computed, *state.values()]


def frames_of(path: Path) -> list[int]:
    """Places of all bytes that say what is where and what belongs together: few, and all the rest hangs on them."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        places = [*range(archive.start_dir, size)]
        for member in archive.infolist():
            start = member.header_offset
            end = start + HEADER_BYTES + len(member.filename)
            if member.filename in (f"{ROOT}/{METADATA}", f"{ROOT}/{SEAL}"):
                end += member.file_size
            places += range(start, min(end, size))
    return places


def offsets_of(path: Path) -> list[int]:
    """Places of the bytes that say where each member begins."""
    content, found = path.read_bytes(), []
    with zipfile.ZipFile(path) as archive:
        place, members = archive.start_dir, len(archive.infolist())
    for _ in range(members):
        found += range(place + OFFSET_AT, place + ENTRY_BYTES)
        lengths = struct.unpack_from("<HHH", content, place + LENGTHS_AT)
        place += ENTRY_BYTES + sum(lengths)
    return found


def flip(content: bytearray, place: int, draw: random.Random) -> None:
    """Another bit."""
    content[place] ^= 1 << draw.randrange(8)


def replace(content: bytearray, place: int, draw: random.Random) -> None:
    """Other bytes."""
    content[place : place + draw.randint(1, LONGEST)] = draw.randbytes(draw.randint(1, LONGEST))


def clear(content: bytearray, place: int, draw: random.Random) -> None:
    """Zeros, as where a block was never written."""
    length = min(draw.randint(1, LONGEST), len(content) - place)
    content[place : place + length] = bytes(length)


def insert(content: bytearray, place: int, draw: random.Random) -> None:
    """Bytes too many."""
    content[place:place] = draw.randbytes(draw.randint(1, LONGEST))


def drop(content: bytearray, place: int, draw: random.Random) -> None:
    """Bytes that are missing."""
    del content[place : place + draw.randint(1, LONGEST)]


def cut(content: bytearray, place: int, _draw: random.Random) -> None:
    """Nothing from there on."""
    del content[place:]


def move(content: bytearray, place: int, draw: random.Random) -> None:
    """Bytes from elsewhere in the file."""
    start = draw.randrange(len(content))
    length = min(draw.randint(1, LONGEST), len(content) - max(start, place))
    content[place : place + length] = content[start : start + length]


DAMAGES: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    *(flip, flip, flip, flip),
    *(replace, clear, insert, drop, cut, move),
)
"""Four of ten are single bits."""


class Damaged:
    """Damaged copies of one package, loaded one after the other.

    Attributes:
        counts: How many were `refused`, `unharmed`, or `unchanged`, where the damage was none.
        wrong: What was accepted and computes something else, or raised what is no refusal.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._draw = path, random.Random(f"{path.name} {seed}")
        self._whole, self._frames = path.read_bytes(), frames_of(path)
        self._copy = path.with_name(f"damaged-{path.name}")
        self._wanted = answer(rl.load(path))
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def one(self) -> None:
        """Damage a copy, half of the time what holds it together, and load it."""
        draw, content = self._draw, bytearray(self._whole)
        place = draw.choice(self._frames) if draw.random() < 0.5 else draw.randrange(len(content))
        damage = draw.choice(DAMAGES)
        damage(content, place, draw)
        if content == self._whole:
            self.counts["unchanged"] += 1
        else:
            self._load(content, f"{damage.__name__} at {place}")

    def misplaced(self) -> None:
        """Load copies of which a member is said to begin elsewhere: each bit of each place, flipped."""
        for place in offsets_of(self._path):
            for bit in range(8):
                content = bytearray(self._whole)
                content[place] ^= 1 << bit
                self._load(content, f"bit {bit} at {place}")

    def _load(self, content: bytearray, damage: str) -> None:
        self._copy.write_bytes(content)
        outcome = self._outcome()
        self.counts[outcome] += 1
        if outcome not in ("refused", "unharmed"):
            self.wrong.append(f"{self._path.name}, {damage}: {outcome}")

    def _outcome(self) -> str:
        try:
            got = answer(rl.load(self._copy))
        except PackageError:
            return "refused"
        except Exception as error:  # noqa: BLE001 - whatever else it is, it is the finding
            return f"raises {type(error).__name__}: {error}"
        is_same = len(got) == len(self._wanted) and all(
            a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, self._wanted, strict=True)
        )
        return "unharmed" if is_same else "another result"


def main() -> int:
    """Load as many damaged files as asked."""
    given = [int(word) for word in sys.argv[1:]]
    files, seed = [*given, *(10_000, 0)[len(given) :]]
    faulthandler.enable()
    torch.set_num_threads(1)
    process, begun_s = psutil.Process(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        packages = [Damaged(save(Path(folder)), seed) for save in (save_callable, save_step)]
        before = process.memory_info().rss
        for number in range(1, files + 1):
            packages[number % 2].one()
            if number % 1000 == 0 or number == files:
                counts = packages[0].counts + packages[1].counts
                now = process.memory_info().rss
                sys.stdout.write(
                    f"{number} damaged files: {dict(counts)}; {before >> 20} MiB at first, {now >> 20} MiB, "
                    f"{time.monotonic() - begun_s:.0f} s\n"
                )
                sys.stdout.flush()
    wrong = [*packages[0].wrong, *packages[1].wrong]
    sys.stdout.writelines(f"WRONG: {one}\n" for one in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
