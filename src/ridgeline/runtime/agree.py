"""How the workers agree: small collectives on numbers and bytes, at moments all of them reach.

A world of one answers at once, without a process group. Every call is collective: all workers make it
in the same order; where one fails because a worker did not come, `AbsentWorkerError` says who.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.runtime import attendance
from ridgeline.runtime.world import World


def sum_over_workers(values: Tensor, world: World) -> Tensor:
    """Elementwise sum over the workers, in place and returned.

    Args:
        values: A tensor on the worker's device, of one shape on all workers.
        world: This worker's place.

    Cost: One all-reduce; on CUDA it is only enqueued.
    """
    if world.size > 1:
        with attendance.meeting("a sum over the workers", world):
            dist.all_reduce(values)
    return values


def largest_of_workers(value: float, world: World) -> float:
    """The largest of the workers' numbers, on every worker.

    Cost: One all-reduce; waits for the device.
    """
    if world.size == 1:
        return value
    largest = torch.tensor([value], dtype=torch.float64, device=world.device)
    with attendance.meeting("a maximum over the workers", world):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)


def gather_bytes(data: bytes, world: World) -> list[bytes]:
    """What each worker gave, by rank, on every worker; lengths may differ.

    Cost: Two all-gathers; waits for the device.
    """
    if world.size == 1:
        return [data]
    length = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    lengths = [torch.empty_like(length) for _ in range(world.size)]
    with attendance.meeting("an exchange between all workers", world):
        dist.all_gather(lengths, length)
        sizes = [int(size) for size in lengths]
        longest = max(*sizes, 1)
        mine = _to_tensor(data, longest, world.device)
        gathered = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(gathered, mine)
    return [_to_bytes(part, size) for part, size in zip(gathered, sizes, strict=True)]


def share_bytes(data: bytes, world: World) -> bytes:
    """The bytes of rank 0, on every worker; what the others give is ignored.

    Cost: Two broadcasts; waits for the device.
    """
    if world.size == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    with attendance.meeting("a broadcast from rank 0", world):
        dist.broadcast(length, 0)
        size = int(length)
        content = _to_tensor(data if world.rank == 0 else b"", max(size, 1), world.device)
        dist.broadcast(content, 0)
    return _to_bytes(content, size)


def share_text(text: str, world: World) -> str:
    """The text of rank 0, on every worker; what the others give is ignored. See `share_bytes`."""
    return share_bytes(text.encode(), world).decode()


def share_tensors(
    tensors: dict[str, Tensor] | None, specs: dict[str, tuple[list[int], str]], world: World
) -> dict[str, Tensor]:
    """The tensors of rank 0, on the CPU of every worker.

    Args:
        tensors: On rank 0, CPU tensors by name; None elsewhere.
        specs: Shape and dtype (as torch prints it, without the prefix) by name, on every worker.
        world: This worker's place.

    Cost: One broadcast a tensor, through the worker's device.
    """
    if world.size == 1:
        return tensors or {}
    shared = {}
    for name, (shape, dtype) in specs.items():
        if tensors is not None:
            carrier = tensors[name].to(world.device).contiguous()
        else:
            carrier = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        if carrier.numel():
            # As bytes: the backends do not reduce to one list of dtypes, and none is changed here.
            with attendance.meeting(f"the broadcast of {name}", world):
                dist.broadcast(carrier.reshape(-1).view(torch.uint8), 0)
        shared[name] = carrier.cpu()
    return shared


def _to_tensor(data: bytes, size: int, device: torch.device) -> Tensor:
    content = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if data:
        content[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.to(device)


def _to_bytes(content: Tensor, size: int) -> bytes:
    return content[:size].cpu().numpy().tobytes()
