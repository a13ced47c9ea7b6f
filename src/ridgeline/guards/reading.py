"""What torch's compiler finds when it reads a program: what that takes for granted, and what it writes.

TorchDynamo interprets bytecode through every call and records each thing that decided what is computed:
attributes at any depth, inherited methods and properties, closures, globals, defaults, dictionaries, hooks,
shapes, strides and dtypes of tensors, autocast and other modes. Captured programs take these guards.
"""

import builtins
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.side_effects import AttributeMutationNew
from torch._dynamo.source import (
    NumpyTensorSource,
    RandomValueSource,
    TorchFunctionModeStackSource,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._guards import TracingContext

from ridgeline.capture.mask_looks import reading
from ridgeline.capture.unchecked import without_checks
from ridgeline.errors import CaptureError
from ridgeline.guards.lenient import read_leniently
from ridgeline.guards.loggers import Unordered, asking, told
from ridgeline.guards.obstacles import obstacle
from ridgeline.guards.results import UNKNOWN, Results, constant_of, inputs_of, results_of, value_of
from ridgeline.guards.saving_hooks import is_of_saving, reads_saving_hooks
from ridgeline.guards.sparse import leave_out_strides
from ridgeline.guards.spoken import spoken
from ridgeline.guards.writes import is_computed, is_of_cached_weights, is_put_back, is_still
from ridgeline.programs.inductor import FAILURES
from ridgeline.programs.watches.added import with_guards
from ridgeline.programs.watches.asked import asked_of
from ridgeline.programs.watches.classes import classes_of
from ridgeline.programs.watches.comparing import names_beside
from ridgeline.programs.watches.functions import noted_functions
from ridgeline.programs.watches.settings import Ask, operators_of, settings_of
from ridgeline.reach.generators import HostGenerators

SETTINGS: dict[str, Any] = {
    # Hooks, defaults and tensors in dictionaries that stayed the same: all are looked at.
    "skip_nnmodule_hook_guards": False,
    "skip_guards_on_constant_func_defaults": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "use_recursive_dict_tags_for_guards": False,
    # Numbers are what they are, and each other one is another program.
    "specialize_float": True,
    "specialize_int": True,
    "automatic_dynamic_shapes": False,
    "allow_rnn": True,
    "trace_autograd_ops": True,
    "side_effect_replay_policy": "silent",
}
"""Of TorchDynamo, while it reads. What a version of torch does not have is left out."""
WEAKLY = "()"
"""In expressions of what weak references refer to, which nobody here may keep alive."""
_OF_RECURRENT = "._flat_weight_refs["
"""Where recurrent layers of torch refer to their own parameters, anew for each that is assigned."""
_TENSOR = object()
"""What stands for a tensor that is assigned."""
_lock = threading.Lock()
_PLAIN = (bool, int, float, str)
"""Classes of values that say all of themselves."""


class UnreadableError(CaptureError):
    """A program that torch's compiler cannot read in one piece."""


class Write(NamedTuple):
    """Something that a program changes besides the elements of tensors.

    Attributes:
        what: An attribute, list, dictionary or variable, as the program gets at it.
        kind: Its type.
        gets_constant: Whether it is an attribute that is assigned a number, a text, or a constant of another
            type; else a tensor, a container or another object.
    """

    what: str
    kind: str
    gets_constant: bool = False


class ProgramReading(NamedTuple):
    """What was found in a program.

    Attributes:
        manager: The compiler's guards: `check(locals)`, and `check_verbose(locals)`, which says what differs.
            Of `settings` and hooks of all modules they say nothing.
        tensors: Expressions of the tensors that it reads, in terms of `L`, its arguments by name, and `G`.
        expressions: Of everything that is compared.
        scope: The names in these expressions but for `L`.
        classes: Of the objects that it looks into.
        code: Of every function that was read.
        writes: What it changes in Python.
        graph: The operators that it comes to, with the shapes of what it takes and gives, and the settings
            that choose kernels, as text.
        settings: Functions that ask for the settings that choose kernels, and for hooks on saved tensors that
            would be in the program, and what they gave.
        kept: Objects that are compared by identity, held so that none gives its place to another.
        takes_host: Whether it takes tensors that lie on the host, and does not make all of those itself.
    """

    manager: Any
    tensors: tuple[str, ...]
    expressions: tuple[str, ...]
    scope: dict[str, Any]
    classes: tuple[type, ...]
    code: frozenset[types.CodeType]
    writes: tuple[Write, ...]
    graph: str
    settings: tuple[tuple[Ask, Any], ...]
    kept: tuple[Any, ...]
    takes_host: bool


def read_program(program: types.FunctionType, arguments: Mapping[str, Any]) -> ProgramReading:
    """Read `program(**arguments)` under the modes in force; it does not run.

    Value checks of `torch.distributions` are off while it is read, and are to be off while guards compare.

    Args:
        program: A function without a closure whose parameters are the names of the arguments.
        arguments: Their values.

    Raises:
        UnreadableError: the compiler cannot read it in one piece; says what stopped it, and where.

    Cost: Tenths of a second, seconds for large networks.
    """
    scope = {**program.__globals__, "__builtins__": builtins.__dict__}
    # The compiler files what it knows under the code object: each reading has one of its own.
    code = program.__code__.replace(co_name=program.__code__.co_name)
    entry = types.FunctionType(code, scope)
    found: list[dict[str, Any]] = []
    results: list[Results] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(_found(graph, results[0]))
        return _end

    with_more = with_guards(backend, watches_process=False)

    @functools.wraps(with_more)
    def reader(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        results.append(results_of(graph))  # first, as it adds guards, to which more are added
        return with_more(graph, inputs)

    # Under a lock: settings and patches below are those of the whole process.
    settings = {key: value for key, value in SETTINGS.items() if hasattr(config, key)}
    settings["ignore_logger_methods"] = told()  # what a program logs is no result of it
    settings["reorderable_logging_functions"] = Unordered((warnings.warn,))
    # What a program draws of Python is drawn before its graph would run.
    before = HostGenerators.now()
    asked: dict[Any, Ask] = {}
    with (
        _lock,
        config.patch(settings),
        without_checks(),
        reading(),
        read_leniently(),
        asking(asked),
    ):
        try:
            torch.compile(entry, backend=reader, fullgraph=True, dynamic=False)(**arguments)
        except _Read:
            pass
        except FAILURES as error:
            raise UnreadableError(
                f"wanted a program that torch's compiler can read in one piece, got {obstacle(error)}"
            ) from error
        finally:
            before.restore()
            torch.clear_autocast_cache()  # where the reading left casts without data
    entries = _debug_get_cache_entry_list(code)
    if not found or not entries:
        raise UnreadableError(
            "wanted a program that torch's compiler can read in one piece, got one that it passed over"
        )
    found[0]["settings"] += tuple((ask, ask()) for ask in asked.values())
    constants = [part for part in entries[0].code.co_consts if not isinstance(part, types.CodeType)]
    # Values that a program returns without computing them are in its code alone.
    found[0]["graph"] += repr(constants)
    return _made(entries[0].guard_manager, found[0], scope, dict(arguments))


# Not an `Exception`, which code that is read may catch.
class _Read(BaseException):
    """Ends the call of a program that was to be read only."""


def _end(*_: Any) -> Any:
    raise _Read


def _found(graph: fx.GraphModule, results: Results) -> dict[str, Any]:
    """What the compiler knows at the end of its reading, before anything is compiled or written."""
    output = InstructionTranslator.current_tx().output
    leave_out_strides(output.input_source_to_sizes_strides)
    effects = output.side_effects
    placeholders = graph.graph.find_nodes(op="placeholder")
    known = [node for node in placeholders if "grapharg" in node.meta]
    arguments = [node.meta["grapharg"] for node in known]
    tensors = {
        id(node.meta.get("example_value")): _expression(node.meta["grapharg"].source)
        for node in known
    }
    modified = effects._get_modified_vars()  # noqa: SLF001 - nothing public says what a program writes
    writes = {
        Write(name, _kind_of(variable), _is_constant(final)): final
        for variable in modified
        # Objects that the program makes are nobody else's yet.
        if not isinstance(variable.mutation_type, AttributeMutationNew)
        and not isinstance(variable, TorchFunctionModeStackVariable)
        and not is_put_back(variable)
        for name, final in _names_of(variable, effects.store_attr_mutations, tensors).items()
        if not is_of_cached_weights(output, variable, name)
    }
    if not _are_modes_left(output.torch_function_mode_stack):
        writes[Write("the modes of torch functions in force", "list")] = UNKNOWN
    if effects.tensor_hooks:
        writes[Write("hooks of tensors", "dict")] = UNKNOWN
    if output.random_calls:
        writes[Write("Python's random numbers", "random.Random")] = UNKNOWN
    writes.update({Write(name, "numpy.ndarray"): UNKNOWN for name in _arrays_written(placeholders)})
    # As text beside the operators: with other kernels the same graph gives other results.
    code = frozenset(TracingContext.get().traced_code)
    settings = tuple((ask, ask()) for ask in settings_of(operators_of(graph), code))
    kernels = [value for _, value in settings]
    settings += tuple((ask, ask()) for ask in asked_of(output))
    if not reads_saving_hooks():
        # The compiler's own look at them takes five calls of Python.
        output.guards.inner.difference_update([g for g in output.guards if is_of_saving(g)])
        settings += ((reads_saving_hooks, False),)
    taken = [*placeholders, *graph.graph.find_nodes(op="get_attr")]
    # With what is inside of a graph: what a checkpoint or a condition calls.
    codes = [part.code for part in graph.modules() if isinstance(part, fx.GraphModule)]
    return {
        "writes": writes,
        "settings": settings,
        "takes_host": any(map(_is_on_host, taken)),
        "tensors": tuple(
            dict.fromkeys(
                _expression(source)
                for source in (
                    *(argument.source for argument in arguments),
                    *results.passed_through,
                )
                if not isinstance(source, RandomValueSource)  # drawn anew in each call
            )
        ),
        "guards": [(guard.create_fn_name(), guard.originating_source) for guard in output.guards],
        "code": code,
        "functions": noted_functions(output),
        "graph": "\n".join(map(str, (*codes, inputs_of(placeholders), results.described, kernels))),
    }


def _are_modes_left(before: Sequence[Any]) -> bool:
    """Whether the program leaves the modes that were in force, whatever it entered meanwhile."""
    stack = InstructionTranslator.current_tx().symbolic_torch_function_state.mode_stack
    return [mode.source for mode in stack] == [
        *map(TorchFunctionModeStackSource, range(len(before)))
    ]


def _arrays_written(placeholders: Iterable[fx.Node]) -> Iterator[str]:
    """Arrays of NumPy whose elements a program sets: to the compiler these are tensors in the same memory."""
    for node in placeholders:
        source = getattr(node.meta.get("grapharg"), "source", None)
        value = node.meta.get("example_value")
        if isinstance(source, NumpyTensorSource) and value is not None and value._version:  # noqa: SLF001
            yield _expression(source.base)


def _is_on_host(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _made(
    wrapper: Any, found: dict[str, Any], scope: dict[str, Any], arguments: dict[str, Any]
) -> ProgramReading:
    names = names_beside(scope)
    sources = dict.fromkeys(_expression(source) for _, source in found["guards"])
    # Before they are evaluated all: the error would keep them, too.
    for name in (*found["tensors"], *sources):
        _check_held(name, names, arguments)
    values = {name: v for name in sources for v in _evaluated(name, names, arguments)}
    # A number or text of a class of the user's own is an object: its class may change.
    objects = {n: value for n, value in values.items() if type(value) not in _PLAIN}
    return ProgramReading(
        manager=wrapper.root,
        tensors=found["tensors"],
        expressions=tuple(values),
        scope=names,
        classes=classes_of((*objects.values(), *found["functions"])),
        code=found["code"],
        writes=tuple(
            write
            for write, final in found["writes"].items()
            # An assignment of what is there already (a flag set in each call) changes nothing.
            # What is computed is not asked for: that would run the user's code.
            if final is UNKNOWN
            or not any(is_still(final, now) for now in _evaluated(write.what, names, arguments))
        ),
        graph=found["graph"],
        kept=(wrapper, *(value for name, value in objects.items() if WEAKLY not in name)),
        settings=found["settings"],
        takes_host=found["takes_host"],
    )


def _check_held(name: str, names: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse a tensor that a weak reference refers to: what is captured would be one more that holds it."""
    if not name.endswith(WEAKLY) or _OF_RECURRENT in name:
        return
    if any(isinstance(value, torch.Tensor) for value in _evaluated(name, names, arguments)):
        raise UnreadableError(
            "wanted tensors that are read where they are held, got one by a weak reference "
            f"({spoken(name)}), which a captured program would keep alive"
        )


def _evaluated(name: str, names: dict[str, Any], arguments: dict[str, Any]) -> Iterable[Any]:
    """The value of an expression of the compiler's, if it is one."""
    try:
        return [eval(name, names, {"L": arguments})]
    except (NameError, SyntaxError, LookupError, AttributeError, TypeError):
        return []


def _expression(source: Any) -> str:
    name = source.name  # a method before torch 2.12
    return str(name() if callable(name) else name)


def _names_of(
    variable: Any, attributes: Mapping[Any, Mapping[str, Any]], tensors: Mapping[int, str]
) -> dict[str, Any]:
    """What the program calls something that it changes: attributes that it assigns with their last values.

    Not those that get the tensor that they held, by `tensors`, the names of those that the program reads.
    """
    own = getattr(variable, "local_name", None) or getattr(variable, "name", None) or "a variable"
    name = _expression(variable.source) if variable.source is not None else str(own)
    assigned = {
        key: value
        for key, value in attributes.get(variable, {}).items()
        if key.isidentifier() and key != "cell_contents"
    }
    if not assigned:
        held = constant_of(variable)
        return {name: held if type(held) is set else UNKNOWN}
    found: dict[str, Any] = {}
    for key, value in assigned.items():
        place, held = f"{name}.{key}", value_of(value)
        if is_computed(variable, key):
            found[place] = UNKNOWN
        elif held is None:
            found[place] = constant_of(value)
        elif tensors.get(id(held)) != place:
            found[place] = _TENSOR
    return found


def _is_constant(final: Any) -> bool:
    return final is not _TENSOR and final is not UNKNOWN and type(final) not in (list, dict)


def _kind_of(variable: Any) -> str:
    try:
        return str(variable.python_type_name())
    except NotImplementedError:
        return type(variable).__name__
