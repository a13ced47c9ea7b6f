"""How a worker leaves its process group: captured graphs first, and without waiting for peers that are gone.

NCCL ends a communicator only once no CUDA graph holds its collectives any more, and waits for that for ever.
So graphs are given up before: when the group is destroyed, by any code, and when the interpreter ends.
After a failure the group is aborted, since destroying it waits for workers that may never come.
"""

import atexit
import contextlib
import faulthandler
import functools
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

IDLE_S = 5.0
"""How long a failing worker waits for its device: finished steps count, but lost peers hold none up."""
GATHER_S = 10.0
"""How long the first worker at its end waits for the others, so that none loses what is still on its way."""
ABORT_S = 20
"""How long an abort may take. Aborts of sound groups take less than a second."""
_POLL_S = 0.002


class Closable(Protocol):
    """What holds resources of the process group."""

    def close(self, *, wait: bool = True) -> None:
        """Release them; safe to call twice.

        Args:
            wait: For the device before; not where it may wait for a worker that is gone.
        """


_to_close: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_abandoned: list[str] = []
_own_groups: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


class _BeforeDestroying:
    """Stands among the communicators that `destroy_process_group` ends before any process group.

    It serves every name under which a script holds that function, which replacing the function would not.
    """

    def finalize(self) -> None:
        """Called by torch when all groups are about to be destroyed, and by `leave`."""
        if _abandoned or is_failure(sys.exc_info()[1]):
            _end_at_once()
        else:
            _release(wait=True)


_before_destroying = _BeforeDestroying()


def close_before_leaving(resource: Closable) -> None:
    """Have `resource` closed before the group is left or the interpreter ends, unless it is gone by then."""
    _to_close.add(resource)
    if not is_open():
        return
    communicators = dist.distributed_c10d._world.comms  # noqa: SLF001 - torch has no public hook
    if _before_destroying not in communicators:
        communicators.append(_before_destroying)
    _end_with_the_interpreter()


def own() -> None:
    """The present group was made here, so it is left here when the interpreter ends."""
    group = dist.group.WORLD
    assert group is not None
    _own_groups.add(group)
    _end_with_the_interpreter()


def abandon(reason: str) -> None:
    """After a failed capture the device refuses all work: the group will be aborted, not left."""
    _abandoned.append(reason)


def is_open(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there is a process group.

    Without a group, whether there is any; else whether it is one of the present job.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - torch has no public name
    return group is None or group in groups


def job_store() -> dist.Store:
    """The store in which torch has the workers of the job meet, under the prefixes of its names."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public name


def is_failure(error: BaseException | None) -> bool:
    """Whether what is being handled ends a worker that its peers continue counting on."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None


def leave() -> None:
    """Leave the process group, if any; safe to call twice. Aborts it while an error is being handled."""
    if not is_open():
        return
    _before_destroying.finalize()
    if is_open():
        dist.destroy_process_group()


@functools.cache
def _end_with_the_interpreter() -> None:
    # Once, as early as can be: what a script has run at its end later on may need the group, and comes first.
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Give up graphs, and leave a group that was made here.

    Python says what ended the interpreter only of an uncaught exception. A worker that called `sys.exit` may
    have left the others in the middle of a step: whether they end, too, is seen by waiting for them.
    """
    if not is_open():
        return
    if dist.group.WORLD not in _own_groups:
        _idle()
        _release(wait=False)
    elif not _on_nccl():
        leave()
    elif _abandoned or is_failure(getattr(sys, "last_value", None)):
        _end_at_once()
    elif _all_end():
        leave()
    else:  # it may have ended well, ahead of the others: no status of ours may come in between
        _end_at_once(within_s=0)


def _all_end() -> bool:
    """Whether the device of every worker is idle, and every worker at its end."""
    if not _idle():
        return False
    store = job_store()
    end = time.monotonic() + GATHER_S
    try:
        # By counting in the store: a barrier would be a collective on the very communicator that may be
        # stuck.
        num_there = store.add("ridgeline/at its end", 1)
        num_all = dist.get_world_size(group=dist.group.WORLD)
        while num_there < num_all and time.monotonic() < end:
            time.sleep(_POLL_S)
            # Adding 0 reads the count without waiting for the key to exist.
            num_there = store.add("ridgeline/at its end", 0)
    except RuntimeError:  # the worker that keeps the store is gone
        return False
    return num_there >= num_all


def _end_at_once(*, within_s: int = ABORT_S) -> None:
    """Give up graphs without waiting for peers; over NCCL, abort the group, so that nothing waits later.

    An abort that takes longer than `within_s` ends the process with status 1; 0: it takes what it takes.
    """
    _idle()
    if not _on_nccl():
        _release(wait=False)
        return
    with _deadline(within_s) if within_s else contextlib.nullcontext():
        _release(wait=False)
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - there is no public name


@contextlib.contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """End the process with status 1 where the block takes longer, and say where it was.

    An interpreter that ends starts no threads of Python any more; this one is of C.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _release(*, wait: bool) -> None:
    # A copy, since closing one resource may drop others, and a set must not change while it is iterated.
    for resource in list(_to_close):
        # A device that failed says so to everybody who touches it; the rest must be closed all the same.
        with contextlib.suppress(*(() if wait else (RuntimeError,))):
            resource.close(wait=wait)


def _on_nccl() -> bool:
    """Whether NCCL serves the group's tensors on GPUs; a name of a backend can stand for several."""
    group = dist.group.WORLD
    assert group is not None
    try:
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001 - there is no public name
    except RuntimeError:  # none serves GPUs
        return False
    return type(backend).__name__ == "ProcessGroupNCCL"


def _idle() -> bool:
    """Whether the current stream has nothing left to do, at once or within `IDLE_S`."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return True
    end = time.monotonic() + IDLE_S
    try:
        event = torch.cuda.Event()
        # An event is asked instead of synchronising, which nothing could stop once it waits.
        event.record()
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
    except RuntimeError:  # a kernel that failed: nothing comes to its end here any more
        return False
    return True
