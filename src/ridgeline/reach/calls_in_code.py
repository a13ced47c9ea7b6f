"""The calls that stand in code, with what is known of their arguments; bytecode is read, and does not run."""

import dis
import types
from collections.abc import Iterator
from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """Something on the interpreter's stack.

    Attributes:
        name: Of the variable or attribute that it was loaded by; empty where it was computed.
        owner: The name of what it is an attribute of.
        constant: In a tuple of one, its value, where it is a constant.
    """

    name: str = ""
    owner: str = ""
    constant: tuple[Any, ...] = ()


class CodeCall(NamedTuple):
    """A call, or a dictionary of keywords for one.

    Attributes:
        function: What is called.
        arguments: The positional ones; None where they are unpacked (`*args`).
        keywords: Keyword arguments by name, those that are not unpacked.
    """

    function: Loaded
    arguments: list[Loaded] | None
    keywords: dict[str, Loaded] = {}


_COMPUTED = Loaded()
_ENDS = (
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
)


def calls_in(code: types.CodeType) -> Iterator[CodeCall]:
    """The calls in code, in its order; an argument that branches give counts as computed.

    Source: `dis`, for the bytecode of Python 3.11 and 3.12.
    """
    stack: list[Loaded] = []
    at_targets: dict[int, list[Loaded]] = {}
    variables: dict[str, Loaded] = {}
    names: tuple[str, ...] = ()
    is_cut = False
    for step in dis.get_instructions(code):
        if step.offset in at_targets:
            before = at_targets.pop(step.offset)
            # Two ways lead here: what they both have put on the stack may be either.
            stack = before if is_cut else [*stack[:-1], *[_COMPUTED][: len(stack)]]
        is_cut = step.opname in _ENDS
        if step.opname == "KW_NAMES":
            names = code.co_consts[step.arg or 0]  # which Python 3.11 does not resolve
        elif step.opname == "BUILD_CONST_KEY_MAP":
            yield CodeCall(_COMPUTED, None, _by_name(stack[-1].constant[0], stack[:-1]))
        elif step.opname == "CALL_FUNCTION_EX":
            below = 2 + ((step.arg or 0) & 1)
            for function in stack[-below - 1 : 1 - below or None]:
                yield CodeCall(function, None)
        elif step.opname in ("PRECALL", "CALL"):
            num = step.arg or 0
            # In 3.11 the first of the two takes the arguments off.
            if step.opname == "PRECALL" or "PRECALL" not in dis.opmap:
                given = stack[len(stack) - num :][: num - len(names)]
                for function in stack[: len(stack) - num][-2:]:
                    yield CodeCall(function, given, _by_name(names, stack))
                names = ()
        if step.opname == "STORE_FAST" and stack:
            variables[str(step.argval)] = stack[-1]
        _follow(step, stack)
        if step.opname.startswith("LOAD_FAST") and (known := variables.get(str(step.argval))):
            stack[-1] = known._replace(constant=())  # which another place may have set since
        if step.opname.startswith(("POP_JUMP", "JUMP_F", "JUMP_IF")) and isinstance(
            step.argval, int
        ):
            at_targets.setdefault(step.argval, [*stack])


def _by_name(names: tuple[Any, ...], stack: list[Loaded]) -> dict[str, Loaded]:
    values = [_COMPUTED] * len(names) + stack
    return dict(zip(names, values[len(values) - len(names) :], strict=True))


def _follow(step: dis.Instruction, stack: list[Loaded]) -> None:
    """Have the stack as it is behind an instruction that is not jumped from."""
    has_argument = step.opcode >= dis.HAVE_ARGUMENT
    effect = dis.stack_effect(step.opcode, step.arg if has_argument else None, jump=False)
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        owner = stack.pop() if stack else _COMPUTED
        stack.append(Loaded(str(step.argval), owner.name))
        stack += [_COMPUTED] * effect
    elif step.opname == "LOAD_CONST":
        stack.append(Loaded(constant=(step.argval,)))
    elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
        stack += [_COMPUTED] * (effect - 1)
        stack.append(Loaded(str(step.argval)))
    else:
        del stack[max(0, len(stack) + min(effect, 0)) :]
        # What an instruction leaves in the place of what it takes is computed.
        if (
            stack
            and effect <= 0
            and step.opname not in ("POP_TOP", "RESUME", "KW_NAMES", "PUSH_NULL")
        ):
            keeps = step.opname.startswith(("STORE", "POP_JUMP", "JUMP", "NOP", "CACHE", "PRECALL"))
            stack[-1] = stack[-1] if keeps else _COMPUTED
        stack += [_COMPUTED] * max(effect, 0)
