"""What may change a choice after training began: many shapes, a long run, a plan that fails."""

from typing import Any

import msgspec

from ridgeline.decision.choice import PlanChoice
from ridgeline.decision.varied import ShapeWatch
from ridgeline.errors import RidgelineError, first_line
from ridgeline.planner import Ranking
from ridgeline.planner.deferred_compiling import steps_before_compiling
from ridgeline.planner.labels import label
from ridgeline.synchronisation import trains_apart
from ridgeline.workers import attendance
from ridgeline.workers.agree import largest_of_workers


class Revisions:
    """Looks at each batch before it is trained on, and chooses again when that is due.

    Never where workers train alone between exchanges.

    The choice holds a batch until this is over.
    """

    def __init__(self, choice: PlanChoice, ranking: Ranking) -> None:
        self.choice = choice
        self._ranking = ranking
        self._shapes: ShapeWatch | None = None
        self._steps_left: int | None = None
        self._num_steps = -1
        if trains_apart(ranking.best.plan.sync):
            return  # no other plan continues from parameters that differ
        self._shapes = _watch(ranking)
        if choice.steps is None and choice.seconds is None:
            self._steps_left = steps_before_compiling(ranking, device=choice.world.kind)

    @property
    def is_over(self) -> bool:
        """Whether nothing changes the choice any more."""
        return self._shapes is None and self._steps_left is None

    def due(self, batch: Any, num_steps: int) -> Ranking | None:
        """The ranking that holds from this batch on, if it was made again; all workers call this alike.

        Args:
            batch: To be trained on.
            num_steps: Made with the plan in force. A batch in place of one whose step failed, maybe on this
                worker alone, does not count: the others are still in that step.

        Raises:
            RidgelineError: see `PlanChoice.rank_for` and `rank_with_compiled`.

        Cost: Next to none; but for one batch in a run, or two, whose trials take as long as they do.
        """
        if num_steps == self._num_steps:
            return None
        self._num_steps = num_steps
        world = self.choice.world
        if self._shapes is not None and self._shapes.is_over(batch):
            shapes, self._shapes = self._shapes, None
            if largest_of_workers(float(shapes.is_varied), world):
                with attendance.phase("the choice of a plan", world):
                    return self.choice.rank_for(self._ranking, shapes.enough_examples())
        # Counted alike on all workers, so that none asks the others before it is due.
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                self._steps_left = None
                with attendance.phase("the choice of a plan", world):
                    found = self.choice.rank_with_compiled(self._ranking, batch)
                self._ranking = found
                self._shapes = None if trains_apart(found.best.plan.sync) else _watch(found)
                return found
        return None


def _watch(ranking: Ranking) -> ShapeWatch | None:
    """A look at the shapes of batches, where the plan has programs that serve some better than others."""
    return None if ranking.best.plan.execution == "eager" else ShapeWatch()


def without_best(ranking: Ranking | None, error: RidgelineError) -> Ranking | None:
    """The ranking with the best of the other plans that were tried in front; None where none was."""
    if ranking is None:
        return None
    failed = msgspec.structs.replace(ranking.best, measured=None, failure=str(error))
    # Only what was tried: after a failure nothing else is known to run.
    others = [c for c in ranking.candidates[1:] if c.measured is not None and not c.failure]
    if not others:
        return None
    best = min(others, key=lambda candidate: candidate.cost_s(ranking.steps))
    rest = (c for c in ranking.candidates[1:] if c is not best)
    note = (
        f"trained as {label(best.plan)}, since {label(failed.plan)} failed when training began, though its "
        f"trial did not: {first_line(error)}"
    )
    return msgspec.structs.replace(
        ranking, candidates=(best, *rest, failed), notes=(note, *ranking.notes)
    )
