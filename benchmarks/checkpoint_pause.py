"""How long training stands still for a checkpoint: three ways to save the same state, interleaved.

    python benchmarks/checkpoint_pause.py [--device cuda] [--layers 25] [--turns 9] [--output FILE]

The state is that of a model of 25 layers of 1024 x 1024 in float32 (100 MiB) and of Adam (200 MiB).
`in the loop` waits until the checkpoint is on the disk. `fresh copies` writes beside training, from memory
that each save allocates, and one file for all tensors of a folder. `kept memory` is what `ridgeline train`
does: copies into memory that the next save takes again (pinned, of a GPU's state), and files of 16 MiB.

`stopped_ms` is until training may go on. Behind that this thread does nothing but run Python while the
checkpoint is written: `held_ms` is the longest time for which it could not. Every checkpoint is read back and
compared with the state. Figures are medians over turns with quartiles; the first turn, which makes memory, is
not counted.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.engine import Engine
from ridgeline.experiments.result_files import (
    file_name,
    now,
    parser_of,
    quartiles,
    this_hardware,
)
from ridgeline.runtime.checkpoints import checkpoint, tensor_files
from ridgeline.runtime.checkpoints.staging import Staging
from ridgeline.runtime.checkpoints.state_tree import flatten
from ridgeline.runtime.training.saver import MODEL, Saver

RESULTS = Path(__file__).parent / "results"
WAYS = ("in the loop", "fresh copies", "kept memory")
ONE_FILE = 1 << 60
SIDE = 1024


class FreshCopies(Staging):
    """Copies into memory that each save allocates."""

    def copies(self, tensors: Any) -> dict[str, Tensor]:
        """One copy after the other, contiguous."""
        return {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def main() -> int:
    """Save the state in turns, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--layers", type=int, default=25, help="4 MiB each; Adam's state is twice as large"
    )
    parser.add_argument("--turns", type=int, default=9, help="saves of each way that are counted")
    parser.add_argument("--output", type=output_file, help="default: below benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, training, state = state_of(arguments.layers, arguments.device)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        savers = {way: stack.enter_context(saver(way)) for way in WAYS}
        for turn in range(arguments.turns + 1):
            for way in WAYS:
                change(model)
                reading = saved(savers[way], way, turn, model, training, state)
                if turn:  # the first one makes what later ones find
                    found[way].append(reading)
    rows = [{"way": way, **summary(readings)} for way, readings in found.items()]
    for row in rows:
        print(
            f"{row['way']:14} stopped {row['stopped_ms']['median']:8.1f} ms   held "
            f"{row['held_ms']['median']:7.1f} ms   written after {row['written_ms']['median']:8.1f} ms"
        )
    num_bytes = sum(t.nbytes for t in (*model.values(), *training.values()))
    result = {
        "date": now(),
        "device": this_hardware(arguments.device),
        "torch": str(torch.__version__),
        "state_bytes": num_bytes,
        "file_bytes": tensor_files.FILE_BYTES,
        "rows": rows,
    }
    name = file_name("checkpoint_pause", this_hardware(arguments.device))
    (arguments.output or RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def state_of(layers: int, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Tensors of a model and of Adam behind a step, as they are, and the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(layers))).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, SIDE, device=device)).square().mean().backward()
    optimizer.step()
    training: dict[str, Tensor] = {}
    state = {"optimizer": flatten(optimizer.state_dict(), "optimizer", training)}
    return dict(model.state_dict()), training, state


def change(model: dict[str, Tensor]) -> None:
    """Have the next checkpoint be another one."""
    for tensor in model.values():
        tensor.add_(1.0)


@contextlib.contextmanager
def saver(way: str) -> Iterator[Saver]:
    """Writes into a directory of its own."""
    staging = FreshCopies() if way == "fresh copies" else Staging()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(staging), Engine() as engine:
        yield Saver(Path(folder), engine, staging, keep=1)


def saved(
    saver: Saver,
    way: str,
    step: int,
    model: dict[str, Tensor],
    training: dict[str, Tensor],
    state: Any,
) -> dict[str, float]:
    """Milliseconds of one save."""
    file_bytes = ONE_FILE if way == "fresh copies" else tensor_files.FILE_BYTES
    before = saver.last
    begin = time.perf_counter()
    with mock.patch.object(tensor_files, "FILE_BYTES", file_bytes):
        saver.save(
            checkpoint.Position(epoch=0, step_in_epoch=step, step=step),
            workers=1,
            tensors={f"{MODEL}{name}": t for name, t in model.items()} | training,
            gathered={},
            state=state,
        )
        if way == "in the loop":
            saver.finish()
        stopped = time.perf_counter()
        longest_s = longest_gap_s(lambda: saver.failure is None and saver.last in (None, before))
        saver.finish()
    written = time.perf_counter()
    assert saver.last is not None
    _, held, _, _ = checkpoint.read(saver.last)
    assert all(torch.equal(held[name], tensor.cpu()) for name, tensor in model.items())
    return {
        "stopped_ms": (stopped - begin) * 1e3,
        "held_ms": longest_s * 1e3,
        "written_ms": (written - begin) * 1e3,
    }


def longest_gap_s(goes_on: Callable[[], bool]) -> float:
    """The longest time between two looks at the clock, in seconds."""
    longest, last = 0.0, time.perf_counter()
    while goes_on():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def summary(readings: list[dict[str, float]]) -> dict[str, Any]:
    """Median and quartiles of each figure."""
    return {name: quartiles([reading[name] for reading in readings]) for name in readings[0]}


if __name__ == "__main__":
    sys.exit(main())
