"""The linter: what in a program cannot be captured as a CUDA graph, found before the capture is tried.

A capture that fails leaves the process unusable, and one that succeeds may have baked in what should
change. So the program runs once for real, watched, and everything that a graph cannot hold is named with
operator and line. What looking cannot judge is a doubt, which `child_trial` settles.
"""

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import told_of_capture
from ridgeline.capture.casts import autocast_of
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.lint.child_worker import is_trial
from ridgeline.lint.idle_draws import IdleDraw
from ridgeline.lint.lint_lines import changing_lines
from ridgeline.lint.lint_observer import Doubt, Observation, watching
from ridgeline.lint.lint_optimizer import optimizer_findings
from ridgeline.lint.lint_rules import FROM_HOST, Finding
from ridgeline.lint.python_state import changed_in_python
from ridgeline.optimizer_forms import sparse_modules
from ridgeline.optimizers.capturable import make_capturable
from ridgeline.plan import Plan
from ridgeline.reach.generators import random_state_kept
from ridgeline.reach.loss import scalar_loss
from ridgeline.reach.undo import Undo
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.state.saved_state import buffers_attached, module_kept
from ridgeline.state.snapshot import Snapshot
from ridgeline.tensors.batch import split
from ridgeline.tensors.copies import own_copy


class Lint(NamedTuple):
    """What was found: what cannot be captured, and what could not be judged.

    `optimizer` says what keeps the optimizer out of a graph; it then steps beside the graph of the rest.
    `idle_draws` are to be repeated beside each replay.
    """

    findings: tuple[Finding, ...]
    doubts: tuple[Doubt, ...]
    optimizer: tuple[Finding, ...] = ()
    idle_draws: tuple[IdleDraw, ...] = ()


class StepToLint(Protocol):
    """What is inspected: a training step, whose form is made of what is found here."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    plan: Plan
    clip_norm: float | None

    @property
    def synchronizer(self) -> object:
        """Makes the workers' gradients one; None for a worker alone."""
        ...

    def __call__(self, batch: Any, recorder: Recorder) -> Tensor:
        """One step; its loss."""
        ...

    def as_written(self) -> contextlib.AbstractContextManager[None]:
        """Steps inside run the user's code operator by operator."""
        ...


def inspect_step(body: StepToLint, batch: Any, *, device: str | torch.device) -> Lint:
    """Run a training step twice, as written and operator by operator, and watch the second time.

    The first run fills what programs make once (caches, optimizer state). Parameters, buffers, optimizer
    and random state (torch, Python, numpy) are put back, and what model and loss keep in Python; gradients
    are None afterwards. What of that the second run changed is a finding, see `changed_in_python`.

    With a reducer, or with an optimizer that no graph can hold, only loss and gradients are computed, without
    accumulating them: no hook of the reducer runs, so no collective starts, and workers may lint each on its
    own. The optimizer is then judged by its settings alone.

    Args:
        body: The step. Its optimizer may be as the user made it: what `make_capturable` changes is no
            finding.
        batch: On the device.
        device: What is to be captured, `cuda`; `cpu` to lint a step on a host without a GPU.

    Raises:
        WorkloadError: the loss is not a scalar that depends on the parameters.

    Cost: Two eager steps, the watched one some ten times slower, and a copy of the state.
    """
    kind = torch.device(device).type
    optimizer = body.optimizer
    judged = (*optimizer_findings(optimizer), *_sparse_findings(body.model))
    runs_whole = body.synchronizer is None and not judged
    seen = Observation(kind, sys._getframe())  # noqa: SLF001 - lines are searched up to here
    seen.ignores_torch_optimizers = kind != "cuda"
    seen.takes_sparse_gradients = bool(judged)
    seen.take_idle_draws()
    recorder = Recorder(HostClock())
    recorder.listener = functools.partial(setattr, seen.lines, "phase")
    before = Snapshot(body.model, optimizer, body.loss_fn)
    outside = Undo(body.model, body.loss_fn, optimizer, batch, spared=before.tensors())
    try:
        with (
            random_state_kept(),
            buffers_attached(body.model),
            body.as_written(),
            # Operators are watched, also those of what the script itself has given to `torch.compile`.
            torch.compiler.set_stance("force_eager"),
        ):
            # Inside of what is put back, since this changes settings and state of the optimizer.
            if kind == "cuda" and not judged:
                make_capturable(optimizer, next(iter(body.model.parameters())).device)
            for watch in (contextlib.nullcontext(), watching(seen)):
                copied = _copied(batch, kind)
                python = Undo(body.model, body.loss_fn, values=False, arrays=True)
                with watch, as_if_capturing(kind, seen):
                    if runs_whole:
                        body(copied, recorder)
                    else:
                        _compute_gradients(body, copied, recorder)
            # Before anything is put back, or no change would be left to see.
            judge_python(seen, python, before.tensors())
    except (TypeError, NotImplementedError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any("_higher_order_ops" in frame.filename for frame in frames):
            raise
        raise ObstacleError(
            "wanted operators of tensors, got one that takes functions, such as torch.cond; compute with "
            "tensors, for example torch.where, or use an execution mode without a graph"
        ) from error
    finally:
        # A frame holds all local variables of its callers, and findings outlive this call.
        seen.lines.outermost = None
        outside.restore()
        before.restore()
    return Lint(seen.findings, seen.doubts, judged, seen.idle.draws if seen.idle else ())


def inspect_callable(fn: Callable[..., Any], inputs: Any, *, device: str | torch.device) -> Lint:
    """Call a function or module twice without gradients, and watch the second time.

    Parameters and buffers of a module, and random state, are put back; the inputs are copied first.

    Args:
        fn: A function, or a module in the mode (training or not) in which it will run.
        inputs: Its positional inputs as a tuple, or the only one.
        device: What is to be captured, `cuda`; `cpu` to lint on a host without a GPU.

    Cost: Two eager calls, the watched one some ten times slower, and a copy of a module's state.
    """
    kind = torch.device(device).type
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    seen = Observation(kind, sys._getframe())  # noqa: SLF001 - lines are searched up to here
    try:
        with torch.no_grad(), module_kept(module):
            for watch in (contextlib.nullcontext(), watching(seen)):
                copied = _copied(given, kind)
                with watch:
                    fn(*copied)
    finally:
        seen.lines.outermost = None
    return Lint(seen.findings, (*seen.doubts, *_fast_paths(module)))


def check_capturable(findings: Sequence[Finding], *, is_compiled: bool = True) -> None:
    """Refuse a capture for which there are findings.

    Args:
        findings: All.
        is_compiled: Whether they are of what the compiler makes of the whole step. It may make on the device
            what the code makes on the host, so that this is no obstacle for it.

    Raises:
        ObstacleError: names each operator and line, why it cannot be captured, and what to do.
        CaptureError: likewise, where a compiled step may do without.
    """
    if findings:
        listed = "".join(f"\n- {one}" for one in findings)
        may_compile = not is_compiled and all(one.rule in FROM_HOST for one in findings)
        raise (CaptureError if may_compile else ObstacleError)(
            f"wanted a program that a CUDA graph can hold, got {len(findings)} "
            f"{'obstacle' if len(findings) == 1 else 'obstacles'}; nothing was captured. Remove them, or use "
            f"an execution mode without a graph:{listed}"
        )


def is_doubtful(lint: Lint) -> bool:
    """Whether a capture should be tried in a child process first: nothing found, but not all judged.

    Never in such a child itself.
    """
    return bool(lint.doubts) and not lint.findings and not is_trial()


def judge_python(seen: Observation, python: Undo, state: Iterable[Tensor]) -> None:
    """Report what the watched run changed in Python: a replay would never do it again."""
    # The attribute that got another tensor would be found once more.
    if any(finding.rule == "moved-state" for finding in seen.findings):
        return  # said with its line
    # A view of a weight, made again in each step, carries nothing on.
    seen.forget_read([*state])
    what = changed_in_python(python, seen.has_read)
    if what:
        line = changing_lines(what, seen.codes)
        seen.report_at("python-state", f"a change of {what} in Python", line)


@contextlib.contextmanager
def as_if_capturing(kind: str, seen: Observation) -> Iterator[None]:
    """Programs go the way that a capture takes, but for optimizers, which refuse settings of their own."""
    if kind != "cuda":
        yield
        return
    asked = torch.cuda.is_current_stream_capturing

    def is_capturing() -> bool:
        return seen.lines.phase != "optimizer" or asked()

    with told_of_capture(is_capturing):
        yield


def _compute_gradients(body: StepToLint, batch: Any, recorder: Recorder) -> None:
    """Loss and gradients of the first micro-batch; gradients are returned, not accumulated."""
    part, _ = split(batch, body.plan.accumulate)[0]
    recorder.mark("forward")
    place = next(iter(body.model.parameters())).device.type
    with autocast_of(body.plan.precision, place):
        loss = scalar_loss(body.loss_fn(body.model, part))
    recorder.mark("backward")
    trained = [parameter for parameter in body.model.parameters() if parameter.requires_grad]
    # Accumulated, they would call the hooks by which a reducer sends them.
    torch.autograd.grad(loss, trained, allow_unused=True)


def _copied(batch: Any, device: str) -> Any:
    """Copies of what is on the device, so that a step which changes its batch leaves no trace."""

    def copy(leaf: Any) -> Any:
        is_there = isinstance(leaf, Tensor) and leaf.device.type == device
        return own_copy(leaf) if is_there else leaf

    return pytree.tree_map(copy, batch)


def _sparse_findings(model: nn.Module) -> tuple[Finding, ...]:
    return tuple(
        Finding("sparse", "a sparse gradient", f"the weight of {name or 'the model'}")
        for name in sparse_modules(model)
    )


def _fast_paths(module: Any) -> tuple[Doubt, ...]:
    """Layers that choose another implementation when unobserved."""
    watched = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if not isinstance(module, nn.Module) or module.training:
        return ()
    names = dict.fromkeys(type(m).__name__ for m in module.modules() if isinstance(m, watched))
    return tuple(Doubt(f"the inference path of nn.{name}", "the program itself") for name in names)
