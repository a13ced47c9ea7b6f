"""What functions that a program calls take for granted where torch's compiler has no name for it.

The `__init__` of a class whose object the program makes, say, is read through like any other function, but
what its parameters default to, and what its closure holds, are constants to the compiler. So are, in the
closures of methods, classes, and annotations of any function. And methods of classes in C that code holds
(`self.activation = torch.Tensor.sin`) are constants wherever it finds them.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch._dynamo.variables import functions as function_variables
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import Guard

from ridgeline.programs.watches.asked import is_missing
from ridgeline.programs.watches.comparing import content_of
from ridgeline.programs.watches.instances import classes_in_cells, metaclass_check
from ridgeline.programs.watches.left_to_python import is_marked, refuse
from ridgeline.reach.owners import is_users
from ridgeline.reach.replaced_code import replacements

_NOTED = "_ridgeline_functions"
_MADE = "<"
"""How the names of files begin whose code was made by code, such as a dataclass's `__init__`."""
_ANNOTATIONS = "__annotations__"
_CALLED, _COMPILED = "_call_impl", "_compiled_call_impl"
"""What the call of a module leads to, the second where it is not None."""
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
"""Each is one object, which its class holds."""
_build: Any = InliningInstructionTranslator.build_inline_tracer
_attribute_in_torch: Any = function_variables.fn_var_getattr
_call_in_torch: Any = UnspecializedNNModuleVariable.call_function
_wrap_in_torch: Any = VariableBuilder._wrap  # noqa: SLF001 - all that a program reads goes through it


def note_functions() -> None:
    """Have the compiler of this process note them in what it makes of a program; again, too.

    Programs of other backends are compiled as before.
    """
    InliningInstructionTranslator.build_inline_tracer = staticmethod(_built)  # type: ignore[assignment]
    function_variables.fn_var_getattr = _attribute
    UnspecializedNNModuleVariable.call_function = _call  # type: ignore[method-assign]
    VariableBuilder._wrap = _wrap  # type: ignore[method-assign]  # noqa: SLF001 - as above


def _built(parent: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of torch's: the reader of a function that a program calls."""
    function, output = getattr(func, "fn", None), parent.output
    if isinstance(function, types.FunctionType) and is_marked(output.compiler_fn):
        file = function.__code__.co_filename
        if file.startswith(_MADE) or is_users(file):
            noted = vars(output).setdefault(_NOTED, {})
            noted[function] = noted.get(function, True) and func.source is not None
    return _build(parent, func, *args, **kwargs)


def _attribute(tx: Any, fn: Any, source: Any, name: str) -> Any:
    """In place of torch's, which compares no annotations, as libraries look at many."""
    is_asked = name == _ANNOTATIONS and source is not None and is_users(tx.f_code.co_filename)
    if not (is_asked and is_marked(tx.output.compiler_fn)):
        return _attribute_in_torch(tx, fn, source, name)
    return VariableTracker.build(tx, fn.__annotations__, AttrSource(source, name))


def _wrap(builder: Any, value: Any) -> Any:
    """In place of the method of `VariableBuilder`, which compares no method of a class in C."""
    output, source = builder.tx.output, builder.source
    if isinstance(value, _IN_C) and source is not None and is_marked(output.compiler_fn):
        output.guards.add(source.make_guard(GuardBuilder.ID_MATCH))
    return _wrap_in_torch(builder, value)


def _call(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """In place of the call of a module, of which torch compares its own `forward` only."""
    if is_marked(tx.output.compiler_fn):
        compiled = vars(module.value).get(_COMPILED)
        is_standing = _is_ours(compiled)
        if not (compiled is None or is_standing or _is_of_torch(compiled)):
            kind = type(module.value).__qualname__
            refuse(
                kind,
                f"a call of {kind}, which a function of its own stands for ({_COMPILED}), where a captured "
                "program does not look; assign that to forward",
                "The compiler would read the module's forward.",
            )
        if module.source is not None:
            own = vars(module.value)
            # What stands there for a step is another object in the next one.
            for name in (_CALLED,) if is_standing else (_CALLED, _COMPILED):
                held = AttrSource(module.source, name).make_guard(GuardBuilder.ID_MATCH)
                missing = module.source.make_guard(is_missing(name))
                tx.output.guards.add(held if name in own else missing)
    return _call_in_torch(module, tx, args, kwargs)


def _is_ours(call: Any) -> bool:
    """Whether it stands there while a step runs (see `called_by`), for a model that may call itself."""
    function = getattr(call, "__func__", call)
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _is_of_torch(call: Any) -> bool:
    """Whether it is what `Module.compile` sets, which computes what the module does."""
    function = getattr(call, "_torchdynamo_orig_callable", call)
    return getattr(function, "__func__", None) is nn.Module._call_impl  # noqa: SLF001 - what that compiles


def noted_functions(output: Any) -> dict[types.FunctionType, bool]:
    """Those of a program that are the user's, and whether the compiler has a name for each."""
    return dict(vars(output).get(_NOTED, {}))


def require_functions(functions: dict[types.FunctionType, bool], builder: Any, _: Guard) -> None:
    """A `Guard` on what they take for granted."""
    root = builder.guard_manager.root
    # What has a name is compared by it, but for classes in its closure.
    looked_at = {f: named for f, named in functions.items() if not named or classes_in_cells(f)}
    if looked_at:
        names = ", ".join(function.__qualname__ for function in looked_at)
        root.add_lambda_guard(
            _check(looked_at), [f"the default or closure of one changed ({names})"], None
        )
    kinds = (kind for function in functions for kind in classes_in_cells(function))
    for kind in dict.fromkeys(kinds):
        if check := metaclass_check(kind):
            root.add_lambda_guard(check, [f"the class of {kind.__qualname__} changed"], None)


def _check(functions: dict[types.FunctionType, bool]) -> Callable[[Any], bool]:
    """Whether these are what they are now: about 1 us for each with defaults or a closure."""
    counted = replacements()
    count, codes = counted.count, [function.__code__ for function in functions]
    looks: list[tuple[Callable[..., Any], types.FunctionType]] = []
    for function, is_named in functions.items():
        if is_named:
            looks.append((classes_in_cells, function))
        elif function.__closure__ or _defaults(function) != (None, None):
            looks.append((_parts, function))
    kept = _looked(looks)  # so that their numbers go to no others
    held = content_of(kept)

    def is_same(_: Any, _kept: Any = kept) -> bool:
        if counted.count != count and [f.__code__ for f in functions] != codes:
            return False
        return not looks or content_of(_looked(looks)) == held

    return is_same


def _looked(looks: Sequence[tuple[Callable[..., Any], types.FunctionType]]) -> list[Any]:
    return [look(function) for look, function in looks]


def _defaults(function: types.FunctionType) -> tuple[Any, Any]:
    return function.__defaults__, function.__kwdefaults__


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    # An empty cell, of a name that has no value yet, is one like any other.
    cells = [getattr(cell, "cell_contents", _NOTED) for cell in function.__closure__ or ()]
    return *_defaults(function), cells
