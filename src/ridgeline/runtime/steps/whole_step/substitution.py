"""Substitutes in the places of an optimizer's parameters, state and settings, while its step is traced."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import CaptureError
from ridgeline.tensors.copies import num_writes


class MissingStateError(CaptureError):
    """A step that makes state for its optimizer, as the first one does that trains a parameter."""


class OptimizerSubstitution:
    """An optimizer that updates other tensors than its own, until `remove()`.

    Its settings select the form of its update that reads learning rates and step counts from tensors
    (`capturable`, and of torch's own optimizers `foreach`); the maths is the same in all forms.

    Args:
        optimizer: Changed in place, and put back by `remove()`.
        stand_ins: Parameter to its substitute.
        state: (parameter, key, substitute) of each tensor of the optimizer's state.
        rates: Learning rate of each group.
        widens: The step runs on the host: give the optimizer step counts (and other single numbers) in 64
            bits.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stand_ins: Mapping[Tensor, Tensor],
        state: Sequence[tuple[Tensor, str, Tensor]],
        rates: Sequence[Tensor],
        *,
        widens: bool,
    ) -> None:
        self._optimizer = optimizer
        self._rates = list(rates)
        self._versions = num_writes(rates)
        self._state = optimizer.state
        self._groups = [dict(group) for group in optimizer.param_groups]
        # As torch has it: optimizers read the state of a parameter before they know that there is any.
        inner: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        # What was taken out of the groups has state that no step reads.
        held = {p for group in self._groups for p in group["params"]}
        for parameter, values in optimizer.state.items():
            if parameter in held:
                inner[stand_ins[parameter]] = dict(values)
        for parameter, key, tensor in state:
            is_wide = widens and _is_number(parameter, key, tensor)
            inner[stand_ins[parameter]][key] = tensor.double() if is_wide else tensor
        self._targets = {(stand_ins[p], key): tensor for p, key, tensor in state}
        self._constants = {p: _without_tensors(values) for p, values in inner.items()}
        # Some optimizers count in an attribute; one that changes in the trace would be baked in.
        self._attributes = _numbers(vars(optimizer))
        optimizer.state = inner
        is_torchs = _is_torchs(optimizer)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["params"] = [stand_ins[p] for p in group["params"]]
            group["lr"] = rate
            if "capturable" in group:
                # The form that reads step counts from tensors; the other one would bake in a Python number.
                group["capturable"] = True
            if "foreach" in group:
                group["foreach"] = _takes_lists(group, is_torchs=is_torchs, is_host=widens)
            if "fused" in group:
                # A fused kernel is one operator that cannot be compiled together with the rest.
                group["fused"] = False

    def write_back(self) -> None:
        """After a step: copy state that it replaced, or computed in 64 bits, into the substitutes.

        Raises:
            MissingStateError: the step made state.
            CaptureError: it keeps a count in a Python number (in its state, in a group,
                or in itself), or renews a tensor of a group.
        """
        name = type(self._optimizer).__name__
        self._check_groups()
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            self._check_constants(_settings(group), _settings(before), "a parameter group")
        self._check_constants(_numbers(vars(self._optimizer)), self._attributes, "the attributes")
        for parameter, values in self._optimizer.state.items():
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                target = self._targets.get((parameter, key))
                if target is None:
                    raise MissingStateError(
                        f"wanted the optimizer's state to exist before its step is traced, got {key!r} made "
                        f"by {name}.step(); run one eager step first"
                    )
                if value is not target:
                    target.copy_(value)
            constants = self._constants.get(parameter, {})
            self._check_constants(_without_tensors(values), constants, "the state")

    def _check_groups(self) -> None:
        """Refuse a step that puts other tensors into its groups, or changes the learning rate itself.

        `remove` takes both back, and no comparison of single steps would show that they stay what they were.
        """
        pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
        for group, before in pairs:
            for key, value in group.items():
                is_other = isinstance(value, Tensor) and value is not before.get(key)
                if is_other and key not in _SUBSTITUTED:
                    raise self._renewing(key)
        rates = zip(self._optimizer.param_groups, self._rates, strict=True)
        is_other = any(group["lr"] is not rate for group, rate in rates)
        if is_other or num_writes(self._rates) != self._versions:
            raise self._renewing("lr")

    def _renewing(self, key: str) -> CaptureError:
        return CaptureError(
            f"wanted an optimizer that leaves the entries of its groups as they are, got {key!r} changed by "
            f"{type(self._optimizer).__name__}.step(), which one program would never do again; use "
            "execution='compiled' or 'eager', or change it after each training step"
        )

    def _check_constants(
        self, now: Mapping[str, Any], before: Mapping[str, Any], place: str
    ) -> None:
        changed = [key for key, value in now.items() if before.get(key) != value]
        if not changed:
            return
        raise CaptureError(
            f"wanted everything that changes between steps in tensors, got {changed[0]!r} as "
            f"{type(now[changed[0]]).__name__} in {place} of {type(self._optimizer).__name__}; use "
            "execution='compiled' or 'eager', or an optimizer that counts in tensors"
        )

    def remove(self) -> None:
        """Put the optimizer's own parameters, state and settings back."""
        self._optimizer.state = self._state
        vars(self._optimizer).update(self._attributes)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(saved)


def _takes_lists(group: Mapping[str, Any], *, is_torchs: bool, is_host: bool) -> bool | None:
    """The form of an optimizer that is traced: on lists of tensors, or on one after the other.

    Others than torch's have the setting, too, for a form that may not be written yet, or takes it for granted
    that what counts in tensors does so on a GPU.
    """
    if is_torchs:
        return not group.get("differentiable", False)
    return False if is_host and group["foreach"] is None else group["foreach"]


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether torch wrote the optimizer, or one that it is derived from."""
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


_NUMBERS = frozenset({"step", "mu_product", "mu", "eta"})
"""Single numbers in the state of torch's optimizers."""


def _is_number(parameter: Tensor, key: str, value: Tensor) -> bool:
    """Whether a tensor in the state counts, say; that of a single weight may be an average."""
    if value.dim() or value.dtype != torch.float32:
        return False
    return parameter.dim() > 0 or key in _NUMBERS


_SUBSTITUTED = ("params", "lr", "capturable", "foreach", "fused")
"""What is put into the groups while the step is traced; all else there is the optimizer's own."""


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _without_tensors(group).items() if k not in _SUBSTITUTED}


def _numbers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes in which an optimizer may count."""
    return {key: value for key, value in attributes.items() if isinstance(value, int | float)}


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not isinstance(value, Tensor)}
