"""Which module an operator belongs to, in forward and in backward.

In forward it is the innermost module that is being called. In backward it is the module in which
the autograd node was made: nodes are numbered in the order of their making, so it is enough to
remember at which numbers the innermost module changed.
"""

import bisect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ModulePath:
    """Follows the calls of a model's modules, by hooks, until it is closed."""

    def __init__(self, model: nn.Module) -> None:
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._hooks: list[RemovableHandle] = []
        self._owners: dict[Tensor, str] = {
            parameter: name.rpartition(".")[0] for name, parameter in model.named_parameters()
        }
        with ExitStack() as undoing:
            undoing.callback(self.close)
            for name, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no hooks: what runs in it counts as its owner's
                # First of all hooks before a call: operators of the user's own hooks belong to the module,
                # too.
                enter = self._entering(name)
                self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
                self._hooks.append(module.register_forward_hook(self._leaving))
            undoing.pop_all()
        self._mark()

    def close(self) -> None:
        """Take the hooks away, and let go of the model."""
        self._owners.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def current(self) -> str:
        """The path of the module that the running operator belongs to; empty outside of modules."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()  # noqa: SLF001 - the only way to the running node
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):  # a node that accumulates into a parameter's gradient
            return self._owners.get(variable, "")
        # The last mark at or below the node's number: modules are left and entered between two nodes.
        position = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1  # noqa: SLF001
        return self._paths[position] if position >= 0 else ""

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)
            self._mark()

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # noqa: SLF001 - see `current`
        self._paths.append(self._stack[-1] if self._stack else "")
