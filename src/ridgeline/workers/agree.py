"""How the workers of a world agree: small collectives on numbers and bytes, at moments all of them reach.

A world of one answers at once, without a process group. Every call is collective: all workers make it
in the same order; where one fails because a worker did not come, `AbsentWorkerError` says who.
"""

import contextlib
from collections.abc import Iterator
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import AbsentWorkerError
from ridgeline.workers import attendance
from ridgeline.workers.mesh import Axis
from ridgeline.workers.world import World


def sum_over_workers(values: Tensor, world: World, axis: Axis | None = None) -> Tensor:
    """Elementwise sum over the workers, in place and returned.

    The tensor has one shape on all workers. Without an axis, over all that train together.

    Cost: One all-reduce; on CUDA it is only enqueued.
    """
    if world.size > 1:
        with attendance.meeting("a sum over the workers", world):
            dist.all_reduce(values, group=world.group(axis))
    return values


def largest_of_workers(value: float, world: World) -> float:
    """The largest of the workers' numbers, on every worker.

    Cost: One all-reduce; waits for the device.
    """
    if world.size == 1:
        return value
    # Double precision, for whole numbers such as counts of bytes.
    largest = torch.tensor([value], dtype=torch.float64, device=world.device)
    with attendance.meeting("a maximum over the workers", world):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world.group())
        return float(largest)


@contextlib.contextmanager
def failing_together(world: World, otherwise: Exception) -> Iterator[None]:
    """What fails inside on one worker fails on all, before any of them continues to what they do together.

    `otherwise` is raised on workers on which nothing failed.

    Cost: One all-reduce; waits for the device.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again once the others know
        mine = error
    # Also where nothing failed: the others wait in this all-reduce, and a worker that skips it leaves them
    # there.
    if largest_of_workers(float(mine is not None), world):
        raise mine or otherwise


def gather_bytes(data: bytes, world: World, axis: Axis | None = None) -> list[bytes]:
    """What each worker gave, by position, on every worker; lengths may differ.

    Without an axis, of all that train together.

    Raises:
        AbsentWorkerError: another worker did not come, or is in an exchange on another occasion.

    Cost: Two all-gathers; waits for the device.
    """
    if world.size == 1:
        return [data]
    with attendance.meeting("an exchange between all workers", world):
        here = attendance.occasion(world)
        return bytes_of_group(data, world.group(axis), world.device, occasion=here)


def bytes_of_group(
    data: bytes, group: dist.ProcessGroup, device: torch.device, *, occasion: str = ""
) -> list[bytes]:
    """What each worker of a group gave, by position; lengths may differ. `device` is one of the group's.

    Raises:
        AbsentWorkerError: another worker's exchange is on another occasion.

    Cost: Two all-gathers; waits for the device.
    """
    head = torch.tensor([len(data), crc32(occasion.encode())], device=device)
    heads = [torch.empty_like(head) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(heads, head, group=group)
    sizes, codes = zip(*(one.tolist() for one in heads), strict=True)
    if len({*codes}) > 1:
        raise AbsentWorkerError(_apart_text(occasion))
    # Collectives want equal shapes, and none that is empty.
    mine = _to_tensor(data, max(*sizes, 1), device)
    found = [torch.empty_like(mine) for _ in heads]
    dist.all_gather(found, mine, group=group)
    return [_to_bytes(part, size) for part, size in zip(found, sizes, strict=True)]


def gather_tensor(
    tensor: Tensor, what: str, world: World, axis: Axis | None = None
) -> Tensor | None:
    """The tensors of all workers, [workers, ...] by position on the device, on the first one; else None.

    Args:
        tensor: Contiguous on the device, of one shape and type on all workers.
        what: Its name, for messages.
        world: This worker's place.
        axis: Along which; without one, of all that train together.

    Cost: One gathering; waits on a CPU.
    """
    group = world.group(axis)
    is_first = dist.get_rank(group=group) == 0
    whole = tensor.new_empty(dist.get_world_size(group=group), *tensor.shape) if is_first else None
    # Collectives take no empty tensors; all workers know the shape, and leave it out together.
    if tensor.numel():
        # As bytes: the backends do not take one list of dtypes.
        rows = None if whole is None else [row.view(-1).view(torch.uint8) for row in whole]
        with attendance.meeting(f"the gathering of {what}", world):
            dist.gather(tensor.view(-1).view(torch.uint8), rows, group=group, group_dst=0)
    return whole


def _apart_text(here: str) -> str:
    """What is said to workers whose exchanges were taken for one, while each read the other's as its own."""
    return (
        f"wanted all workers in one exchange, that of {here or 'a step with a plan'}, got others in that of "
        "something else; make the same calls in the same order on all workers: plan='auto' and "
        "optimizer_state() on all of them, or on none"
    )


def share_bytes(data: bytes, world: World) -> bytes:
    """The bytes of the first worker, on every worker; what the others give is ignored.

    Cost: Two broadcasts; waits for the device.
    """
    if world.size == 1:
        return data
    length = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    with attendance.meeting(f"a broadcast from rank {world.root()}", world):
        dist.broadcast(length, group=world.group(), group_src=0)
        size = int(length)
        # The length goes first, since the receivers must have a tensor of the sender's size before they can
        # receive.
        content = _to_tensor(data if world.rank == 0 else b"", max(size, 1), world.device)
        dist.broadcast(content, group=world.group(), group_src=0)
    return _to_bytes(content, size)


def share_text(text: str, world: World) -> str:
    """The text of the first worker, on every worker; what the others give is ignored. See `share_bytes`."""
    return share_bytes(text.encode(), world).decode()


def share_tensors(
    tensors: dict[str, Tensor] | None, specs: dict[str, tuple[list[int], str]], world: World
) -> dict[str, Tensor]:
    """The tensors of the first worker, on the CPU of every worker.

    `tensors` are on the first worker's CPU, None elsewhere; `specs` are shape and dtype (as torch prints it,
    without the prefix) by name, on every worker.

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
                data = carrier.reshape(-1).view(torch.uint8)
                dist.broadcast(data, group=world.group(), group_src=0)
        shared[name] = carrier.cpu()
    return shared


def _to_tensor(data: bytes, size: int, device: torch.device) -> Tensor:
    content = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if data:
        # A `bytearray`, since torch warns of memory that cannot be written, which that of `bytes` is.
        content[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.to(device)


def _to_bytes(content: Tensor, size: int) -> bytes:
    return content[:size].cpu().numpy().tobytes()
