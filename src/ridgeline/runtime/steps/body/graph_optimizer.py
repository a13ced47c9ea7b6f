"""The optimizer of a step that graphs replay: inside of a graph that can hold it, else behind each replay."""

from typing import Any

import torch
from torch import Tensor

from ridgeline.optimizer_forms import fits_graph
from ridgeline.optimizers.capturable import (
    LearningRates,
    give_up_fused,
    has_no_form_for_captures,
    make_capturable,
    stepping_outside,
)
from ridgeline.optimizers.fused_layouts import lay_out_for_fused
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.runtime.steps.body.body import StepBody


class GraphOptimizer:
    """How the optimizer of a step is captured, and the learning rates that the capture reads.

    Attributes:
        is_inside: The graph holds its step.
        rates: Its learning rates.

    Raises:
        PlanError: see `make_capturable`.
    """

    def __init__(self, body: StepBody, device: torch.device, notes: list[str]) -> None:
        self._body, self._device, self._notes = body, device, notes
        self._own: list[Tensor] = []
        self.make_fit()

    def make_fit(self) -> None:
        """Have it in a form for captures, as its settings and parameters are now."""
        optimizer = self._body.optimizer
        self.is_inside = self._fits()
        if self.is_inside:
            given = [group.get("lr") for group in optimizer.param_groups]
            changes = make_capturable(optimizer, self._device)
            pairs = zip(optimizer.param_groups, given, strict=True)
            self._own += [g["lr"] for g, before in pairs if g["lr"] is not before]
        else:
            changes = (*give_up_fused(optimizer), stepping_outside(optimizer))
        # It is made fit again after every change of settings, which is no news.
        self._notes.extend(change for change in changes if change not in self._notes)
        self.rates = LearningRates(optimizer)

    def settle(self) -> None:
        """Before a capture: have it as its parameters lie now.

        They may share memory since the last step, or do no longer, and they may have moved
        (`model.to(memory_format=...)`). State that a fused kernel wants laid out otherwise is copied here: a
        capture would copy it in each replay, from where no step writes.
        """
        if self.is_elsewhere():
            self.make_fit()
        if self.is_inside:
            lay_out_for_fused(self._body.optimizer)

    def is_elsewhere(self) -> bool:
        """Whether it would be captured otherwise now: outside of the graph, or inside."""
        return self._fits() != self.is_inside

    def refresh(self) -> None:
        """Have captured learning rates as its groups say, also where there are others now."""
        # A group that was added has a number for its rate, which no graph would read again.
        if self.rates.num_groups != len(self._body.optimizer.param_groups):
            self.make_fit()
        elif self.is_inside and (replaced := self._script_rates_replaced()):
            for group in replaced:
                if isinstance(group["lr"], Tensor):
                    group["lr"] = group["lr"].detach().to(self._device, copy=True)
                    self._own.append(group["lr"])
            self.make_fit()
        self.rates.refresh()

    def _script_rates_replaced(self) -> list[dict[str, Any]]:
        """Groups that have another rate in the place of a tensor of the script's, into which none is written.

        That tensor may be the rate of other groups as well, or what the script computes later rates from.
        """
        return [
            group
            for group, tensor in self.rates.replaced()
            if not any(tensor is own for own in self._own)
        ]

    def _fits(self) -> bool:
        """Whether it steps inside of the graph; hooks and methods put on it run in Python."""
        optimizer = self._body.optimizer
        is_torchs = not any(step_hooks(optimizer)) and not replaced_methods(optimizer)
        return (
            is_torchs
            and fits_graph(optimizer, self._body.model)
            and not has_no_form_for_captures(optimizer)
        )
