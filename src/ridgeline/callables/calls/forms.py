"""The forms of a callable: as written, as TorchScript, compiled whole, compiled by region, packaged.

A form is called with the original arguments and gives the original result, without gradients. Tensors of
the module are used by reference, so that updates in place are seen.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.jit.frontend import FrontendError
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.compiling import TracedFunction
from ridgeline.callables.calls.flat_results import flat, is_flat, rebuilt
from ridgeline.callables.calls.repeated import DistinctCall, DistinctModule, as_written
from ridgeline.capture.casts import fresh_casts
from ridgeline.capture.unchecked import without_checks
from ridgeline.errors import CaptureError, first_line
from ridgeline.execution import Form
from ridgeline.optimizers.shared_memory import WrittenMemory
from ridgeline.programs import inductor
from ridgeline.programs.compiling import CompiledRegions, many_variants
from ridgeline.programs.inductor import FAILURES
from ridgeline.programs.watches.class_watch import ClassWatch
from ridgeline.reach.reach import Reach, names_in
from ridgeline.reach.step_code import place_of, step_code
from ridgeline.reach.undo import Undo
from ridgeline.tensors.nests import tensors_in
from ridgeline.units import counted

_TURNING = frozenset({"enable_grad", "set_grad_enabled"})
_OFF = "which stay off there, and compiled code does not know that"


class CallableForm(NamedTuple):
    """A callable in one of its forms.

    `needs_layout`: arguments must have the strides of the example. `close` gives up what it holds. `written`
    is the memory that calls write.
    """

    call: Callable[..., Any]
    needs_layout: bool = False
    notes: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None
    written: WrittenMemory = WrittenMemory(())


def make_form(form: Form, fn: Callable[..., Any], args: tuple[Any, ...]) -> CallableForm:
    """The form of a callable for arguments like `args`.

    Raises:
        CaptureError: the program cannot be brought into that form.

    Cost: Compiles; the first call may compile as well.
    """
    makers = {
        "script": _script, "compiled": _compiled, "regional": _regional, "packaged": _packaged,
    }  # fmt: skip
    return makers[form](fn, args) if form in makers else CallableForm(without_gradients(fn))


def without_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under `no_grad`, which is entered only if gradients are on: entering takes microseconds."""
    is_on = torch.is_grad_enabled

    def call(*args: Any) -> Any:
        if not is_on():
            return fn(*args)
        with torch.no_grad():
            return fn(*args)

    return call


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Outside inference mode, whose tensors cannot be distinguished once changed, and with fresh casts.

    Value checks of distributions are off, as while the program is read.
    """
    with torch.inference_mode(False), fresh_casts(), without_checks():
        yield


def _script(fn: Callable[..., Any], args: tuple[Any, ...]) -> CallableForm:
    """TorchScript from the source, or from a trace where the source is beyond it; weights stay live."""
    why = ""
    with torch.no_grad(), warnings.catch_warnings():
        # torch marks TorchScript as deprecated; on CPU it still serves small programs well.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        expected = fn(*args)
        method: Callable[..., Any] | None = None
        try:
            method = _method(torch.jit.script(as_written(fn)))
            if isinstance(fn, DistinctCall | DistinctModule):
                method = DistinctCall(method, fn.repeats)
            given = method(*args)  # some sources are refused only as they run
            # A named tuple comes back as another one, and code may ask whether it is scripted.
            if pytree.tree_structure(given) != pytree.tree_structure(expected):
                why = "TorchScript of the source gives results in another structure"
        except (*FAILURES, OSError, SyntaxError, FrontendError, torch.jit.Error) as error:
            why = f"TorchScript cannot read the source ({brief(error)})"
        if why or method is None:
            method = _traced(fn, args, expected)
    return CallableForm(
        without_gradients(method), notes=(f"script: traced, since {why}",) if why else ()
    )


def _method(program: Any) -> Callable[..., Any]:
    """A scripted module's own method skips what `Module.__call__` does for hooks."""
    method: Callable[..., Any] = getattr(program, "forward", program)
    return method


def _traced(fn: Callable[..., Any], args: tuple[Any, ...], expected: Any) -> Callable[..., Any]:
    """A trace whose results have the structure of `expected`."""
    has_name = isinstance(fn, nn.Module) or hasattr(fn, "__name__")  # which a trace asks for
    if has_name and is_flat(expected) and is_flat(args):
        return _method(_trace(fn, args, name_of(fn)))
    tensors = tuple(tensors_in(args))
    return rebuilt(_method(_trace(flat(fn, args), tensors, name_of(fn))), expected)


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """A trace, which must leave all objects as they are.

    Sizes are tensors in it, which no key of a dictionary equals: a cache by size is filled once more.
    """
    before = Undo(fn, args, values=False, arrays=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            traced = torch.jit.trace(fn, args, check_trace=False)
        except FAILURES as error:
            raise CaptureError(
                f"wanted TorchScript of {name}, got {brief(error)}; use another mode"
            ) from error
        finally:
            if change := next(before.changes(), None):
                before.restore()
    if change is not None:
        raise CaptureError(
            f"wanted TorchScript of {name}, got a trace that writes where calls do not "
            f"({change.what}): sizes are tensors in it, which no key equals; use another mode"
        )
    baked = [w for w in caught if issubclass(w.category, torch.jit.TracerWarning)]
    if baked:
        raise CaptureError(
            f"wanted TorchScript of {name}, got a trace in which {counted(len(baked), 'value')} read to the "
            f"host would be constants, the first at {baked[0].filename}:{baked[0].lineno}; use another mode"
        )
    num_constants = _num_constants(traced, fn)
    if num_constants:  # equal ones become one, and follow only one of the tensors that they were
        raise CaptureError(
            f"wanted TorchScript of {name}, got a trace in which {counted(num_constants, 'tensor')} from "
            "outside of its modules would be constants; make them buffers, or use another mode"
        )
    return traced


def _num_constants(traced: Any, fn: Callable[..., Any]) -> int:
    """Tensors from outside that a trace holds as constants."""
    graph = getattr(traced, "inlined_graph", None) or traced.graph
    kind = torch._C.TensorType.get()  # noqa: SLF001 - what types of constants are compared with
    nodes = graph.findAllNodes("prim::Constant")
    values = [node.t("value") for node in nodes if node.output().type().isSubtypeOf(kind)]
    # By address: a constant of a graph is another tensor object on the same memory.
    outside = {t.data_ptr() for t in Reach(fn).tensors if t.layout == torch.strided}
    return sum(value.data_ptr() in outside for value in values)


def _compiled(fn: Callable[..., Any], args: tuple[Any, ...]) -> CallableForm:
    """Traced and compiled as one graph; by `torch.compile` where it is not one graph."""
    try:
        return CallableForm(TracedFunction(fn, args).compile(), needs_layout=True)
    except CaptureError as error:
        return compiled_with_guards(fn, args, str(error))


def compiled_with_guards(fn: Callable[..., Any], args: tuple[Any, ...], why: str) -> CallableForm:
    """By `torch.compile`, which compares its guards at every call, and may read in several pieces.

    The notes say `why` it is not compiled as one graph.

    Raises:
        CaptureError: the compiler cannot take it.
    """
    note = f"compiled: by torch.compile with its guards at every call, since: {why}"
    inductor.ignore_advice()

    def program(*given: Any) -> Any:
        """Not the module itself: compiled it would be another one, with hooks of all modules around it."""
        return fn(*given)

    compiled = _with_guarded_hooks(torch.compile(program, **inductor.plain_arguments()))
    classes, plain = ClassWatch(fn), without_gradients(fn)
    turning = [place_of(code) for code, _ in step_code(fn, fn) if _TURNING & names_in(code)]

    def call(*given: Any) -> Any:
        if turning and torch.is_inference_mode_enabled():
            return plain(*given)
        classes.forget_stale_programs()
        return compiled(*given)

    try:
        call(*args)
    except FAILURES as error:
        raise CaptureError(
            f"wanted {name_of(fn)} compiled, got {brief(error)}; {note}; use another mode"
        ) from error
    notes = [note]
    if turning:
        notes.append(
            f"calls in inference mode ran as written: {turning[0]} may turn gradients on, {_OFF}"
        )
    return CallableForm(call, notes=tuple(notes))


def _regional(fn: Callable[..., Any], args: tuple[Any, ...]) -> CallableForm:
    """The repeated blocks of a module compiled, in a copy that shares its tensors."""
    if not isinstance(fn, nn.Module):
        raise CaptureError(
            f"wanted a module with repeated blocks for mode 'regional', got {name_of(fn)}; give the "
            "module itself, or use mode 'compiled'"
        )
    # The copy is used nowhere else, so its blocks stay switched to their compiled form.
    model = shared_copy(fn)
    regions = CompiledRegions(model)
    active = contextlib.ExitStack()
    active.enter_context(regions.active())
    call = _with_guarded_hooks(model)
    try:
        call(*args)
    except FAILURES as error:
        active.close()
        raise CaptureError(
            f"wanted the blocks of {name_of(fn)} compiled, got {brief(error)}; use another mode"
        ) from error
    return CallableForm(call, notes=(regions.note,), close=active.close)


def _with_guarded_hooks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients; whenever `torch.compile` compiles inside, it looks at the hooks of modules.

    A call with other inputs may compile, and equal blocks share their code.
    """
    call = without_gradients(fn)

    def guarded(*args: Any) -> Any:
        with many_variants():
            return call(*args)

    return guarded


def _packaged(fn: Callable[..., Any], args: tuple[Any, ...]) -> CallableForm:
    from ridgeline.packages.callables import package_callable
    from ridgeline.packages.compilers import working_compiler

    packaged = package_callable(fn, args)
    note = working_compiler().note
    return CallableForm(packaged, notes=(note,) if note else (), close=packaged.close)


def shared_copy(module: nn.Module) -> nn.Module:
    """A copy of a module's structure around the same parameters and buffers.

    Raises:
        CaptureError: a part of it cannot be copied.
    """
    # All that can be reached, not parameters alone: lists and closures hold tensors, too.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in Reach(module).tensors}
    try:
        return copy.deepcopy(module, memo)
    except FAILURES as error:
        raise CaptureError(
            f"wanted a copy of {name_of(module)} to compile its blocks, got {brief(error)}; use mode "
            "'compiled'"
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """What people call the callable."""
    fn = as_written(fn)
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def brief(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"
