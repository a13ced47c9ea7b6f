"""Scripts of two workers that end in every way a user's script can; `test_leaving.py` reads what they left.

Each script runs in two processes forked from this one, which has imported everything. What a worker does is
appended to `<folder>/<script>.<rank>`; how all ended is written to `<folder>/ends.json`.
"""

# This import is part of a case: the function that a script holds from before Ridgeline was imported.
# ruff: isort: off
from torch.distributed import destroy_process_group as destroy_imported_before

# ruff: isort: on
import atexit
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graph_stand_ins import Captured, install
from torch import Tensor, nn

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps import step as step_module
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS, GraphRunner
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World

STEPS = EAGER_STEPS + 2
HANG_S = 60
"""A script that takes longer is killed, which its status tells."""


class Log(list[str]):
    """What a worker does, in a file at once: nothing that runs at the end may be lost."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def trained(steps: int = STEPS) -> PlannedStep:
    """A step after its capture."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = PlannedStep(model, loss_fn, optimizer, Plan(workers=2), device="cpu")
    for _ in range(steps):
        step(torch.ones(2, 3))
    return step


def destroys() -> None:
    step = trained()
    dist.destroy_process_group()
    try:
        step(torch.ones(2, 3))
    except Exception as error:  # noqa: BLE001 - whatever it is is compared
        Captured.log.append(f"{type(error).__name__}: {error}")
    step.close()


def destroys_by_the_function_imported_before() -> None:
    step = trained()
    destroy_imported_before()
    assert step.num_steps == STEPS


def just_ends() -> None:
    globals()["kept"] = trained()


def just_ends_in_a_group_of_its_own() -> None:
    dist.init_process_group("gloo")
    globals()["kept"] = trained()


def destroys_at_exit() -> None:
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    globals()["kept"] = trained()


def raises_in_one() -> None:
    step = trained()
    if dist.get_rank() == 1:
        raise ValueError("of no matter")
    step(torch.ones(2, 3))


def raises_in_backward() -> None:
    """What has left already waits for the other, which comes to it never."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(workers=2, sync=Sync(bucket_bytes=(4,)))
    step = PlannedStep(model, loss_fn, optimizer, plan, device="cpu")
    step(torch.ones(2, 3))  # they meet before the first
    lives = Captured.log.path.with_suffix(".lives")  # type: ignore[attr-defined]
    with contextlib.suppress(FileExistsError):
        os.mkfifo(lives)
    if dist.get_rank() == 0:
        lives.read_text()  # until the process of the other has ended
    else:
        os.open(lives, os.O_WRONLY)
        model[0].weight.register_hook(lambda gradient: gradient.view(-2))
        step(torch.ones(2, 3))


def raises_in_one_and_destroys() -> None:
    try:
        raises_in_one()
    finally:
        dist.destroy_process_group()


def exits_in_one() -> None:
    globals()["kept"] = step = trained()
    if dist.get_rank() == 1:
        sys.exit(3)
    step(torch.ones(2, 3))


def interrupted_in_one() -> None:
    step = trained()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)
    step(torch.ones(2, 3))


def interrupted_without_a_step() -> None:
    """What the other is compared with: where a library runs Python at exit, this status is not the signal's."""
    os.kill(os.getpid(), signal.SIGINT)


def destroys_and_joins_again() -> None:
    first = trained()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]  # a store has room for one group
    second = trained()
    dist.destroy_process_group()
    del first, second


def destroys_a_part() -> None:
    step = trained()
    part = dist.new_group([0, 1])
    dist.barrier()  # one that still connects would find the other gone
    dist.destroy_process_group(part)
    step(torch.ones(2, 3))
    World.leave()


SCRIPTS: tuple[Callable[[], None], ...] = (
    destroys,
    destroys_by_the_function_imported_before,
    just_ends,
    just_ends_in_a_group_of_its_own,
    destroys_at_exit,
    raises_in_one,
    raises_in_backward,
    raises_in_one_and_destroys,
    exits_in_one,
    interrupted_in_one,
    interrupted_without_a_step,
    destroys_and_joins_again,
    destroys_a_part,
)


def watch(log: Log) -> None:
    """Put stand-ins in place of graphs, and have the end of a group told."""
    install(setattr, log)

    step_module.make_runner = GraphRunner  # type: ignore[assignment]
    shut_down = dist.ProcessGroup.shutdown

    def told(self: dist.ProcessGroup) -> None:
        log.append("group ends")
        shut_down(self)

    dist.ProcessGroup.shutdown = told  # type: ignore[method-assign]


def fork(script: Callable[[], None], rank: int, folder: Path, ports: list[int]) -> int:
    """Run a script as worker `rank`, with the end that the interpreter gives it."""
    child = os.fork()
    if child:
        return child
    signal.alarm(HANG_S)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    os.environ |= {"OTHER_PORT": str(ports[1])}
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True"
    }  # as torchrun has it: no worker keeps the store
    watch(Log(folder / f"{script.__name__}.{rank}"))
    script()
    sys.exit()


def serve_stores(num: int) -> tuple[int, list[int]]:
    """A process that keeps stores, one for each group: its number, and the ports."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        return child, json.loads(os.read(read, 1 << 16))
    stores = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(num)]
    os.write(write, json.dumps([store.port for store in stores]).encode())
    signal.pause()
    os._exit(0)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is garbage of none of them
    keeper, ports = serve_stores(2 * len(SCRIPTS))
    ends = {}
    for index, script in enumerate(SCRIPTS):
        pair = ports[2 * index : 2 * index + 2]
        workers = [fork(script, rank, folder, pair) for rank in range(2)]
        ends[script.__name__] = [
            os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in workers
        ]
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    (folder / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
