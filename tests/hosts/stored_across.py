"""Worker script: trains through an asynchronous store whose servers are on the first two of three hosts.

    RANK=0 WORLD_SIZE=3 MASTER_ADDR=... MASTER_PORT=... RIDGELINE_KVSTORE_KEYS=... python stored_across.py DIRECTORY

Started by hand, since a launcher would end what its host is cut off from. After some steps it prints `ready` and waits
for a line; then it trains on and prints `far`, and waits for another; then for the others, and writes what it found.
"""

import json
import logging
import os
import sys
from pathlib import Path

import msgspec
import torch
from torch import nn

import ridgeline as rl
from ridgeline.runtime.kvstore.serving.addressing import addresses

SERVERS, STALENESS = 2, 1
STEPS_BEFORE, STEPS_AFTER = 3, 4
"""More steps than a worker may be ahead: it goes on once the lease of the one that is cut off has ended."""
COUNT = 50_000
"""Elements of a value to which every step adds one: enough to go through memory where worker and server share some."""


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and the class that each belongs to."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(64, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def main() -> None:
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    names, parameters = zip(*model.named_parameters(), strict=True)
    keys = [*names, "count"]
    with rl.kvstore.create("dist_async", staleness=STALENESS, servers=SERVERS) as store:
        store.broadcast(keys, [*parameters, torch.zeros(COUNT)], [*parameters, torch.empty(COUNT)])
        store.set_optimizer("sgd", lr=0.1)
        losses, num_steps = [], 0

        def train(steps: int) -> None:
            nonlocal num_steps
            for _ in range(steps):
                x, y = batch(rank, num_steps)
                loss = nn.functional.cross_entropy(model(x), y)
                gradients = torch.autograd.grad(loss, parameters)
                outs = [*parameters, torch.empty(COUNT)]
                store.pushpull(keys, [*gradients, torch.ones(COUNT)], outs)
                losses.append(loss.item())
                num_steps += 1

        train(STEPS_BEFORE)
        say("ready")
        train(STEPS_AFTER)
        say("far")
        train(STEPS_AFTER)
        store.barrier()
        found = {
            "host": addresses.host_identity(),
            "count": store.pull("count").get()[:: COUNT - 1].tolist(),
            "steps": num_steps,
            "losses": losses,
            "outages": msgspec.to_builtins(store.outages),
            "values": [store.pull(name).get().double().sum().item() for name in names],
        }
        store.barrier()
    (directory / f"{rank}.json").write_text(json.dumps(found))


def say(word: str) -> None:
    """Tell the test, and wait for its answer."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
