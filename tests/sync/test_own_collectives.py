"""A model with collectives of its own is refused where a thread makes those of the step."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ridgeline.errors import WorkloadError
from ridgeline.plan import Sync
from ridgeline.runtime.sync.buckets.own_collectives import OwnCollectives


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this worker alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = dist.group.WORLD
    assert made is not None
    yield made
    dist.destroy_process_group()


def test_collectives_of_the_first_forward_pass_are_counted(group: dist.ProcessGroup) -> None:
    """Those before and behind it are the step's."""
    dist.all_reduce(torch.ones(1))
    own = OwnCollectives(group, Sync(compression="fp16"), is_watched=True)
    dist.all_reduce(torch.ones(1))
    own.check()  # no forward pass has begun
    own.begin()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    with pytest.raises(WorkloadError) as caught:
        own.check()
    assert str(caught.value) == (
        "wanted a model without collectives of its own for sync algorithm 'all_reduce' with compression "
        "'fp16' on CPUs, where a thread exchanges the gradients, got 2 in its forward pass (batch statistics "
        "or features of all workers), which would wait for each other without end; use sync=rl.Sync()"
    )


@pytest.mark.parametrize("is_watched", [False, True])
def test_others_are_not_asked_again(group: dist.ProcessGroup, is_watched: bool) -> None:
    """Nor those whose collectives go out in the thread that goes backward."""
    own = OwnCollectives(group, Sync(algorithm="ring"), is_watched=is_watched)
    own.begin()
    if not is_watched:
        dist.all_reduce(torch.ones(1))
    own.check()
    own.begin()
    dist.all_reduce(torch.ones(1))
    own.check()
