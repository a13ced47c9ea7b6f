"""General rates of this machine, measured in this process within seconds: where a profile takes too long.

No operator of the step is issued: a fault there would end the process that is to train.
"""

import msgspec
import torch
import torch.distributed as dist

from ridgeline.machine import Machine, Setting
from ridgeline.probe.findings import Request
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.measure import of_first
from ridgeline.probe.missing import merge, requests
from ridgeline.probe.survey import measure_here

RATES_S = {"cpu": 3.0, "cuda": 3.5}
"""One visit to ceilings and dispatch. Source: measured, an H200 (torch 2.11): 2.5 to 3 s."""
COLLECTIVES_S = 2.0
"""One visit to the collectives of several workers."""
ROOM_BYTES = 4 << 30
"""Free memory of a GPU, so that the largest tensors of a ceiling fit beside the model."""


def seconds_here(machine: Machine, setting: Setting) -> float:
    """About how long `rates_here` takes; 0 where the machine has these rates."""
    found = _lacking(machine, setting)
    if found is None:
        return 0.0
    return RATES_S[setting.device] + COLLECTIVES_S * bool(found.collectives)


def rates_here(
    machine: Machine, setting: Setting, process_group: dist.ProcessGroup | None = None
) -> Machine | None:
    """The machine with the ceilings, dispatch and collectives that it lacks, from one visit each.

    They are not kept in the cache, since a later start with more time visits each three times.

    Args:
        machine: What is known of it; with several workers that of rank 0 is used.
        setting: How the device is shared.
        process_group: Of the workers, all of which call this; None for those of the whole job.

    Returns:
        The same machine on all workers; None where the GPU has no room for the tensors that are timed.

    Cost: Keeps this process busy for about `seconds_here`.
    """
    on_gpu = setting.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    peers = Peers.of(process_group, device)
    # Caches may differ between hosts, but all must measure alike.
    machine = of_first(machine, peers)
    request = _lacking(machine, setting)
    if request is None:
        return machine
    if on_gpu and not peers.agree(torch.cuda.mem_get_info(device)[0] > ROOM_BYTES):
        return None
    machine = of_first(merge(machine, measure_here(request, group=peers.group)), peers)
    if on_gpu:
        torch.cuda.empty_cache()  # the training that follows has tensors of other sizes
    return machine


def _lacking(machine: Machine, setting: Setting) -> Request | None:
    """The request for what the machine lacks of the setting's rates; None for nothing."""
    for request in requests(machine, (setting,), quick=True, workload=None, codecs=False):
        if request.ceilings or request.dispatch or request.collectives:
            return msgspec.structs.replace(request, links=False, visits=1)
    return None
