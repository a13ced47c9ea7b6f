"""Steps that return while the last buckets are on their way, whose parameters are updated when they are read.

Of a reducer that holds buckets (see `synchronisation.holding`), the others are received and updated as ever.
Those that were held leave with the first layers first; their parameters are `unread` from then on. The next
forward pass so waits for the first layers alone, while later ones still travel, and computes beside them.

An update takes the settings that the optimizer's groups had in its own step, whatever a scheduler did since.
All is updated before the next backward pass, and before the optimizer's state is saved or loaded. Results are
those of steps that wait, to the bit: each element is updated by the same operations with the same numbers.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.optimizer_calls import update
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.outside_writes import OutsideWrites
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.unread import make_plain, make_unread
from ridgeline.runtime.sync.watched_state import unwatch_state, watch_state

as_they_are: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
)
"""Inside, parameters are looked at without being updated."""


READING = ("forward", "micro/")
"""The frames in which a step reads its parameters."""

_open: "weakref.WeakSet[HeldUpdate]" = weakref.WeakSet()
"""Those of all steps of this process; two of them may train the same parameters."""


class HeldUpdate:
    """Exchanges gradients in every step, and updates the parameters of held buckets late; a `Synchronizer`.

    Args:
        model: Plain parameters, and no TorchScript.
        optimizer: Updates each element by itself.
        reducer: Holds buckets.

    Attributes:
        overhead_ns: As of the reducer.
        on_update: Called with the number of writes into parameters by each late update.

    Raises:
        WorkloadError: see `check_can_hold`.
    """

    trains_apart = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
        check_can_hold(model, optimizer)
        self._optimizer, self._reducer = optimizer, reducer
        self.overhead_ns = 0
        self.on_update: Callable[[int], None] = lambda _: None
        # Any thread may read a parameter first, an evaluation beside training for one; reentrant, since
        # updates read.
        self._lock = threading.RLock()
        self._late: dict[int, Bucket] = {}
        self._whole: list[list[Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any], list[nn.Parameter]]] = []
        self._state, self._hidden, self._is_hidden = optimizer.state, dict[Tensor, Any](), False
        self._cleared: set[int] = set()
        self._recorder: Recorder | None = None
        self._stream: torch.cuda.Stream | None = None
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._wait_first),
            optimizer.register_load_state_dict_pre_hook(self._wait_first),
        ]
        _open.add(self)

    def arm(self, recorder: Recorder) -> None:
        """See `Synchronizer`; updates what the forward pass did not read."""
        self.wait()
        self._recorder = recorder
        _check_hooks(self._optimizer)
        self._reducer.arm(recorder)

    def finish(self) -> None:
        """Wait for the buckets that were not held, and hide the parameters of the others from the optimizer.

        The first step of a form, in which the order of gradients is measured, waits for all.
        """
        reducer = self._reducer
        if not reducer.knows_order:
            reducer.finish()
            self.overhead_ns = reducer.overhead_ns
            return
        reducer.send_rest()
        early = len(reducer.buckets) - reducer.num_held
        for bucket in reducer.buckets[:early]:
            reducer.receive(bucket)
            reducer.settle_unused(bucket)
        reducer.receive_others()
        self.overhead_ns = reducer.overhead_ns
        self._late = {bucket.index: bucket for bucket in reducer.buckets[early:]}
        self._cleared = set()
        # By id: comparing parameters would compare their elements.
        late = {id(p) for bucket in self._late.values() for p in bucket.parameters}
        groups = self._optimizer.param_groups
        self._groups = [(group, _settings(group), [*group["params"]]) for group in groups]
        for group in groups:
            # The user's own list is put back afterwards, since a scheduler or a wrapper may hold it.
            self._whole.append(group["params"])
            group["params"] = [p for p in group["params"] if id(p) not in late]

    def after_step(self) -> None:
        """The optimizer has updated the parameters that were not held; the others are to be read."""
        self._show_whole()
        if self._late and torch.cuda.is_initialized():
            # A reader on another stream has the update enqueued here, behind the step it belongs to.
            self._stream = torch.cuda.current_stream()
        if self._late:
            watch_state(self._optimizer, self._look)
            self._state = self._optimizer.state
            self._hide_state()
        for bucket in self._late.values():
            make_unread(bucket.parameters, partial(self._bring_up_to_date, bucket))

    def wait(self) -> None:
        """Update all parameters whose update is due.

        Raises:
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.
        """
        for bucket in list(self._late.values()):
            self._bring_up_to_date(bucket)

    def _wait_first(self, *_: Any) -> None:
        self.wait()

    def _wait_for_others(self) -> None:
        """Have other steps with the same parameters update them: their gradients would come among these."""
        mine = {id(p) for bucket in self._reducer.buckets for p in bucket.parameters}
        for other in [one for one in _open if one is not self and one.is_due(mine)]:
            other.wait()

    def is_due(self, parameters: AbstractSet[int]) -> bool:
        """Whether the update of one of these parameters, by `id`, is due."""
        late = (p for bucket in self._late.values() for p in bucket.parameters)
        return any(id(parameter) in parameters for parameter in late)

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """Inside, gradients are set to None for the next step; late updates have theirs all the same."""
        if len(_open) > 1:
            self._wait_for_others()
        self._show_whole()  # the last step may have failed in its update
        with self._lock, as_they_are(), self._reducer.clearing():
            # Those of no optimizer keep theirs, as in steps that wait.
            self._cleared = {id(p) for g in self._optimizer.param_groups for p in g["params"]}
            yield

    def forget_order(self) -> None:
        """See `Synchronizer`."""
        self._reducer.forget_order()

    def order(self) -> tuple[str, ...]:
        """See `Synchronizer`."""
        return self._reducer.order()

    def take_order(self, names: Sequence[str]) -> None:
        """See `Synchronizer`."""
        self._reducer.take_order(names)

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`."""
        self._show_whole()  # the last step may have failed in its update
        self._reducer.check_covers(groups)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Its `state_dict()`, with all updates."""
        self.wait()
        return optimizer.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        """See `Synchronizer`."""
        self.wait()
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `Synchronizer`."""
        self.wait()
        self._reducer.load_state_dict(state)

    def close(self) -> None:
        """Update what is due, and release what is held."""
        try:
            self._show_whole()
            self.wait()
        finally:
            for bucket in self._late.values():
                make_plain(bucket.parameters)
            self._late = {}
            for hook in self._hooks:
                hook.remove()
            self._show_state()
            unwatch_state(self._optimizer, self._look)
            self._reducer.close()

    def _show_whole(self) -> None:
        """Have the groups hold what they held before, the very same lists."""
        for (group, *_), parameters in zip(self._groups, self._whole, strict=False):
            group["params"] = parameters
        self._whole.clear()

    def _bring_up_to_date(self, bucket: Bucket) -> None:
        with self._lock, _plain_modes(bucket, self._stream):
            if bucket.index not in self._late:
                return
            with as_they_are(), self._interrupting("wait"):
                before = [parameter._version for parameter in bucket.parameters]  # noqa: SLF001
                # Until its mean is there a parameter stays unread, so that a failure is raised in every
                # reader.
                self._reducer.receive(bucket)
                for position, arrived in enumerate(bucket.arrived):
                    if arrived:
                        bucket.show(position)
                self._reducer.settle_unused(bucket)
            try:
                # As they are, since the update reads them itself; unread for others, who wait for all of it.
                with as_they_are(), self._interrupting("optimizer"):
                    self._update(bucket)
                    after = [parameter._version for parameter in bucket.parameters]  # noqa: SLF001
                    self.on_update(sum(after) - sum(before))
                    for parameter in bucket.parameters:
                        if id(parameter) in self._cleared:
                            parameter.grad = None
            finally:
                del self._late[bucket.index]
                make_plain(bucket.parameters)

    @contextlib.contextmanager
    def _interrupting(self, name: str) -> Iterator[None]:
        """A frame inside of the one that reads, where that is one of a step: a forward pass."""
        recorder = self._recorder
        reading = recorder.frame if recorder is not None else ""
        if recorder is None or not reading.startswith(READING):
            yield
            return
        recorder.mark(name)
        try:
            yield
        finally:
            recorder.mark(reading)

    def _update(self, bucket: Bucket) -> None:
        """The optimizer's step on these parameters alone, with groups and state of the step they are of."""
        mine = {id(parameter) for parameter in bucket.parameters}
        optimizer = self._optimizer
        state, groups = optimizer.state, optimizer.param_groups
        now = [(group, dict(group)) for group, _, _ in self._groups]
        self._show_state()
        try:
            # A scheduler has moved on since, or a script has other groups; this update is of the step before.
            optimizer.state, optimizer.param_groups = self._state, [group for group, _ in now]
            for group, settings, parameters in self._groups:
                group.update(settings, params=[p for p in parameters if id(p) in mine])
            update(optimizer)
        finally:
            for group, settings in now:
                group.update(settings)
            optimizer.state, optimizer.param_groups = state, groups
            if len(self._late) > 1:
                self._hide_state()

    def _hide_state(self) -> None:
        """Have whoever looks for what the optimizer remembers wait for the update."""
        self._hidden, self._is_hidden = dict(dict.items(self._state)), True
        dict.clear(self._state)

    def _show_state(self) -> None:
        if self._is_hidden:
            dict.update(self._state, self._hidden)
        self._hidden, self._is_hidden = dict[Tensor, Any](), False

    def _look(self, key: Any, *, writes: bool = False) -> None:
        """Somebody looks for what the optimizer remembers."""
        if self._is_hidden:
            self.wait()


class HeldWatch:
    """The watch of outside writes, to which late updates are none and which reads no parameter too early.

    Args:
        watch: Watches the state of one worker between its steps.
        held: Updates late.
    """

    def __init__(self, watch: OutsideWrites, held: HeldUpdate) -> None:
        self._watch = watch
        held.on_update = watch.allow

    def before_step(self) -> None:
        """See `OutsideWrites`."""
        with as_they_are():
            self._watch.before_step()

    def after_step(self) -> None:
        """See `OutsideWrites`; where workers compare their state, all of it is brought up to date."""
        self._watch.hear()
        with as_they_are():
            self._watch.after_step()


def check_can_hold(model: nn.Module, optimizer: Optimizer) -> None:
    """See that it shows when a parameter is read, and that the optimizer can be called once a bucket.

    Raises:
        WorkloadError: a module is TorchScript, a parameter of a class of its own, or the optimizer has hooks.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _unfit(
                f"{name or 'the model'} compiled by TorchScript, which reads parameters without notice"
            )
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise _unfit(f"{name} of class {type(parameter).__name__}")
    _check_hooks(optimizer)


def _check_hooks(optimizer: Optimizer) -> None:
    """Hooks would be called several times a step."""
    if replaced_methods(optimizer) or any(step_hooks(optimizer)):
        raise _unfit(
            f"{type(optimizer).__name__} with hooks on its steps, or methods in their place"
        )


def _unfit(got: str) -> WorkloadError:
    return WorkloadError(
        "wanted plain modules, parameters and optimizers for sync.options['held'], which updates parameters "
        f"when they are read, got {got}; change that, or hold none"
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says besides its parameters; tensors may be written, so they are copied."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


@contextlib.contextmanager
def _plain_modes(bucket: Bucket, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """As in a step, for every reader: no inference, no autocast, and on a GPU on the stream of the step."""
    kind = bucket.flat.device.type
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(kind, enabled=False))
        if kind == "cuda" and stream is not None:
            reader = torch.cuda.current_stream()
            stack.enter_context(torch.cuda.stream(stream))
            if reader != stream:
                stack.callback(reader.wait_stream, stream)
        yield
