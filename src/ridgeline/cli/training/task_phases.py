"""The seconds of each phase of a task's own step, found by the workers of a group together."""

from typing import TYPE_CHECKING

from ridgeline.plan import Plan

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task
    from ridgeline.workers.world import World

MOST_S = 60.0
"""For all steps that are made, which were not thought to be long."""


def phases_in_group(task: "Task", world: "World", *, seed: int) -> dict[str, float]:
    """The seconds of each phase, by all workers of a group, which call this together.

    Raises:
        RidgelineError: the step fails, or takes too long.
    """
    from ridgeline.decision.whole_step import phase_seconds
    from ridgeline.runtime.steps.step import PlannedStep, move
    from ridgeline.runtime.training.plan_trial import batches_of
    from ridgeline.state.random_state import seed_all
    from ridgeline.workers.world import World as Place

    seed_all(seed)
    model = move(task.model(), world.device)
    (batch,) = batches_of(task, world, seed=seed).some(1, 1)
    with PlannedStep(
        model,
        task.loss_fn,
        task.optimizer(model),
        # Each by itself, though all at once: exchanges are none of the operators that it is held against.
        Plan(workers=1, threads=world.threads),
        clip_norm=task.clip_norm,
        world=Place(0, 1, world.local_rank, world.device),
        name=task.name,
        is_undone=True,
    ) as step:
        return phase_seconds(step, batch, world, MOST_S)
