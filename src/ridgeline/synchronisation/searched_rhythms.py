"""The rhythms that a search compares where workers may train alone: those whose accuracy was published.

A longer interval is always the faster one, so time alone would choose the longest. The table ends where
published runs end that a trial can cover; `every` can be fixed to any other.
"""

from typing import NamedTuple

from ridgeline.synchronisation.rhythm import AVERAGE, DELAY, FRAGMENTS, NESTEROV, OUTER, delay_of
from ridgeline.synchronisation.sync import Sync
from ridgeline.synchronisation.tables import UNCOMPRESSED

LEAST_EXCHANGES = 20
"""A shorter run is not made of rounds.

Source: measured, `docs/guide.md`: what 20 exchanges leave of a run depends on the outer optimizer.
"""
LEAST_GAIN = 0.2
"""What fraction of a step must be saved by workers that train alone, or for longer, over those that do not.

Source: assumed; another optimisation algorithm is worth more than the noise of a trial.
"""


class Rhythm(NamedTuple):
    """How often parameters are exchanged, and how.

    Attributes:
        every: Steps between two exchanges of one fragment.
        fragments: Parts of the parameters that are exchanged one by one.
        delay: Steps that continue while one travels.
        has_outer: Whether Nesterov's momentum is applied to the mean difference where workers train with an
            adaptive optimizer, as DiLoCo does.
        compression: Of what travels.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    has_outer: bool = True
    compression: str = UNCOMPRESSED

    def options(self, *, is_adaptive: bool) -> dict[str, bool | int | float | str]:
        """The options of a plan; what is at its default is left out.

        Args:
            is_adaptive: Whether workers train with an optimizer that divides gradients by their size. To one
                with momentum of its own another is one too many: the mean is taken as it is.
        """
        wanted: dict[str, bool | int | float | str] = {
            OUTER.name: NESTEROV if self.has_outer and is_adaptive else AVERAGE,
            FRAGMENTS.name: self.fragments,
            DELAY.name: self.delay,
        }
        # Left out at their defaults, so that two plans that do the same compare as equal.
        defaults = {option.name: option.default for option in (OUTER, FRAGMENTS, DELAY)}
        return {name: value for name, value in wanted.items() if value != defaults[name]}


RHYTHMS = (
    Rhythm(every=8, has_outer=False),
    Rhythm(every=50),
    Rhythm(every=50, fragments=4, delay=10),
    Rhythm(every=50, delay=40),
    Rhythm(every=50, delay=20, compression="int8"),
    Rhythm(every=100, fragments=4, delay=10),
)
"""From the mildest on.

Source: 8, local SGD: Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020. 50,
the shortest of those compared for DiLoCo (500 in its main runs): Douillard et al., 2023. 100: INTELLECT-1,
Jaghouar et al., 2024. Fragments, delay and bits: Douillard et al., "Streaming DiLoCo", 2025, which sends 4;
here those that were measured to keep the accuracy of ResNet-18, with AdamW and with SGD: 4 fragments 10 steps
late, all 40 late, and all 20 late in 8 bits (`benchmarks/results/convergence_*.json`).
"""


def rhythm_words(sync: Sync) -> str:
    """What the algorithm of workers that train alone is called, and where it comes from."""
    is_late = delay_of(sync) > 0
    if sync.options.get(OUTER.name, OUTER.default) == NESTEROV:
        name, source = "DiLoCo", "Douillard et al., 2025" if is_late else "Douillard et al., 2023"
    else:
        name, source = "local SGD", "Stich, ICLR 2019"
    return f"{'streaming ' if is_late else ''}{name} ({source})"


def changed_words(sync: Sync) -> str:
    """What workers that train alone do instead of taking steps with the mean of their gradients."""
    return (
        f"workers train alone and exchange parameters every {sync.every} steps, which is another "
        f"optimisation algorithm: {rhythm_words(sync)}"
    )
