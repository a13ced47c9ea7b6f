"""What a captured step takes for granted of model and optimizer, besides what its code reads."""

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registered
from torch.optim import Optimizer

from ridgeline.capture.capturing import SAVED_TENSORS_HOOKS, WATCHING
from ridgeline.guards.model_guard import ModelGuard
from ridgeline.optimizers.capturable import WatchedSettings
from ridgeline.optimizers.groups import parameters_of, state_methods
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.tensors.entries import Entries
from ridgeline.tensors.sameness import Sameness

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""
MOST_COMPILED = 8
"""Functions that are compiled for one capture. Where equal objects are put in the place of each other before
every step, each would serve once."""

of_gradient = attrgetter("_backward_hooks")
of_accumulation = attrgetter("_post_accumulate_grad_hooks")


class CaptureWatch:
    """Modules, parameters and hooks, and of an optimizer inside of the graph settings and state.

    Attributes:
        holds: Whether all is the very same as when `settle` was called, and what `watched` asks of autograd;
            False until then, and of an equal object in the place of another, of which `changed` says more.
    """

    def __init__(self, body: StepBody, *, has_optimizer: bool) -> None:
        self._optimizer = body.optimizer
        self._model = ModelGuard(body.model)
        # Both names for one list on purpose: what is added to it below is compared by `holds`, too.
        self._stores = hooks = module_hooks(self._model.modules)
        hooks += step_hooks(body.optimizer)
        self._parameters = [
            *dict.fromkeys((*body.model.parameters(), *parameters_of(body.optimizer)))
        ]
        self._hooks = Entries(hooks)
        self._accumulating = self._accumulation_hooks()
        self._replaced = replaced_methods(body.optimizer)
        self._held = parameters_of(body.optimizer)
        self._settings = WatchedSettings(body.optimizer) if has_optimizer else None
        self._rates = _rates(body.optimizer) if has_optimizer else None
        self._state = Entries(_stores(body.optimizer)) if has_optimizer else None
        self._num_compiled = 0
        self.holds: Callable[[], bool] = never

    def settle(self) -> None:
        """Have `holds` say at little cost whether all is as it is now, after `changed` said that nothing is.

        Cost: Compiles a function, 1 ms for a small model, and at most `MOST_COMPILED` of them.
        """
        is_frozen = self._settings is None or self._settings.are_frozen
        if is_frozen and self._num_compiled < MOST_COMPILED:
            self._num_compiled += 1
            self.holds = self._compiled()

    def _compiled(self) -> Callable[[], bool]:
        same, optimizer = Sameness(), self._optimizer
        for ask in WATCHING:
            same.result(ask)
        same.result(SAVED_TENSORS_HOOKS, True)
        self._model.require(same)
        for store in self._stores:
            same.entries(store)
        for parameter in self._parameters:
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                same.attribute(parameter, name)
                if (added := getattr(parameter, name)) is not None:
                    same.entries(added)
        # What other code puts into the instance (a scheduler, say), replays would pass by.
        for method in ("step", "zero_grad"):
            same.entry(vars(optimizer), method)
        same.attribute(optimizer, "param_groups")
        same.entries(optimizer.param_groups)
        for group in optimizer.param_groups:
            same.entries(group["params"])
            if self._settings is not None:
                same.entries(group)
            # Outside of the graph Python reads all settings; `refresh` has to see another rate's tensor.
            elif isinstance(group.get("lr"), Tensor):
                same.entry(group, "lr")
        if self._state is not None:
            same.attribute(optimizer, "state")
            same.entries(optimizer.state)
            for store in _stores(optimizer):
                same.entries(store)
        return same.compiled()

    def changed(self) -> str | None:
        """What is another now, in words; None while nothing is.

        Cost: 0.1 us for each module, and 0.2 us for each parameter (under AdamW).
        """
        why = self._model.changed()
        if why is None and (not self._hooks.hold() or any(map(of_gradient, self._parameters))):
            why = "hooks were added or removed"
        if why is None and self._accumulation_hooks() != self._accumulating:
            why = "hooks were added or removed"
        if why is None and replaced_methods(self._optimizer) != self._replaced:
            why = "a method of the optimizer was replaced"
        held = parameters_of(self._optimizer)
        # By identity: `==` of lists would compare tensors element by element.
        if why is None and not (len(held) == len(self._held) and all(map(is_, held, self._held))):
            why = "the optimizer got or lost parameters"
        if why is None and self.has_other_settings():
            why = "an optimizer setting changed"
        # `refresh` has put back what it can: the graph reads a tensor that stands in no group any more.
        if why is None and self._rates is not None:
            rates = _rates(self._optimizer)
            if len(rates) != len(self._rates) or not all(map(is_, rates, self._rates)):
                why = "a learning rate is in another tensor"
        if why is None and self._state is not None:
            is_same = self._state.same_stores(_stores(self._optimizer))
            if not (is_same and self._state.hold()):
                why = "optimizer state was replaced"
        return why

    def _accumulation_hooks(self) -> list[int]:
        """How many each parameter has; those of a synchronizer are among them."""
        return [len(hooks or ()) for hooks in map(of_accumulation, self._parameters)]

    def has_other_settings(self) -> bool:
        """Whether a setting of an optimizer inside of the graph is another now."""
        return self._settings is not None and self._settings.changed()


def module_hooks(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Where hooks of modules are kept: those of each, and those for all modules, which torch keeps."""
    own = [vars(module)[kind] for module in modules for kind in MODULE_HOOKS]
    return own + [getattr(registered, f"_global{kind}") for kind in MODULE_HOOKS]


def _stores(optimizer: Optimizer) -> Iterable[dict[Any, Any]]:
    stores: Iterable[dict[Any, Any]] = state_methods(optimizer).values(optimizer.state)
    return stores


def _rates(optimizer: Optimizer) -> list[Any]:
    return [group.get("lr") for group in optimizer.param_groups]


def never() -> bool:
    """Stands for a comparison that there is nothing for yet."""
    return False
