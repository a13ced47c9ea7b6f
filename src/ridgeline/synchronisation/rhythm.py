"""Workers that train alone for some steps and exchange their parameters now and then (`Sync.every` > 1).

Every `every` steps the workers exchange how far their parameters have come from the last common ones, as they
would exchange gradients, and an outer optimizer applies its mean to the common parameters, from which all go
on.

Source: local SGD, Stich, ICLR 2019; DiLoCo, Douillard et al., 2023 (an inner optimizer of one's own, SGD with
Nesterov momentum outside: 0.7 and 0.9); fragments, Douillard et al., "Streaming DiLoCo", 2025.
"""

from collections.abc import Mapping, Sequence

from ridgeline.errors import PlanError
from ridgeline.synchronisation.entries import Option, OptionValue
from ridgeline.synchronisation.sync import Sync

AVERAGE = "average"
NESTEROV = "nesterov"
OUTER = Option("outer", str, AVERAGE, among=(AVERAGE, NESTEROV))
FRAGMENTS = Option("fragments", int, 1, least=1)
DELAY = Option("delay", int, 0, least=0)
"""Steps that continue while a fragment is exchanged; 0: the next step waits for it."""
NESTEROV_OPTIONS = (
    Option("outer_lr", float, 0.7, least=0.0),
    Option("outer_momentum", float, 0.9, least=0.0, most=1.0),
)

ALL_OPTIONS = (OUTER, FRAGMENTS, DELAY, *NESTEROV_OPTIONS)
_PASSES = {AVERAGE: 8, NESTEROV: 16}
"""Bytes read and written per byte of the parameters in an exchange, the collectives apart.

Source: counted. The difference is made (3), applied to the common parameters (3) and these are copied back
(2); Nesterov's momentum is two passes over three tensors and one over two more.
"""


def trains_apart(sync: Sync) -> bool:
    """Whether workers take steps without the others; False also for an interval that no plan may have."""
    # Asked while a plan is still being checked, when `every` may be anything.
    return isinstance(sync.every, int) and sync.every > 1


def rhythm_options(sync: Sync) -> tuple[Option, ...]:
    """The options of the plan's rhythm: none where gradients are exchanged in every step."""
    if not trains_apart(sync):
        return ()
    outer = (OUTER, FRAGMENTS, DELAY)
    return (*outer, *NESTEROV_OPTIONS) if sync.options.get(OUTER.name) == NESTEROV else outer


def delay_of(sync: Sync) -> int:
    """Steps between the start of an exchange of parameters and when workers continue from it."""
    return int(sync.options.get(DELAY.name, DELAY.default)) if trains_apart(sync) else 0


def check_option_of_rhythm(sync: Sync, name: str) -> None:
    """Raise a PlanError for an option of another rhythm than the plan's; pass over any other name."""
    if name not in [option.name for option in ALL_OPTIONS]:
        return
    if not trains_apart(sync):
        raise PlanError(
            f"wanted sync.every > 1 for sync.options[{name!r}], got every={sync.every!r} in the plan; raise "
            "it, or leave the option out"
        )
    raise PlanError(
        f"wanted sync.options[{OUTER.name!r}]={NESTEROV!r} for sync.options[{name!r}], got "
        f"{sync.options.get(OUTER.name, OUTER.default)!r} in the plan; set it, or leave the option out"
    )


def check_rhythm(sync: Sync, workers: int) -> None:
    """Raise a PlanError for an interval that so many workers, or fragments, cannot have."""
    if sync.every < 1:
        raise PlanError(f"wanted sync.every >= 1, got {sync.every!r} in the plan; raise it")
    if not trains_apart(sync):
        return
    if workers == 1:
        raise PlanError(
            f"wanted sync.every=1 for workers=1, got {sync.every} in the plan; a single worker exchanges "
            "nothing: leave it out, or use more workers"
        )
    fragments = int(sync.options.get(FRAGMENTS.name, FRAGMENTS.default))
    if fragments > sync.every:
        raise PlanError(
            f"wanted sync.options[{FRAGMENTS.name!r}] <= sync.every={sync.every}, got {fragments} in the "
            "plan; a step exchanges one fragment at most: use fewer"
        )
    if delay_of(sync) >= sync.every:
        raise PlanError(
            f"wanted sync.options[{DELAY.name!r}] < sync.every={sync.every}, got {delay_of(sync)} in the "
            "plan; an exchange must be over before the next one of the same parameters: lower it"
        )


def cut_fragments(sizes: Sequence[int], num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Which tensors make each fragment: neighbours, of about as many bytes in each.

    Some are empty where there are fewer tensors.
    """
    fragments: list[list[int]] = [[] for _ in range(num_fragments)]
    total, before = sum(sizes), 0
    for place, size in enumerate(sizes):
        # By the middle of each tensor: by its end a large one would fall into the fragment behind it.
        middle = before + size / 2
        number = int(middle * num_fragments / total) if total else 0
        # The middle of an empty tensor behind all others is the end of all, which has no fragment.
        fragments[min(number, num_fragments - 1)].append(place)
        before += size
    return tuple(map(tuple, fragments))


def due_fragment(step: int, every: int, fragments: int = 1) -> int | None:
    """The fragment of the parameters that is exchanged after a step; None for a step without exchange.

    Each is exchanged once in `every` steps, in the same order on all workers, as far apart as whole steps
    allow; the last one in steps that are multiples of `every`.

    Steps are counted from 1; there are at most `every` fragments.
    """
    # Counted from 1 to `every`, so that the last step of a period is the one that divides it.
    place = (step - 1) % every + 1
    fragment = place * fragments // every - 1
    # Several steps share a quotient; only the first of them exchanges.
    is_due = fragment >= 0 and place == -(-(fragment + 1) * every // fragments)
    return fragment if is_due else None


def landing_fragment(step: int, every: int, fragments: int = 1, delay: int = 0) -> int | None:
    """The fragment whose exchange ends after a step: the one that was due `delay` steps before, if any."""
    return due_fragment(step - delay, every, fragments) if step > delay else None


def fragments_on_their_way(step: int, every: int, fragments: int, delay: int) -> list[int]:
    """The fragments whose exchange has begun by the end of a step, and has not ended."""
    # What began `delay` steps ago ends with this step, so it is not on its way any more.
    due = (due_fragment(s, every, fragments) for s in range(max(1, step - delay + 1), step + 1))
    return [fragment for fragment in due if fragment is not None]


def outer_values(options: Mapping[str, OptionValue]) -> tuple[float, float]:
    """Learning rate and Nesterov momentum of the outer optimizer; averaging is (1, 0)."""
    if options[OUTER.name] == AVERAGE:
        return 1.0, 0.0
    rate, momentum = (options[option.name] for option in NESTEROV_OPTIONS)
    return float(rate), float(momentum)


def outer_bytes(sync: Sync, num_bytes: int) -> int:
    """Memory traffic of one exchange of parameters of so many bytes, the collectives and a codec apart."""
    return _PASSES[str(sync.options.get(OUTER.name, OUTER.default))] * num_bytes


def outer_state_bytes(sync: Sync, num_elements: int, element_bytes: int) -> int:
    """Bytes that a worker keeps for its rhythm, for parameters of so many elements.

    What is sent, the common parameters and the outer momentum, these two in single precision at least.
    """
    if not trains_apart(sync):
        return 0
    copies = 2 if sync.options.get(OUTER.name) == NESTEROV else 1
    return num_elements * (element_bytes + copies * max(4, element_bytes))
