"""Guards of a program for each memory layout of what its calls bring along."""

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.guards.guards import Guards
from ridgeline.guards.reading import UnreadableError
from ridgeline.guards.spoken import spoken

P = ParamSpec("P")
T = TypeVar("T")
MOST_LAYOUTS = 4
"""Memory layouts that are read for one program; calls that bring further ones are not served by it."""


class LayoutReads:
    """What a captured program reads, and takes for granted of what its calls bring along.

    Args:
        program: A function without a closure.
        fixed: Arguments of it that are the same in every call.
        example: The others, as the program was captured with; kept.
        followed: Tensors that the captured program follows to wherever they lie.

    Attributes:
        guards: One for each layout that comes to the same program, the example's first.
        carried: Gives what stands now where the tensors given to `follow` stood; asked while guards hold.
        still_hold: Whether nothing is another, whatever a call brings; `broken` says what. Costs as `fit`.

    Raises:
        UnreadableError: torch's compiler cannot read the program in one piece.

    Cost: Tenths of a second to a few seconds.
    """

    def __init__(
        self,
        program: types.FunctionType,
        fixed: Mapping[str, Any],
        example: Mapping[str, Any],
        followed: Collection[Tensor] = (),
    ) -> None:
        self._program = program
        self._fixed = dict(fixed)
        self._example = dict(example)
        self._followed = followed
        self.carried: Callable[[], Sequence[Tensor]] = tuple
        self.guards = [self._read(self._example)]
        self._others: list[Guards] = []
        self._num_unread = 0
        self._captured = {**self._fixed, **self._example}
        # Asked before every step, where a method around it would count.
        self.still_hold: Callable[[], bool] = partial(self.guards[0].holds, self._captured)

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Have the program take what stands where these do now, as long as it is of their kind.

        Raises:
            CaptureError: the code of the program does not get at one of them by a name, or what was read is
                another by now.
        """
        guards = self.guards[0]
        names = [guards.name_of(tensor, self._captured) for tensor in tensors]
        for name, tensor in zip(names, tensors, strict=True):
            if name is None:
                raise CaptureError(
                    "wanted tensors under names that the step's code reads, got one of shape "
                    f"{tuple(tensor.shape)} that it replaces and gets at otherwise; use execution='compiled' "
                    "or 'eager'"
                )
        if not tensors:
            return
        find = guards.values_of([name for name in names if name is not None])
        self.carried = partial(find, self._captured)
        moved = guards.moved(self._captured, [*self._followed, *tensors])
        if moved is None:
            raise CaptureError(
                f"wanted a program that finds all as it was read, got one where {self.broken()}; use "
                "execution='compiled' or 'eager'"
            )
        self.guards = [moved]
        self.still_hold = partial(moved.holds, self._captured)

    def fit(self, brought: Mapping[str, Any]) -> bool:
        """Whether the captured program computes a call that brings this.

        Cost: 0.03 us a guard: a few microseconds for a small network, 0.1 ms for a large one. What lies
            otherwise in memory than in the calls before is read once.
        """
        arguments = {**self._fixed, **brought}
        if any(guards.holds(arguments) for guards in self.guards):
            return True
        # Where something else changed, a new reading would be of another program than was captured.
        num_read = len(self.guards) + len(self._others) + self._num_unread
        if self.broken() is not None or num_read >= MOST_LAYOUTS:
            return False
        if any(guards.holds(arguments) for guards in self._others):
            return False
        try:
            guards = self._read(brought)
        except UnreadableError:
            # Code that takes another way for this layout: such a call is none of the program's. Nothing says
            # which further calls are like it, so that these are read, too, as often as that may be.
            self._num_unread += 1
            return False
        # Both are kept: what came to another program must not be read again in every call.
        first = self.guards[0]
        # With equal operators on other tensors than were captured (inside of an object) it is another.
        is_same = guards.graph == first.graph and guards.places == first.places
        (self.guards if is_same else self._others).append(guards)
        return is_same

    def broken(self) -> str | None:
        """What is not as it was, whatever a call brings; None while nothing is."""
        if self.still_hold():
            return None
        return self._spoken(self.guards[0].difference(self._captured))

    def _spoken(self, expression: str) -> str:
        """An expression as people write it, the variables of a fixed function's closure by their names."""
        closures = (value for value in self._fixed.values() if getattr(value, "__closure__", None))
        return spoken(expression, next(closures, None))

    def _read(self, brought: Mapping[str, Any]) -> Guards:
        followed = [*self._followed, *self.carried()]
        return Guards(self._program, {**self._fixed, **brought}, [*brought], followed)


def refused_unread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What is read for a capture.

    Raises:
        CaptureError: it cannot be read, so that changes of what it reads would go unnoticed.
    """
    try:
        return read(*args, **kwargs)
    except UnreadableError as error:
        raise CaptureError(
            f"{error}; replays of a graph would not notice changes of what it reads: use an execution mode "
            "without a graph"
        ) from error
