"""Whether a captured program still computes what its code would."""

import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from ridgeline.runtime.hybrid.calls.watching import is_plain
from ridgeline.runtime.hybrid.guards.places import class_variables, reader, watch_classes
from ridgeline.runtime.hybrid.guards.reading import Write, read_program
from ridgeline.runtime.hybrid.guards.unguarded import watch_unguarded
from ridgeline.runtime.unchecked import without_checks

_CHECKS = "._validate_args"
"""How an expression ends that asks whether distributions check their arguments."""


class Guards:
    """What a program took for granted when it was captured, compared before each of its calls.

    Made of the guards of torch's compiler, see `read_program`. They do not compare where tensors lie, methods
    of classes, and what `unguarded` lists: that is added.

    Args:
        program: A function without a closure whose parameters are the names of the arguments.
        arguments: Their values, as the program is captured with.
        given: The arguments whose tensors each call brings along.
        followed: Tensors that the captured program follows to wherever they lie; all others have to stay.

    Attributes:
        holds: Takes the arguments; whether a captured program serves them. In the modes of the capture.
        tensors: What it reads and no call brings along, in no order.
        places: Where these lay when it was made, and how.
        writes: What it changes in Python.
        graph: The operators that it comes to; equal texts are equal programs.
        leaves_out_checks: Whether it makes distributions, whose value checks captured programs leave out.

    Raises:
        CaptureError: the program cannot be read in one piece.

    Cost: Tenths of a second to make. `holds` takes 0.03 us a guard and 0.1 us a tensor: 4 us for a network
        of three linear layers on a 2-core CPU.
    """

    def __init__(
        self,
        program: types.FunctionType,
        arguments: Mapping[str, Any],
        given: Collection[str] = (),
        followed: Collection[Tensor] = (),
    ) -> None:
        self._reading = reading = read_program(program, arguments)
        brought = tuple(f"L[{name!r}]" for name in given)
        tensors, expressions = (
            [text for text in texts if not text.startswith(brought)]
            for texts in (reading.tensors, reading.expressions)
        )
        now, known = dict(arguments), set(map(id, followed))
        values = reader(tensors, reading.scope)(now)
        pairs = zip(tensors, values, strict=True)
        self._read = reader([text for text, t in pairs if id(t) not in known], reading.scope)
        self._values = reader(expressions, reading.scope)
        names = class_variables(reading.expressions)
        self._watch = watch_classes(reading.classes, reading.code, names)
        self.leaves_out_checks = any(text.endswith(_CHECKS) for text in reading.expressions)
        self._check = reading.manager.check
        if self.leaves_out_checks:
            self._check = without_checks()(self._check)
        self._unguarded = watch_unguarded(reading, reader(reading.zeros, reading.scope), now)
        self._before = self._values(now)
        self.tensors: tuple[Tensor, ...] = self._read(now)
        self.writes: tuple[Write, ...] = reading.writes
        self.graph: str = reading.graph
        self.places = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in self.tensors)
        self.holds: Callable[[dict[str, Any]], bool] = self._holder(now)

    def difference(self, arguments: dict[str, Any]) -> str:
        """What does not hold for these arguments, in words; for people, after `holds` said no."""
        with without_checks():
            found = self._reading.manager.check_verbose(arguments)
        if not found.result:
            parts = [str(part) for part in found.verbose_code_parts]
            first = parts[0].partition("  #")[0].strip() if parts else "a setting"
            is_sentence = "mismatch" in first or "changed" in first
            return first if is_sentence else f"{first} no longer holds"
        if not self._watch():
            return "a method or variable of a class was replaced"
        if not self._unguarded(arguments):
            return "the sign of a zero, a list in a tuple or a missing attribute changed"
        return "a tensor that it reads was replaced, or lies elsewhere"

    def could_hold(self, arguments: dict[str, Any]) -> bool:
        """Whether it may hold again with other values: tensors and objects are those of the capture."""
        try:
            if [*map(Tensor.data_ptr, self._read(arguments))] != self._addresses:
                return False
            now = self._values(arguments)
        except (LookupError, AttributeError, TypeError):
            return False
        plain = [*map(is_plain, now)] == [*map(is_plain, self._before)]
        return (
            plain
            and self._watch()
            and all(_is_same(a, b) for a, b in zip(now, self._before, strict=True))
        )

    def _holder(self, arguments: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
        check, watch, read = self._check, self._watch, self._read
        unguarded, address = self._unguarded, Tensor.data_ptr
        self._addresses = addresses = [*map(address, self.tensors)]

        def holds(now: dict[str, Any]) -> bool:
            if not (check(now) and watch()):
                return False
            try:
                return [*map(address, read(now))] == addresses and unguarded(now)
            except (LookupError, AttributeError, TypeError):
                return False

        return holds


def _is_same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or a plain value; each look at a method makes an object anew."""
    is_method = isinstance(now, types.MethodType) and now == before
    return now is before or is_method or is_plain(now)
