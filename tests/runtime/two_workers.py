"""Worker script: all that tests want of two workers over gloo, in one start.

    torchrun --nproc-per-node 2 two_workers.py OUTPUT

Worker 0 writes the results of `parity_cases.py`, and the messages of `refused_cases.py` and `state_cases.py`,
with a reducer that listens to each gradient, and with one that listens to the last of a bucket only, as it does
on GPUs.
"""

import json
import sys
from functools import partial
from pathlib import Path

from parity_cases import results_of
from refused_cases import messages_of
from state_cases import told_of

from ridgeline.runtime.sync import joining
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.workers.world import World


def main() -> None:
    world = World.join(threads=1, device="cpu")
    found = {}
    for listens in ("each", "last"):
        joining.Reducer = partial(Reducer, listens=listens)  # type: ignore[misc,assignment]
        found[listens] = {
            "results": results_of(world, "eager"),
            "messages": messages_of(world),
            "states": told_of(world),
        }
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
