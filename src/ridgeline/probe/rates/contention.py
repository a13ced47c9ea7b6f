"""How much families of operators and transfers slow each other: collectives, and copies of a GPU.

`overlap` has what predictions need of all-reduces beside a usual mix; this separates families, in both
directions.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch.nn import functional

from ridgeline.errors import MachineError
from ridgeline.host.memory import keep_freed_memory
from ridgeline.host.message_threads import calm_message_threads
from ridgeline.machine import Machine, Setting
from ridgeline.machine.contention import ComputeFamily, Contention, TransferKind
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.fields import forgotten, measured_apart, warned
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.rates.overlap import (
    MESSAGE_BYTES,
    Compute,
    OverlapRound,
    Transfer,
    beside_all_reduces,
    beside_on_stream,
    computing_slowdowns,
    product,
    rounds_of,
    transfer_slowdowns,
)
from ridgeline.workers.host_threads import set_threads

COPY_BYTES = 16 << 20
"""Of a copy between host and GPU: about 0.3 ms over PCIe 5, a hundred times what its launch takes."""
CPU_SIDE, GPU_SIDE = 256, 4096
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 22, 1 << 24
"""Of each tensor of a sum: 16 MiB, and 64 MiB, three of which are beyond most caches."""
ROUNDS = 7
PREFIX = "contention was not measured at "


class FamilyCall(NamedTuple):
    """Operators of one family: what they are, in words, and the call."""

    family: ComputeFamily
    call: str
    compute: Compute


class TransferRound(NamedTuple):
    """One kind of transfer of `num_bytes`, and a round of computing beside it."""

    transfer: TransferKind
    num_bytes: int
    together: Callable[[Compute], OverlapRound]


def with_contention(
    machine: Machine, keep: Callable[[Machine], Machine], say: Callable[[str], None]
) -> Machine:
    """The profile with what it lacks of `Machine.contention`, kept after each setting.

    Settings are those whose collectives are known and, with a GPU, one of it, where copies from and to the
    host are measured. A host with neither is left as it is.

    Arguments as of `fields.with_fields`.

    Cost: all workers of a setting for about 10 s. Where they fail a warning says so, and the rest goes on.
    """
    machine = forgotten(machine, PREFIX)
    missing = settings_without(machine)
    for number, setting in enumerate(missing, 1):
        say(f"contention: {setting} ({number} of {len(missing)})")
        try:
            reply = measured_apart(f"{__name__}:in_worker", msgspec.json.encode(setting), setting)
        except MachineError as error:
            machine = warned(machine, f"{PREFIX}{setting}: {error}")
            continue
        found = msgspec.json.decode(reply, type=tuple[Contention, ...])
        machine = keep(msgspec.structs.replace(machine, contention=machine.contention + found))
    return machine


def settings_without(machine: Machine) -> tuple[Setting, ...]:
    """The settings at which nothing is known of what runs beside computing there; fewest workers first."""
    wanted = dict.fromkeys(entry.setting for entry in machine.collectives)
    if machine.device_kind == "cuda":
        wanted[Setting(device="cuda")] = None
    known = {entry.setting for entry in machine.contention}
    return tuple(sorted(wanted.keys() - known, key=lambda s: (s.device, s.workers, s.threads)))


def in_worker(request: bytes) -> bytes:
    """Target of `run_in_group`: what contends at a setting, as JSON."""
    setting = msgspec.json.decode(request, type=Setting)
    if setting.device == "cpu":
        keep_freed_memory()  # as a step does
        calm_message_threads()
        set_threads(setting.threads)
    device = torch.device("cuda", torch.cuda.current_device()) if setting.device == "cuda" else None
    peers = Peers.of(None, device or torch.device("cpu"))
    return msgspec.json.encode(measure_contention(setting, peers))


def measure_contention(setting: Setting, peers: Peers) -> tuple[Contention, ...]:
    """Every family of operators beside every kind of transfer that the setting has; all peers call this.

    Several workers reduce messages of 4 MiB; a GPU alone copies 16 MiB from pinned memory, and back. Both
    sides run all the time, so a slowdown is what a long overlap costs. See `measure_overlap`.

    Cost: about 3 s for each pair.
    """
    # Once for all transfers: their tensors are large.
    calls = tuple(family_calls(peers.device))
    return tuple(
        _contention(setting, call, beside, peers) for beside in _transfers(peers) for call in calls
    )


def family_calls(device: torch.device) -> Iterator[FamilyCall]:
    """One call for each family: on a CPU about a millisecond, on a GPU a kernel that fills it."""
    if device.type == "cpu":
        a = torch.rand(CPU_SIDE, CPU_SIDE, device=device)
        yield FamilyCall("matmul", f"mm of {CPU_SIDE} x {CPU_SIDE}", partial(torch.mm, a, a))
        conv = "conv2d of 4 x 32 x 28 x 28"
        yield FamilyCall("convolution", conv, _convolution(device, 4, 32, 28))
        yield _sum_of(CPU_ELEMENTS, device)
    else:
        mm = f"mm of {GPU_SIDE} x {GPU_SIDE} in float16"
        yield FamilyCall("matmul", mm, product(GPU_SIDE, device))
        conv = "conv2d of 32 x 64 x 56 x 56 in float16"
        yield FamilyCall("convolution", conv, _convolution(device, 32, 64, 56))
        yield _sum_of(GPU_ELEMENTS, device)


def _sum_of(count: int, device: torch.device) -> FamilyCall:
    """Reads two tensors and writes a third that is there already."""
    a = torch.ones(count, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    size = f"{a.nbytes >> 20} MiB"
    return FamilyCall("elementwise", f"add of {size} in float32", lambda: torch.add(a, b, out=out))


def _convolution(device: torch.device, samples: int, channels: int, side: int) -> Compute:
    """3 x 3 of equal channels; on a GPU in half precision and channels last, as it is trained there."""
    x = torch.rand(samples, channels, side, side, device=device)
    weight = torch.rand(channels, channels, 3, 3, device=device)
    if device.type == "cuda":
        x, weight = (
            t.to(dtype=torch.float16, memory_format=torch.channels_last) for t in (x, weight)
        )
    return lambda: functional.conv2d(x, weight, padding=1)


def _transfers(peers: Peers) -> tuple[TransferRound, ...]:
    """What runs beside computing here."""
    if peers.size > 1:
        message = torch.zeros(MESSAGE_BYTES // 4, device=peers.device)

        def reduced(compute: Compute) -> OverlapRound:
            return beside_all_reduces(compute, message, peers)

        return (TransferRound("collective", MESSAGE_BYTES, reduced),)
    if peers.device.type == "cpu":
        return ()
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=peers.device)
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copied(transfer: Transfer) -> Callable[[Compute], OverlapRound]:
        return lambda compute: beside_on_stream(compute, transfer, peers)

    to_device = copied(lambda: there.copy_(here, non_blocking=True))
    to_host = copied(lambda: here.copy_(there, non_blocking=True))
    return (
        TransferRound("host_to_device", COPY_BYTES, to_device),
        TransferRound("device_to_host", COPY_BYTES, to_host),
    )


def _contention(
    setting: Setting, call: FamilyCall, beside: TransferRound, peers: Peers
) -> Contention:
    found = rounds_of(lambda: beside.together(call.compute), ROUNDS)
    return Contention(
        setting=setting,
        family=call.family,
        call=call.call,
        transfer=beside.transfer,
        message_bytes=beside.num_bytes,
        compute_slowdown=Sampled.measured(computing_slowdowns(found, peers), "x"),
        transfer_slowdown=Sampled.measured(transfer_slowdowns(found, peers), "x"),
    )
