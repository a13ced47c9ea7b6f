"""Whether a captured program still computes what its code would."""

import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from ridgeline.capture.interception import innermost_transform, num_dispatch_modes
from ridgeline.capture.unchecked import without_checks
from ridgeline.guards.reading import WEAKLY, ProgramReading, Write, read_program
from ridgeline.guards.sparse import address
from ridgeline.guards.unguarded import numbers_of_numpy, require_unguarded
from ridgeline.programs.watches.classes import class_variables, require_classes, require_hooks
from ridgeline.programs.watches.conditions import Conditions, reader
from ridgeline.programs.watches.left_to_python import is_plain_value
from ridgeline.programs.watches.settings import MethodsOfTensors
from ridgeline.reach.reach import CONTAINERS
from ridgeline.reach.sparse import is_sparse, strides_of
from ridgeline.tensors.copies import is_noted
from ridgeline.tensors.nests import tensors_in

MISSING = (LookupError, AttributeError, TypeError, ValueError)
"""What an expression raises where something that it names is there no longer; of an empty cell the last."""
_MODES = "torch_function_mode_stack"
"""In expressions of modes that a caller has entered: they come and go, and are no objects of the program."""
_CHECKS = "._validate_args"
"""How an expression ends that asks whether distributions check their arguments."""


class Guards:
    """What a program took for granted when it was captured, compared before each of its calls.

    Made of the guards of torch's compiler, see `read_program`. They do not compare where tensors lie, methods
    of classes, what `unguarded` and what `interception` list: that is added.

    Args:
        program: A function without a closure whose parameters are the names of the arguments.
        arguments: Their values, as the program is captured with.
        given: The arguments whose tensors each call brings along, in nests of tuples, lists and dictionaries.
        followed: Tensors that the captured program follows to wherever they lie; all others have to stay.
        reading: Of the program, where it was read before and nothing of that is another; see `moved`.

    Attributes:
        holds: Takes the arguments; whether a captured program serves them. In the modes of the capture.
        tensors: What it reads and no call brings along, in no order.
        places: Where these lay when it was made, and how.
        writes: What it changes in Python.
        graph: The operators that it comes to; equal texts are equal programs.
        takes_host: Whether it takes tensors that lie on the host.
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
        reading: ProgramReading | None = None,
    ) -> None:
        self._program, self._given = program, given
        self._reading = reading = reading or read_program(program, arguments)
        # What a call brings along is another each time, so that its address says nothing.
        brought = tuple(f"L[{name!r}]" for name in given)
        expressions = [
            text
            for text in reading.expressions
            if not text.startswith(brought) and _MODES not in text and WEAKLY not in text
        ]
        now = dict(arguments)
        # A tensor inside of an object that a call brings is no input of the captured program, which reads
        # it where it lay: such have to stay, too.
        inputs = tensors_in([arguments[name] for name in given])
        known = {*map(id, followed), *map(id, inputs)}
        values = reader(reading.tensors, reading.scope)(now)
        pairs = zip(reading.tensors, values, strict=True)
        fresh = numbers_of_numpy(reading, now)
        read = [text for text, tensor in pairs if id(tensor) not in known and text not in fresh]
        self._read = reader(read, reading.scope)
        self._values = reader(expressions, reading.scope)
        self.leaves_out_checks = any(text.endswith(_CHECKS) for text in reading.expressions)
        self._check = reading.manager.check
        if self.leaves_out_checks:
            self._check = without_checks()(self._check)
        self._before = self._values(now)
        self.tensors: tuple[Tensor, ...] = self._read(now)
        self.writes: tuple[Write, ...] = reading.writes
        self.graph: str = reading.graph
        self.takes_host: bool = reading.takes_host
        self.places = tuple(
            (address(t), t.shape, strides_of(t), t.dtype, is_noted(t)) for t in self.tensors
        )
        self._addresses = [*map(address, self.tensors)]
        names = class_variables(reading.expressions)
        # Compiled apart, too: `difference` and `moved` ask for each kind by itself, `holds` for all at once.
        classes = Conditions(reading.scope)
        require_classes(classes, reading.classes, reading.code, names)
        self._classes = classes.all_hold()
        process = Conditions(reading.scope)
        _require_settings(process, reading)
        require_hooks(process)
        self._process = process.all_hold()
        others = Conditions(reading.scope)
        require_unguarded(others, reading, now)
        self._unguarded = others.all_hold()
        rest = Conditions(reading.scope)
        _require_no_interception(rest)
        _require_settings(rest, reading)
        for text, tensor, place in zip(read, self.tensors, self._addresses, strict=True):
            if is_sparse(tensor):
                asked, known = rest.constant(address), rest.constant(place)
                rest.require(f"{asked}({rest.value_of(text)}) == {known}")
            else:  # without a call of ours, since there are many
                rest.require(f"{rest.value_of(text)}.data_ptr() == {place[0]}")
        require_classes(rest, reading.classes, reading.code, names)
        require_unguarded(rest, reading, now)
        self.holds = self._holder(rest.all_hold())

    @property
    def text(self) -> str:
        """The operators, the code of every function that was read, and writes; the same in every process."""
        # Sorted, since sets have another order in each process.
        code = sorted({part for one in self._reading.code for part in _code_text(one)})
        return "\n".join((self.graph, *code, *sorted(map(repr, self.writes))))

    @property
    def containers(self) -> tuple[Any, ...]:
        """The dictionaries, lists and sets that it looks at (a library's cache, say), modules' own apart."""
        found = (value for value in self._before if isinstance(value, CONTAINERS))
        return tuple(value for value in found if "__spec__" not in value)

    def found(self, expression: str, arguments: Mapping[str, Any]) -> Any:
        """The value of an expression of the compiler's; None where there is none (any more)."""
        try:
            return self.values_of([expression])(dict(arguments))[0]
        except (*MISSING, NameError, SyntaxError):
            return None

    def name_of(self, tensor: Tensor, arguments: Mapping[str, Any]) -> str | None:
        """The expression by which the program gets at a tensor that no call brings along."""
        names = self._reading.tensors
        values = reader(names, self._reading.scope)(dict(arguments))
        brought = tuple(f"L[{name!r}]" for name in self._given)
        pairs = zip(names, values, strict=True)
        return next((n for n, t in pairs if t is tensor and not n.startswith(brought)), None)

    def values_of(self, expressions: Sequence[str]) -> Callable[[dict[str, Any]], Sequence[Any]]:
        """What gives the values of expressions of the compiler's for some arguments."""
        return reader(expressions, self._reading.scope)

    def difference(self, arguments: dict[str, Any]) -> str:
        """What does not hold for these arguments, in words; for people, after `holds` said no."""
        with without_checks():
            found = self._reading.manager.check_verbose(arguments)
        if not found.result:
            parts = [str(part) for part in found.verbose_code_parts]
            # Behind the mark stands the line of torch or of the program, which says nothing to people.
            first = parts[0].partition("  #")[0].strip() if parts else "a setting"
            # Of a dictionary it says what is so now, and not what was: `len(d) != 1`.
            first = re.sub(r"^(len\(.*\)) != (\d+)$", r"\1 == \2", first)
            is_sentence = "mismatch" in first or "changed" in first
            return first if is_sentence else f"{first} no longer holds"
        if not self._process({}):
            return (
                "a setting that chooses kernels, a limit of Python's, a method of tensors, a logger's level, "
                "or hooks of all modules or on saved tensors changed"
            )
        if not self._classes({}):
            return "a method or variable of a class was replaced"
        if not self._has_same_tensors(arguments):
            return "a tensor that it reads was replaced, or moved in memory"
        return "a missing attribute or an array of NumPy changed, or a class hides an attribute"

    def moved(
        self, arguments: Mapping[str, Any], followed: Collection[Tensor] = ()
    ) -> "Guards | None":
        """The same of tensors that lie elsewhere now; None where anything else is another.

        Args:
            arguments: Their values now.
            followed: See `Guards`.

        Cost: Little beside reading the program again, which takes seconds for a large one.
        """
        now = dict(arguments)
        try:
            is_same = self._check(now) and self._process({}) and self._classes({})
            if not (is_same and self._unguarded(now)):
                return None
        except MISSING:
            return None
        return Guards(self._program, arguments, self._given, followed, self._reading)

    def could_hold(self, arguments: dict[str, Any]) -> bool:
        """Whether it may hold again with other values: tensors and objects are those of the capture."""
        if not self._has_same_tensors(arguments):
            return False
        try:
            now = self._values(arguments)
        except MISSING:
            return False
        plain = [*map(is_plain_value, now)] == [*map(is_plain_value, self._before)]
        return (
            plain
            and self._classes({})
            and all(_is_same(a, b) for a, b in zip(now, self._before, strict=True))
        )

    def _has_same_tensors(self, arguments: dict[str, Any]) -> bool:
        try:
            return [*map(address, self._read(arguments))] == self._addresses
        except MISSING:
            return False

    def _holder(
        self, all_hold: Callable[[dict[str, Any]], bool]
    ) -> Callable[[dict[str, Any]], bool]:
        # A local variable: `holds` runs before every call, and each attribute would cost it a look-up.
        check = self._check

        def holds(now: dict[str, Any]) -> bool:
            try:
                return check(now) and all_hold(now)
            except MISSING:
                return False

        return holds


def _require_no_interception(conditions: Conditions) -> None:
    """Require that nothing is between the program and its operators, see `interception`."""
    conditions.require(f"{conditions.constant(num_dispatch_modes)}() == 0")
    conditions.require(f"{conditions.constant(innermost_transform)}() is None")
    conditions.require(f"{conditions.constant(forward_ad)}._current_level < 0")


def _require_settings(conditions: Conditions, reading: ProgramReading) -> None:
    """Require what was asked of the process to stay as it was when the program was read."""
    for ask, value in reading.settings:
        is_same = f"{conditions.constant(ask)}() == {conditions.constant(value)}"
        if isinstance(ask, MethodsOfTensors) and ask() == value:
            is_same = f"({ask.untouched(conditions)} or {is_same})"
        conditions.require(is_same)


def _is_same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or a plain value; each look at a method makes a new object."""
    is_method = isinstance(now, types.MethodType) and now == before
    return now is before or is_method or is_plain_value(now)


def _code_text(code: types.CodeType) -> Iterator[str]:
    """A function's name, instructions and constants, and those of functions written inside of it."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    constants = [
        repr(sorted(map(repr, part)) if isinstance(part, frozenset) else part)  # else in no order
        for part in code.co_consts
        if not isinstance(part, types.CodeType)
    ]
    yield f"{code.co_qualname} {code.co_code.hex()} {code.co_names} {constants}"
    for part in inner:
        yield from _code_text(part)
