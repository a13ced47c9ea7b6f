"""How torch's compiler is called: with plain options, or for programs that a GPU replays."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as autograd_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ridgeline.capture.interception import has_functions
from ridgeline.errors import CaptureError, first_line
from ridgeline.programs.distinct_results import kept_distinct, memory_of_results
from ridgeline.programs.draws import drop_all_without_draws, kept_apart, narrow_permutations
from ridgeline.programs.extremes import rounding_options
from ridgeline.programs.masks import use_causal_attention
from ridgeline.programs.parts import compile_in_parts
from ridgeline.programs.resizing import CACHEABLE, use_own_gradients
from ridgeline.programs.watches.added import with_guards
from ridgeline.programs.watches.hooks_of_all import no_hooks_of_all_modules
from ridgeline.tensors.copies import is_noted

FAILURES = (
    RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ImportError,
)  # fmt: skip
"""What tracing and compiling raise on programs that they cannot take; they have no common base class."""


Options = dict[str, str | int | bool | dict[str, str] | Callable[..., Any]]

ADVICE = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    r"\s*Online softmax is disabled on the fly",
)
"""How the compiler's advice begins on what a plan decides (its precision) or a user cannot change."""


NOTED = (
    "what reads tensors whose sign or conjugation is only noted runs operator by operator; "
    ".resolve_conj() or .resolve_neg() writes it into them"
)
"""torch's compiler (2.13) takes elements as they are written, whatever is noted, and says nothing."""


def plain_options(*, owns_random: bool = False) -> Options:
    """The compiler's defaults, but that gradients are right where forward writes what backward reads.

    And that products with 0 and sums with a factor are what is written, see `joint_passes`.

    What `resizing` puts into programs may be cached.

    Args:
        owns_random: The program may draw random numbers of its own. They differ from torch's: without, a
            program drops out what the eager one would, so that its results can be compared.
    """
    # It imports the compiler, which takes a second.
    from ridgeline.programs.joint_passes import KeepWritten, SaveWrites

    options: Options = {
        "joint_custom_pre_pass": KeepWritten(),
        "joint_custom_post_pass": SaveWrites(),
        "unsafe_marked_cacheable_functions": CACHEABLE,
    }
    return options if owns_random else {**options, "fallback_random": True}


def plain_arguments(
    *, owns_random: bool = False, bucket_bytes: tuple[int, ...] = (), notes: list[str] | None = None
) -> dict[str, Any]:
    """Arguments of `torch.compile` and `Module.compile`; what takes a second shape is compiled for any.

    Args:
        owns_random: See `plain_options`.
        bucket_bytes: Limits of the buckets of gradients by which programs are cut; none: they are not.
        notes: Receives why one is not cut.
    """
    if not bucket_bytes:
        return {"backend": _plain_backend(owns_random)}
    backend = functools.partial(
        compile_in_parts,
        compile_graph=functools.partial(compile_plain, owns_random=owns_random),
        bucket_bytes=bucket_bytes,
        notes=[] if notes is None else notes,
    )
    return {"backend": with_guards(backend)}


@functools.cache
def _plain_backend(owns_random: bool) -> Callable[..., Any]:
    """One object for each, by which dynamo knows again what was compiled with it."""
    return with_guards(functools.partial(compile_plain, owns_random=owns_random))


def ignore_advice() -> None:
    """Have this process not pass on the compiler's `ADVICE` from now on; other warnings stay as they are.

    It comes whenever something is compiled, which may be in any call of a compiled step.
    """
    for message in ADVICE:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def replayed_options(*, announces: bool = False, combines: bool = True) -> Options:
    """For programs that a GPU replays as a CUDA graph, where the host's time counts for nothing.

    Weight gradients run beside the rest of the backward pass, and small kernels that do not depend on
    each other become one.

    Args:
        announces: Gradients are sent to other workers as soon as they are ready.
        combines: Small kernels become one.

    Source: resnet18 in bfloat16 at batch 32 on an H200: 1.26 ms a step without, 1.16 ms with weight
    gradients beside, 1.03 ms with both; GPT-2 at 8 x 1024 tokens, ResNet-50, ViT-B/16: no difference.
    Combined kernels made BERT-base 1.37 times and VGG-16 1.1 times slower.
    """
    from ridgeline.programs.beside.gradients import GradientsBeside
    from ridgeline.programs.beside.operators import REQUIRED

    options: Options = {**plain_options(), **REQUIRED, "combo_kernels": combines}
    options["post_grad_custom_post_pass"] = GradientsBeside(announces=announces)
    if announces:
        # Else the compiler puts what nothing waits for as late as its memory allows.
        options["reorder_for_peak_memory"] = False
    return options


def replayed_arguments(
    notes: list[str], *, announces: bool = False, combines: bool = True
) -> dict[str, Any]:
    """Arguments of `torch.compile` and `Module.compile` for programs that a GPU replays as a CUDA graph.

    `notes` receives what was done differently, and why; all else as for `replayed_options`.
    """
    backend = functools.partial(
        compile_replayed, notes=notes, announces=announces, combines=combines
    )
    # A graph is captured for fixed shapes, so nothing is gained by a program for any.
    return {"dynamic": False, "backend": with_guards(backend)}


def compile_replayed(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    notes: list[str],
    announces: bool = False,
    combines: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph, its backward included, with `replayed_options`, or if that fails plainly.

    The options are young in the compiler. Where it fails, nothing has run yet, so that the plain options
    simply take over.

    `notes` is notified of a failure; `announces` and `combines` as for `replayed_options`; `settings` are
    more options, for both attempts.

    Cost: Compiles, twice after a failure.
    """
    if not _is_readable(graph, inputs):
        notes.append(NOTED)
        return by_operators(graph)
    _rewrite(graph)
    again = copy_of(graph)  # the compiler changes the graph that it is given
    options = replayed_options(announces=announces, combines=combines)
    try:
        with autograd_config.patch(force_non_lazy_backward_lowering=True):
            return _compiled(graph, inputs, options, settings)
    except FAILURES as error:
        notes.append(
            "compiled with plain options, since with those for replays it failed: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        return compile_plain(again, inputs, settings=settings)


def compile_plain(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    owns_random: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph, which changes, with the plain options and `settings`; as it is where `NOTED` says so.

    Cost: Compiles.
    """
    if not _is_readable(graph, inputs):
        warnings.warn(NOTED, stacklevel=2)
        return by_operators(graph)
    _rewrite(graph)
    return _compiled(graph, inputs, plain_options(owns_random=owns_random), settings)


def _is_readable(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    """Whether the compiler reads the inputs as they count; a CaptureError for functions of their own."""
    _require_no_functions(graph)
    return not any(map(_is_noted, inputs))


def _compiled(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    options: Options,
    settings: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    ignore_advice()
    name_unreadable_libraries()
    # Before it is compiled, since values without data are gone from the graph afterwards.
    memory = memory_of_results(graph)
    # Later ones win: what a graph's operators need comes before what the machine likes, and a caller's wish
    # last.
    patches = {**options, **rounding_options(graph), **(settings or {})}
    # Hooks of tensors are modules of TorchDynamo's.
    with no_hooks_of_all_modules(), kept_apart(), _sizes_of_data(graph, inputs):
        compiled: Any = compile_fx(graph, inputs, config_patches=patches)
    return kept_distinct(compiled, memory)


def name_unreadable_libraries() -> None:
    """Have the compiler of this process say which file it cannot load, and what to do; again, too.

    It (2.11 to 2.13) takes each library in its cache for whole, also one that it was ended while writing.
    """
    from torch._inductor.codecache import CppCodeCache

    load_in_torch: Any = CppCodeCache.__dict__["_load_library"].__func__
    if load_in_torch.__module__ == __name__:
        return

    def load(cls: Any, path: str, key: str) -> Any:
        try:
            return load_in_torch(cls, path, key)
        except (ImportError, OSError) as error:
            # Its module is there already, empty.
            sys.modules.pop(f"{key}.{getattr(cls, 'entry_function', '')}", None)
            what = str(error).removeprefix(f"{path}: ")
            raise ImportError(
                f"wanted a library of torch's compiler that can be loaded, got {path}: {what}; if a process "
                "was ended while it compiled, remove this file and start again"
            ) from error

    CppCodeCache._load_library = classmethod(load)  # type: ignore[assignment]  # noqa: SLF001 - it has no hook


@contextlib.contextmanager
def _sizes_of_data(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, the compiler leaves sizes open that the data of a traced graph decides, as that of `x[mask]`.

    TorchDynamo brings a context of this kind along with each of its graphs. On a GPU, which replays all that
    is traced as a graph of fixed sizes, such a graph is refused.
    """
    sized = any(node.meta.get("unbacked_bindings") for node in graph.graph.nodes)
    is_on_gpu = any(isinstance(one, Tensor) and one.is_cuda for one in inputs)
    if not sized or is_on_gpu or TracingContext.try_get() is not None:
        yield
        return
    # What the trace called the sizes is not what they are called here.
    for node in graph.graph.nodes:
        node.meta.pop("unbacked_bindings", None)
        node.meta.pop("val", None)
    fakes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(fakes)):
        yield


def _require_no_functions(graph: fx.GraphModule) -> None:
    """Refuse what torch's compiler (2.13) reads wrongly without a word: plain tensors mixed with others."""
    # Inputs only: what the program makes itself is made by torch's own operators.
    for node in graph.graph.find_nodes(op="placeholder"):
        if has_functions(getattr(node.meta.get("grapharg"), "example", None)):
            kind = type(node.meta["grapharg"].example).__name__
            raise CaptureError(
                f"wanted tensors whose functions are torch's, got a {kind} with a __torch_function__ of its "
                "own, which torch's compiler does not follow; use mode or execution 'eager'"
            )


def _rewrite(graph: fx.GraphModule) -> None:
    """What the compiler would not do itself; the results stay."""
    use_own_gradients(graph)
    use_causal_attention(graph)
    narrow_permutations(graph)
    drop_all_without_draws(graph)


def require_written(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of which torch's compiler would lose signs; see `NOTED`.

    Raises:
        CaptureError: there is one, of this shape.
    """
    for tensor in filter(_is_noted, tensors):
        raise CaptureError(
            f"wanted tensors that compiled code can read, got one of shape {tuple(tensor.shape)} whose sign "
            "or conjugation is only noted; write it with .resolve_conj() or .resolve_neg(), or use mode "
            "'eager'"
        )


def _is_noted(value: Any) -> bool:
    return isinstance(value, Tensor) and is_noted(value)


def by_operators(graph: fx.GraphModule) -> Callable[..., Any]:
    """Runs a graph operator by operator, not as a module: hooks of all modules are not called around it.

    The very functions in it are called, whatever torch's names stand for by then, and no
    `__torch_function__` of modes or tensors: torch's compiler has read through these, and put what they do
    into the graph.
    """

    def run(*inputs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - torch's own means to call operators only
            return fx.Interpreter(graph).run(*inputs)

    return run


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own and the same tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = fx.GraphModule(module, graph)
    copied.meta.update(module.meta)
    return copied
