"""What may change a choice after training began: batches of many shapes, and a run that turns out long."""

from typing import Any

from ridgeline.decision.choice import PlanChoice
from ridgeline.decision.varied import ShapeWatch
from ridgeline.planner import Ranking
from ridgeline.planner.deferred_compiling import steps_before_compiling
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
        if trains_apart(ranking.best.plan.sync):
            return  # no other plan continues from parameters that differ
        self._shapes = _watch(ranking)
        if choice.steps is None and choice.seconds is None:
            self._steps_left = steps_before_compiling(ranking, device=choice.world.kind)

    @property
    def is_over(self) -> bool:
        """Whether nothing changes the choice any more."""
        return self._shapes is None and self._steps_left is None

    def due(self, batch: Any) -> Ranking | None:
        """The ranking that holds from this batch on, if it was made again; all workers call this alike.

        Raises:
            RidgelineError: see `PlanChoice.rank_for` and `rank_with_compiled`.

        Cost: Next to none; but for one batch in a run, or two, whose trials take as long as they do.
        """
        world = self.choice.world
        if self._shapes is not None and self._shapes.is_over(batch):
            shapes, self._shapes = self._shapes, None
            if largest_of_workers(float(shapes.is_varied), world):
                with attendance.phase("the choice of a plan", world):
                    return self.choice.rank_for(self._ranking, shapes.examples)
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
