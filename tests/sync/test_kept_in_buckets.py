"""Who keeps gradients that lie in buckets: a script, whom they are left to, or a graph, which writes them."""

import pytest
import torch
from torch import nn

from ridgeline.errors import WorkloadError
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.buckets.kept_in_buckets import KeptInBuckets


def made() -> tuple[list[nn.Parameter], Bucket]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 5)]
    return parameters, Bucket(0, [("a", parameters[0]), ("b", parameters[1])])


def step(parameters: list[nn.Parameter], bucket: Bucket, kept: KeptInBuckets) -> bool:
    """Gradients are cleared and come again; whether somebody had kept one."""
    for parameter in parameters:
        parameter.grad = None
    found = kept.are_any()
    for position in range(len(parameters)):
        bucket.show(position)
    kept.leave_to_graph()
    return found


def captured(monkeypatch: pytest.MonkeyPatch, *, is_so: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_so)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_so)


@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_of_a_graph_are_kept_by_nobody(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps beside its replays may write them; those that a script keeps are found all the same."""
    parameters, bucket = made()
    kept = KeptInBuckets([bucket], is_shared=is_shared)
    assert not step(parameters, bucket, kept)
    captured(monkeypatch, is_so=True)
    assert not step(parameters, bucket, kept)
    of_graph = [parameter.grad for parameter in parameters]
    captured(monkeypatch, is_so=False)
    assert not step(parameters, bucket, kept)
    for index, parameter in enumerate(parameters):
        parameter.grad = of_graph[index]  # as behind a replay
    assert not kept.are_any()
    assert not step(parameters, bucket, kept)
    own = parameters[1].grad
    for gradients in (of_graph, []):
        if is_shared:
            with pytest.raises(WorkloadError, match=r"keep p\.grad\.clone"):
                step(parameters, bucket, kept)
        else:
            assert step(parameters, bucket, kept), f"beside {len(gradients)} of a graph"
        of_graph.clear()
    del own
    assert not step(parameters, bucket, kept)
