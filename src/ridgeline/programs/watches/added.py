"""Guards that torch's compiler leaves out, added to its own for every piece of a program that it compiles.

To it -0.0 equals 0.0, a tuple cannot change, whatever lists, dictionaries and sets are in it, and an
`OrderedDict` has no order of its own. Nor does it compare what is missing: a key that a method looks for and
does not find (so in `os.environ`), or an attribute in `vars(x)`, or one whose `AttributeError` code catches.
And it takes for granted which hooks of all modules there are, which module an `import` gives, what a class
finds in its metaclass, classes in closures, what abstract classes and protocols take for their instances,
what a dictionary of the user's own class finds in that, names put among Python's, which `object()` there is,
which objects are one, what tensors and data classes hold, and settings that choose kernels; torch 2.11 also
which methods an object holds itself.
"""

import builtins
import collections
import functools
import operator
import os
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch._dynamo import guards
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Guard

from ridgeline.programs.watches.asked import asked_of, note_asked
from ridgeline.programs.watches.caught import catches_unknown, has_names, not_of_torch
from ridgeline.programs.watches.comparing import (
    UNKNOWN,
    compare,
    compare_by_name,
    content_of,
    leave_untimed,
    of_name,
    value_of,
)
from ridgeline.programs.watches.functions import note_functions, noted_functions, require_functions
from ridgeline.programs.watches.hooks_of_all import hooks_of_all_modules, no_module_has_hooks
from ridgeline.programs.watches.identities import (
    asks_identity,
    follow_identities,
    is_nan,
    may_be_one,
    pattern,
    plain_names,
)
from ridgeline.programs.watches.imports import (
    Import,
    are_current,
    follow_imports,
    imports_of,
    own_builtins,
    require_module,
    require_names_of_python,
)
from ridgeline.programs.watches.instances import (
    ask_for_slots_anew,
    classes_in_cells,
    follow_instances,
    instance_checks,
    names_attributes,
    require_class_of_plain,
    require_members,
    require_metaclass,
    require_shapes,
)
from ridgeline.programs.watches.left_to_python import (
    is_marked,
    is_plain_value,
    leave_to_python,
)
from ridgeline.programs.watches.made_keys import compare_made_keys
from ridgeline.programs.watches.objects.class_variables import compare_class_variables
from ridgeline.programs.watches.objects.containers import read_containers, require_limit
from ridgeline.programs.watches.objects.getters import read_getters
from ridgeline.programs.watches.objects.held_names import require_held_names
from ridgeline.programs.watches.objects.values import answer_truth, require_value
from ridgeline.programs.watches.settings import Ask, operators_of, settings_of
from ridgeline.reach.owners import is_users, is_users_class
from ridgeline.reach.reach import names_in

Backend = Callable[..., Callable[..., Any]]
_GUARDED = "_ridgeline_guarded"
_check_in_torch: Any = guards.CheckFunctionManager.__init__
_NO_OBJECTS = (type, types.ModuleType, Tensor, dict)
_KEY_ERRORS = frozenset({"KeyError", "LookupError", "Exception", "BaseException"})
_ATTRIBUTE_ERRORS = frozenset({"AttributeError", "Exception", "BaseException"})
_DICTIONARIES = frozenset({"__dict__", "vars"})
_ENVIRONMENT = frozenset({"environ", "getenv", "environb", "getenvb"})
_CLASS_VARIABLE = re.compile(
    r"^(?:dict\()?type\((.+)\)(?:(?:\.__mro__\[\d+\])?\.__dict__\)\['\w+'\]|\.\w+)$"
)
"""The compiler's name of what an object found in its class, or code in the class of an object."""
_HIDING = (dict, list, tuple, set, frozenset, collections.deque, threading.local)
"""What the compiler reads in their class first, though an object may hide it."""


def with_guards(compile_piece: Backend, *, watches_process: bool = True) -> Backend:
    """A backend of `torch.compile` whose pieces are compiled again where one of these changes.

    Args:
        compile_piece: The backend.
        watches_process: Also where hooks of all modules, or settings that choose kernels, change; else that
            is compared elsewhere.

    Cost: About 1 us in every call of a piece for each zero that it reads and each such tuple, and for the
        settings; where its code looks for what may be missing, also for each of the objects that it reads.
    """

    @functools.wraps(compile_piece)
    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        # The compiler builds its guards when its backend is done.
        output = InstructionTranslator.current_tx().output
        _add_guards(output, operators_of(graph), watches_process=watches_process)
        compiled = compile_piece(graph, inputs)
        leave_untimed()
        return compiled

    leave_to_python(backend)
    guards.CheckFunctionManager.__init__ = _check  # type: ignore[method-assign]
    follow_imports()
    read_containers()
    read_getters()
    compare_class_variables()
    follow_identities()
    note_functions()
    note_asked()
    ask_for_slots_anew()
    compare_made_keys()
    answer_truth()
    follow_instances()
    return backend


def _check(manager: Any, code: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    """In place of the making of a piece's guards: one without an operator never comes to its backend."""
    if is_marked(getattr(output, "compiler_fn", None)) and not hasattr(output, _GUARDED):
        _add_guards(output, ())
    _check_in_torch(manager, code, output, *args, **kwargs)


def _add_guards(output: Any, operators: Any, *, watches_process: bool = True) -> None:
    """Add ours to what the compiler compares of a piece."""
    setattr(output, _GUARDED, True)
    code = tuple(output.tracing_context.traced_code)
    named = {guard.name: guard.originating_source for guard in output.guards if guard.name}
    kinds, sources = [*_required(code)], [*named.values()]
    output.guards.update({Guard(source, kind) for source in sources for kind in kinds})
    of_process: list[Callable[[Any, Guard], None]] = []
    if watches_process:
        of_process.append(_require_hooks)
        settings = (*settings_of(operators, code), *asked_of(output))
        of_process.append(functools.partial(_require_settings, settings))
    if imports := imports_of(code, output.import_sources, output.global_scope):
        of_process.append(functools.partial(_require_imports, imports))
    if has_names(code, _ENVIRONMENT):
        of_process.append(_require_environment)
    if names := own_builtins(code):
        of_process.append(functools.partial(_require_builtins, names))
    functions = noted_functions(output)
    if functions:
        of_process.append(functools.partial(require_functions, functions))
    of_process.append(functools.partial(require_names_of_python, code, tuple(functions)))
    of_process.append(_held_names(code, sources))
    of_process.append(functools.partial(_require_instances, sources, tuple(functions)))
    of_process.append(functools.partial(_require_identities, sources, code))
    # For what is about the process and no object, one guard is enough, at whichever object.
    output.guards.update({Guard(source, kind) for source in sources[:1] for kind in of_process})


def _required(code: Sequence[types.CodeType]) -> Iterator[Callable[[Any, Guard], None]]:
    """What is compared of every object that the compiler compares, by what code of a program does."""
    yield _require_same
    yield _require_cells
    yield _require_order
    yield require_limit
    yield _require_methods
    yield functools.partial(require_module, frozenset().union(*map(names_in, code)))
    yield require_metaclass
    yield require_members
    yield require_class_of_plain
    yield require_value
    if names_attributes(code):
        yield require_shapes


def _require_same(builder: Any, guard: Guard) -> None:
    """A `Guard` on the signs of zeros, and on what can change in what cannot."""
    value = value_of(builder, guard)
    owner = _CLASS_VARIABLE.search(guard.name)
    if (
        owner
        and is_plain_value(value)
        and isinstance(of_name(builder, owner[1])(builder.scope["L"]), dict)
    ):
        # Below a dictionary of a class of its own nothing is looked at while it has the entries that it had.
        compare_by_name(builder, guard.name, content_of, "")
    if type(value) is object and value is not UNKNOWN:  # a sentinel: compared by identity
        manager, what = builder.get_guard_manager(guard), f"{guard.name} changed"
        manager.add_lambda_guard(functools.partial(operator.is_, value), [what], None)
    if _has_zero(value):
        compare(builder.get_guard_manager(guard), content_of, value, f"the sign of {guard.name}")
    if _holds_containers(value):
        # Below a tuple the compiler looks at nothing while its holder holds what it held.
        root, what = builder.guard_manager.root, f"what is held by {guard.name}"
        compare(root, lambda _: content_of(value), None, what)


def _require_cells(builder: Any, guard: Guard) -> None:
    """A `Guard` on the classes in a function's closure."""
    value = value_of(builder, guard)
    if classes_in_cells(value):
        manager = builder.get_guard_manager(guard)
        compare(manager, classes_in_cells, value, f"a class in the closure of {guard.name}")


def _require_order(builder: Any, guard: Guard) -> None:
    """A `Guard` on the order of an ordered dictionary, which its `move_to_end` changes.

    The compiler goes through the dictionary underneath, whose order stays what it was.
    """
    value = value_of(builder, guard)
    if not isinstance(value, collections.OrderedDict) or len(value) < 2:
        return
    # At the root, since managers of dictionaries take no comparisons of ours.
    compare_by_name(builder, guard.name, lambda now: content_of(tuple(now)), "the order of ")


def _held_names(
    code: Sequence[types.CodeType], sources: Sequence[Any]
) -> Callable[[Any, Guard], None]:
    """A `Guard` on the names of what objects hold, by what code of a program does.

    Where code looks for attributes that may be missing, of all. Else of those that have a method for
    attributes they have not, and of containers and `threading.local` of the user's classes: the compiler
    takes what it reads in those for granted, though the object may hide it.
    """
    guards = [Guard(source, _require_same) for source in sources]
    catches_all = any(map(catches_unknown, not_of_torch(code)))
    looks = catches_all or has_names(code, _ATTRIBUTE_ERRORS | _DICTIONARIES)
    with_keys = catches_all or has_names(code, _KEY_ERRORS)
    which = _is_object if looks else _may_hide
    return functools.partial(require_held_names, guards, which, with_keys=with_keys)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) or not isinstance(value, _NO_OBJECTS)


def _may_hide(value: Any) -> bool:
    if not _is_object(value):
        return False
    code = getattr(getattr(type(value), "__getattr__", None), "__code__", None)
    # Python's own have no variables in their classes, and modules hold many of them.
    has_method = code is not None and is_users(code.co_filename)
    return has_method or (isinstance(value, _HIDING) and is_users_class(type(value)))


def _require_methods(builder: Any, guard: Guard) -> None:
    """A `Guard` on the methods that an object holds itself, in place of those of its class."""
    value = value_of(builder, guard)
    if not isinstance(value, _NO_OBJECTS) and _own_methods(value):
        manager = builder.get_guard_manager(guard)
        compare(manager, _own_methods, value, f"a method that {guard.name} holds")


def _require_hooks(builder: Any, _: Guard) -> None:
    root, what = builder.guard_manager.root, "a hook of all modules"
    if hooks_of_all_modules():
        compare(root, lambda _: hooks_of_all_modules(), None, what)
    else:
        root.add_lambda_guard(no_module_has_hooks, [f"{what} changed"], None)


def _require_settings(settings: Sequence[Ask], builder: Any, _: Guard) -> None:
    held = [(ask, ask()) for ask in settings]

    def is_same(_: Any) -> bool:
        for ask, value in held:  # noqa: SIM110 - `all` makes a generator, in every call
            if ask() != value:
                return False
        return True

    what = "a setting of the process or a method of tensors changed"
    builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def _require_imports(imports: tuple[Import, ...], builder: Any, _: Guard) -> None:

    def is_same(_: Any) -> bool:
        return are_current(imports)

    names = ", ".join(one.name for one in imports)
    what = f"a module was replaced that is imported ({names})"
    builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def _require_environment(builder: Any, guard: Guard) -> None:
    compare(builder.guard_manager.root, _environment, None, "a variable of the environment")


def _require_builtins(names: Sequence[str], builder: Any, _: Guard) -> None:
    what = f"a name that was put among Python's ({', '.join(names)})"
    root = builder.guard_manager.root
    compare(root, lambda _: [content_of(vars(builtins).get(name)) for name in names], None, what)


def _require_instances(
    sources: Sequence[Any], functions: Sequence[Any], builder: Any, _: Guard
) -> None:
    values = [value_of(builder, Guard(source, _require_same)) for source in sources]
    for is_same in instance_checks([*values, *functions]):
        what = "what a class takes for its instances changed"
        builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def _require_identities(
    sources: Sequence[Any], code: Sequence[types.CodeType], builder: Any, _: Guard
) -> None:
    guards = [Guard(source, _require_same) for source in sources]
    named = [(guard.name, value_of(builder, guard)) for guard in guards]
    names = plain_names(named, code)
    names += [name for name, value in named if is_nan(value)]
    if asks_identity(code):
        names += [name for name, value in named if may_be_one(name, value)]
    if len(names) > 1:
        compare_by_name(builder, f"({', '.join(names)})", pattern, "which of these are one: ")


def _own_methods(value: Any) -> dict[str, tuple[Any, int]]:
    """Name, function and owner of such methods; the object itself is the owner 0 (so none is kept alive)."""
    # `vars` raises for objects with slots.
    own: dict[str, Any] = getattr(value, "__dict__", {})
    return {
        name: (method.__func__, 0 if method.__self__ is value else id(method.__self__))
        for name, method in own.items()
        if type(method) is types.MethodType
    }


def _environment(_: Any) -> dict[Any, Any]:
    # Copying it as it is held takes 1 us, and decoding it 50.
    return dict(getattr(os.environ, "_data", os.environ))


def _has_zero(value: Any) -> bool:
    """Whether it is a number with a zero in it, whose sign can be another, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_has_zero, value))
    if isinstance(value, complex):
        return 0.0 in (value.real, value.imag)
    return isinstance(value, float) and value == 0.0


def _holds_containers(value: Any) -> bool:
    """Whether it is a tuple with something in it that can change."""
    return isinstance(value, tuple) and any(
        isinstance(part, (list, dict, set)) or _holds_containers(part) for part in value
    )
