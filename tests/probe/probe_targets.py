"""Functions that the tests run in groups of workers."""

import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
import torch.distributed as dist

from ridgeline.machine import Setting
from ridgeline.planner.assumed import with_assumed_rates
from ridgeline.probe.findings import Findings
from ridgeline.probe.groups import peers as peers_module
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.host import fingerprint
from ridgeline.probe.measure import known_machine, measure
from ridgeline.probe.operators.operators import time_operators
from ridgeline.probe.rates import ceilings, codecs, collectives, contention, overlap
from ridgeline.probe.rates_here import rates_here
from ridgeline.probe.visits import combined
from ridgeline.runtime.sync.rehearsal import rehearsal
from ridgeline.synchronisation import ALGORITHMS, COMPRESSIONS, CollectiveTraffic
from ridgeline.workload import Workload


def describe(request: bytes) -> bytes:
    """What a worker sees, gathered from all ranks, beside the request."""
    mine = {
        "rank": dist.get_rank(),
        "environment": {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "pid": os.getpid(),
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return json.dumps({"request": json.loads(request), "workers": everyone}).encode()


def fail_on_rank_1(request: bytes) -> bytes:
    """Rank 1 raises; the others wait for it in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("the batch is odd")
    dist.barrier()
    return b""


def kill_rank_1(request: bytes) -> bytes:
    """Rank 1 is killed; the others wait for it in a collective."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return b""


def leave(request: bytes) -> bytes:
    """Every worker leaves the interpreter without a reply."""
    os._exit(0)


def hang(request: bytes) -> bytes:
    """Rank 0 notes its process and never comes back."""
    _note(request, os.getpid())
    threading.Event().wait()


def hang_in_child(request: bytes) -> bytes:
    """Rank 0 waits for a program that never ends, such as a compiler that hangs, and notes its process."""
    with subprocess.Popen(["sleep", "600"]) as child:
        _note(request, child.pid)
        child.wait()
    return b""


def _note(request: bytes, number: int) -> None:
    """Of a process, in the file that a test reads; whole, or not at all."""
    path = Path(json.loads(request)["pid_file"])
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def small_survey(request: bytes) -> bytes:
    """Collectives of two sizes, overlap, and the operators of the workload in the request."""
    peers = Peers.of(None, torch.device("cpu"))
    setting = Setting(device="cpu", workers=peers.size, threads=1)
    collectives.QUICK_BYTES = (1 << 10, 1 << 20)
    overlap.ROUNDS = 1
    workload = msgspec.json.decode(request, type=Workload)
    timed = time_operators(workload, setting, peers, budget_s=0.1)
    findings = Findings(
        collectives=collectives.measure_collectives(setting, peers, quick=True, seconds=0.1),
        overlaps=overlap.measure_overlap(setting, peers, quick=True),
        timings=timed.timings,
        warnings=tuple(line for line in timed.warnings if "could not be timed" in line),
        checks=(timed.check,),
    )
    return msgspec.json.encode(combined([[findings]]))


SHORT_CONTENTION = "probe_targets:short_contention"


def short_contention(request: bytes) -> bytes:
    """What contends at the setting in the request, of one round each."""
    contention.ROUNDS = 1
    return contention.in_worker(request)


def measure_in_place(request: bytes) -> bytes:
    """What `measure` returns on every rank of a group, what it says, and whether it drew random numbers."""
    content = json.loads(request)
    os.environ["XDG_CACHE_HOME"] = content["cache"]
    codecs.QUICK_SIDES, codecs.ROUNDS, codecs.ROUNDS_BESIDE = (64, 128), 1, 1
    collectives.QUICK_BYTES = (1 << 10, 1 << 20)
    overlap.ROUNDS = 1
    ceilings.QUICK_S = ceilings.SLOW_S = 0.002  # a few points of every curve will do
    lines = []
    torch.manual_seed(dist.get_rank())
    drawn = torch.get_rng_state()
    for hosts in content["hosts"]:
        os.environ["GROUP_WORLD_SIZE"] = str(hosts)
        machine = measure(progress=lines.append)
    text = msgspec.json.encode(machine).decode()
    everyone = [None] * dist.get_world_size()
    has_drawn = not torch.equal(drawn, torch.get_rng_state())
    dist.all_gather_object(everyone, (text, lines, has_drawn))
    for hosts in content["hosts"]:
        assert fingerprint.cache_path(machine.fingerprint, hosts).exists()
    return json.dumps(everyone).encode()


def rates_of_both(cache: bytes) -> bytes:
    """What `rates_here` returns on every rank, the second of which begins with rates that nobody measured."""
    os.environ["XDG_CACHE_HOME"] = cache.decode()
    collectives.QUICK_BYTES, overlap.ROUNDS = (1 << 10, 1 << 20), 1
    ceilings.QUICK_S = ceilings.SLOW_S = 0.002
    setting = Setting(device="cpu", workers=2, threads=1)
    rank = dist.get_rank()
    machine = msgspec.structs.replace(known_machine().machine, fingerprint=f"of {rank}")
    if rank:
        machine = with_assumed_rates(machine, setting, "another host's")
    everyone = [None] * dist.get_world_size()
    found = rates_here(machine, setting)
    dist.all_gather_object(everyone, msgspec.json.encode(found).decode())
    return json.dumps(everyone).encode()


def sharing_survey(request: bytes) -> bytes:
    """Collectives of two sizes where an algorithm is offered that halves the all-reduce."""
    halves = ("reduce_scatter", "all_gather")
    ALGORITHMS["sharded"] = ALGORITHMS["sharded"]._replace(
        traffic=lambda payload, workers: tuple(CollectiveTraffic(name, payload) for name in halves)
    )
    peers = Peers(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    setting = Setting(device="cpu", workers=peers.size, threads=1)
    collectives.QUICK_BYTES = (1 << 10, 1 << 20)
    found = collectives.measure_collectives(setting, peers, quick=True, seconds=0.1)
    return msgspec.json.encode(combined([[Findings(collectives=found)]]))


_moved_s = [0.0]


def moving(
    name: str, shapes: Sequence[tuple[int, ...]], workers: int, device: torch.device
) -> Callable[[], None]:
    """What a worker does for a bucket, which moves the clock by a second for each number in it."""
    work, numbers = rehearsal(name, shapes, workers, device), sum(map(math.prod, shapes))

    def moved() -> None:
        work()
        _moved_s[0] += numbers

    return moved


def codec_survey(request: bytes) -> bytes:
    """Codecs on two small matrices, by a clock that they move, where one of the table cannot be carried out."""
    codecs.REHEARSAL = f"{__name__}:{moving.__name__}"
    codecs.time = SimpleNamespace(perf_counter=lambda: _moved_s[0])  # type: ignore[attr-defined]
    broken = COMPRESSIONS["bf16"]._replace(name="broken", codec="no.such.module:Codec")
    COMPRESSIONS["broken"] = broken
    peers = Peers.of(None, torch.device("cpu"))
    setting = Setting(device="cpu", workers=peers.size, threads=1)
    codecs.QUICK_SIDES, codecs.ROUNDS, codecs.WINDOW_S = (64, 512), 2, 0.005
    codecs.ROUNDS_BESIDE = 1
    found, warnings = codecs.measure_codecs(setting, peers, quick=True)
    return msgspec.json.encode(combined([[Findings(codecs=found, warnings=warnings)]]))


def waiting_for_rank_0(request: bytes) -> bytes:
    """Work of rank 0 that lasts until the other has heard five times that it does; what both come to."""
    store, heard = dist.distributed_c10d._get_default_store(), [0]
    world = dist.group.WORLD
    assert world is not None
    timeout_s = peers_module.timeout_of(world, torch.device("cpu"))
    peers_module.WORDS_A_TIMEOUT = round(50 * timeout_s)  # every 20 ms

    class Hearing(Peers):
        def agree(self, decision: bool) -> bool:
            heard[0] += 1
            if self.rank and heard[0] == 5:
                store.set("heard", "")
            return super().agree(decision)

    peers = Hearing.of(None, torch.device("cpu"))
    come_to = peers.done_by_first(lambda: store.get("heard") == b"")
    return json.dumps(peers.gather([-1.0 if come_to is None else float(come_to)])).encode()
