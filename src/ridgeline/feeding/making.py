"""`rl.feed`: its arguments are checked here, before anything is loaded."""

from collections.abc import Iterable
from typing import Any

import torch

from ridgeline.errors import PlanError
from ridgeline.feeding.batches import FeedStream
from ridgeline.feeding.channel import Channel, CudaChannel, HostChannel
from ridgeline.feeding.handover import Handover
from ridgeline.feeding.stream import check_depth
from ridgeline.given import checked


@checked(PlanError, but=("loader", "device", "depth"))
def feed(
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    depth: int = 2,
    *,
    fixed_addresses: bool = False,
    handover: Handover | None = None,
) -> FeedStream:
    """The batches of `loader` on `device`, in order, prepared ahead; each `for` over it is a new pass.

    A pass asks the loader for a new iterator, as a `for` over a DataLoader does, and ends the pass before. A
    generator (what is its own iterator, always) gives one: after a `break` the next `for` continues with it.

    A batch is ready for work on the stream that is current where it is asked for, and its memory is
    used again only after what that stream had been given when a later batch was asked for; work on
    other streams must have been joined to it by then.

    Args:
        loader: Any iterable of nests of tensors, such as a DataLoader. Another thread iterates it: random
            numbers drawn there (none in worker processes) come in no fixed order, unless `depth=0`. The CPU
            has none ahead where two of the first `depth + 1`, which are not ahead, share memory or a list.
        device: Where the batches go; None takes the current GPU, or the CPU where there is none.
        depth: Batches prepared ahead, lost when the feed is closed; 0 does all in the caller's thread.
        fixed_addresses: Use `depth` buffers in turn, in every pass the same, of which the caller has one (a
            smaller batch is a view; a larger one than any before moves the buffer). A batch is then valid
            until the next one is asked for. Otherwise a batch is valid as long as it, or a view of it, is
            referenced; a buffer that is still held when its turn comes is left to its holder and replaced.
        handover: On the CPU, finds out whether the loading thread pays, and does without where it does not;
            for loaders that any thread may iterate. Feeds that follow each other share it. None: always
            a thread, but for lists and tuples, whose batches are there already.

    Returns:
        An iterable with `close()` and `report()`, and a context manager. `next` of it takes from the present
        pass. On the CPU the batches are those of the loader, not copies, unless addresses are fixed.
        Tensors on other devices, sparse ones, subclasses and those that require gradients are copied when
        handed over. So are objects that hold tensors moved to a GPU; see `ridgeline.tensors.moving`.

    Raises:
        PlanError: `loader` cannot be iterated; `depth` is no whole number, negative, above 65536, or 0 with
            fixed addresses; the device is neither CPU nor CUDA, or torch cannot use it; in the iteration, the
            feed is closed, its loader gives no further pass, or another pass has begun since.
        Exception: in the iteration, whatever the loader raises, unchanged, at its batch.

    Cost: `depth + 2` batches of pinned memory and of device memory during a pass; with fixed addresses
        `depth`, until the feed is closed or dropped. Waits on the host only when no batch is ready.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise PlanError(
            f"wanted an iterable of batches, got {type(loader).__name__} in feed(...); pass a DataLoader or "
            "a generator"
        )
    why = " with fixed_addresses=True" if fixed_addresses else ""
    check_depth(depth, int(fixed_addresses), "feed(...); 2 serves most loaders", why)
    place = _place(device)
    channel: Channel | None = None
    if place.type == "cuda":
        channel = CudaChannel(place, inward=True)
    elif fixed_addresses:
        channel = HostChannel()
    if channel is not None:
        handover = None
    elif type(loader) in (list, tuple):
        depth = 0
    return FeedStream(
        loader, place, depth, channel, fixed_addresses=fixed_addresses, handover=handover
    )


def _place(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:  # no such name, no name at all
        raise PlanError(
            f"wanted a CPU or CUDA device, got {device!r} in feed(...); name it 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"wanted a CUDA device that torch can use for feed(...), got {place} without one; feed to 'cpu', "
            "or install a build of torch for this GPU"
        )
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if place.type not in ("cpu", "cuda"):
        raise PlanError(
            f"wanted a CPU or CUDA device, got {place} in feed(...); this release copies to no other"
        )
    return place
