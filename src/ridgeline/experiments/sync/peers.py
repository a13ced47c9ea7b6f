"""What torch offers: DistributedDataParallel, plain and with each of its hooks that send less."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ridgeline.experiments.plain_step import PlainStep
from ridgeline.experiments.sync.training import Step, Training

LOCAL_STEPS = 4
"""Of `post_localSGD` between two means of the parameters."""
FIRST_STEPS = 2
"""In which powerSGD and post_localSGD send all gradients: the least that torch takes with error feedback."""
RANK = 4
ONE_BUCKET_MB = 1 << 16
"""More than any model has."""


def ddp_step(training: Training, model: nn.Module) -> Step:
    """As everybody writes it."""
    return _step(training, model, _wrapped(training, model))


def fp16_step(training: Training, model: nn.Module) -> Step:
    """Gradients are sent as fp16."""
    ddp = _wrapped(training, model)
    ddp.register_comm_hook(training.world.group(), default_hooks.fp16_compress_hook)
    return _step(training, model, ddp)


def power_sgd_step(training: Training, model: nn.Module) -> Step:
    """Gradients are sent as two factors of rank 4, with error feedback and warm start.

    Over gloo all in one bucket: the hook starts the second collective of a bucket when its first ends, so
    that with several the order differs between workers, and gloo aborts the process.
    """
    is_gloo = training.world.kind == "cpu"
    ddp = _wrapped(training, model, bucket_cap_mb=ONE_BUCKET_MB if is_gloo else None)
    state = power.PowerSGDState(
        training.world.group(), matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_STEPS
    )
    ddp.register_comm_hook(state, power.powerSGD_hook)
    return _step(training, model, ddp)


def local_sgd_step(training: Training, model: nn.Module) -> Step:
    """Workers train by themselves, and take the mean of their parameters every few steps."""
    # Imported here alone: it compiles much, and warns of its ways.
    from torch.distributed.optim import PostLocalSGDOptimizer

    group = training.world.group()
    # The hook takes the mean over this group in every step, which of one worker is nothing.
    own, _ = dist.new_subgroups(group_size=1, group=group)
    ddp = _wrapped(training, model)
    state = post_localSGD_hook.PostLocalSGDState(group, own, start_localSGD_iter=FIRST_STEPS)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(LOCAL_STEPS, warmup_steps=FIRST_STEPS, process_group=group)
    return _step(training, model, ddp, PostLocalSGDOptimizer(training.optimizer(model), averager))


def _wrapped(
    training: Training, model: nn.Module, bucket_cap_mb: int | None = None
) -> DistributedDataParallel:
    group = training.world.group()
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_cap_mb)


def _step(
    training: Training, model: nn.Module, ddp: DistributedDataParallel, optimizer: Any = None
) -> Step:
    return PlainStep(model, ddp, training.loss_fn, optimizer or training.optimizer(model))


Peer = Callable[[Training, nn.Module], Step]
PEERS: dict[str, tuple[Peer, int]] = {
    "DDP": (ddp_step, 1),
    "DDP, fp16_compress_hook": (fp16_step, 1),
    f"DDP, powerSGD_hook, rank {RANK}": (power_sgd_step, 1),
    f"DDP, post_localSGD_hook, {LOCAL_STEPS} steps": (local_sgd_step, LOCAL_STEPS),
}
"""Name to what makes its step, and the steps after which its costs recur; the first is what all are compared
with."""
QUICK_PEERS = ("DDP", f"DDP, powerSGD_hook, rank {RANK}")
"""What everybody has, and what sends least in every step."""
