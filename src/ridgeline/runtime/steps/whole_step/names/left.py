"""Finding out, while a step is traced, which tensors it leaves under names."""

import copy
import copyreg
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ridgeline.capture.operator_writes import written_nodes
from ridgeline.errors import CaptureError
from ridgeline.lint.lint_lines import changing_lines
from ridgeline.lint.python_state import changed_in_python
from ridgeline.programs.distinct_results import memory_number
from ridgeline.reach.differences import members_of
from ridgeline.reach.owners import is_users_class
from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import StateChange, Undo
from ridgeline.runtime.steps.whole_step.names.shown import Name, Result, Shown
from ridgeline.tensors.copies import is_noted

_OF_STATE = "the memory of a parameter, a buffer or a tensor outside"
_CONTAINERS = (list, tuple, dict)


def note_slots(*roots: Any) -> None:
    """Have Python note of classes what it notes when it first copies an object of theirs.

    It does so in an attribute of the class, and what is read of the class from then on stays as it is.
    """
    for kind in {type(value) for value in Reach(*roots).seen.values()}:
        if is_users_class(kind) and not issubclass(kind, nn.Module):
            copyreg._slotnames(kind)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public does


class LeftError(CaptureError):
    """A step that changes something in Python which is no tensor that its program could return."""


class LeftTensors:
    """The tensors of a trace that stand under names at its end.

    Args:
        before: Everything that could be reached before the trace.
    """

    def __init__(self, before: Undo) -> None:
        self._before = before
        self._changes: list[StateChange] = []
        self._computed: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}
        self._brought: dict[int, int] = {}
        self._parameters: dict[int, Tensor] = {}

    def found(
        self, brought: Sequence[Tensor], state: Sequence[Tensor], originals: Sequence[Tensor]
    ) -> list[Tensor]:
        """At the end of the step, inside of the trace: what its program has to return behind the loss.

        Args:
            brought: What stands for the batch's tensors.
            state: What stands for parameters and buffers.
            originals: Those themselves.
        """
        self._brought = {id(tensor): place for place, tensor in enumerate(brought)}
        own = {id(one): original for one, original in zip(state, originals, strict=False)}
        # A parameter stays the same tensor, whatever a step does; a buffer may be replaced.
        self._parameters = {n: t for n, t in own.items() if isinstance(t, nn.Parameter)}
        self._changes = [
            change
            for change in self._before.changes()
            if own.get(id(change.now), change.now) is not change.before
        ]
        known = self._brought.keys() | self._parameters.keys()
        traced = [one for change in self._changes for one in self._traced(change)]
        self._computed = {id(one): one for one in traced if id(one) not in known}
        # Under another name than before: which tensor that is, each run finds out for itself.
        left = {id(part) for change in self._changes for part in members_of(change.before)}
        handed = (change.now for change in self._changes if id(change.now) in left)
        self._moved = {id(one): one for one in handed if type(one) is Tensor}
        self._computed |= {number: one.clone() for number, one in self._moved.items()}
        return [tensor.detach() for tensor in self._computed.values()]

    def carried(self, constants: Sequence[Tensor]) -> list[int]:
        """Which tensors of the outside that the step reads are under these names: it will find others there.

        Raises:
            CaptureError: it reads one in another way, too, which would have to stay what it is.
        """
        parts = {id(one): c.what for c in self._changes for one in members_of(c.before)}
        held = [
            one for c in self._changes for one in members_of(c.before) if isinstance(one, Tensor)
        ]
        memory = {memory_number(one): id(one) for one in held}
        found = [n for n, one in enumerate(constants) if memory.get(memory_number(one)) is not None]
        for number in found:
            if id(constants[number]) not in parts:
                what = parts[memory[memory_number(constants[number])]]
                raise self._refused(
                    what, "a tensor that the step reads as part of another one, too,"
                )
        return found

    def shown(self, graph: fx.Graph, num_state: int, carried: Sequence[int] = ()) -> Shown:
        """After the trace: what is to be put where.

        Args:
            graph: Of the step; changed, so that each result lies in memory of its own.
            num_state: Its first inputs are the state.
            carried: Places of the state that are copies.

        Raises:
            LeftError: the step changes something else in Python.
            CaptureError: a tensor under a name is more than its elements; says what.
        """
        what = changed_in_python(self._before, lambda _: False, self._is_anew)
        still = (c for c in self._changes if not (self._traced(c) or self._is_anew(c)))
        what = what or next((change.what for change in still), "")
        if what:
            raise LeftError(
                f"wanted a step that changes tensors only, got one that changes {what} in Python, which one "
                "program would never do again; do it after each training step, or use execution='compiled' "
                "or 'eager'"
            )
        for change in self._changes:
            for tensor in self._traced(change):
                if id(tensor) in self._computed and (why := _why_not(tensor)):
                    raise self._refused(change.what, why)
        self._lay_apart(graph, num_state, carried)
        stand_ins = {number: one.detach() for number, one in self._computed.items()}
        others = {id(t): t for c in self._changes for t in self._traced(c)}
        as_left = self._computed | self._moved
        results = [Result(id(t), as_left[n].requires_grad, None) for n, t in stand_ins.items()]
        for number, place in self._brought.items():
            if number in others:
                stand_ins[number] = others[number].detach()
                results.append(Result(id(stand_ins[number]), False, place))
        return Shown(
            tuple(self._name(change, stand_ins) for change in self._changes), tuple(results)
        )

    def held(self) -> set[int]:
        """Numbers of the tensors of the trace that may be found under names."""
        return {id(one) for change in self._changes for one in self._traced(change)}

    def _is_anew(self, change: StateChange) -> bool:
        """Whether containers of nothing but new tensors are there now: a list that the script has emptied.

        Or a tensor that stood under another name.
        """
        if id(change.now) in self._moved:
            return True
        parts = [*members_of(change.now)]
        is_whole = change.put is not None and not any(map(self._before.has, parts))
        return is_whole and all(type(part) in (FakeTensor, *_CONTAINERS) for part in parts)

    def _traced(self, change: StateChange) -> list[Tensor]:
        parts = members_of(change.now, self._before.has)
        return [part for part in parts if isinstance(part, FakeTensor)]

    def _refused(self, what: str, got: str, instead: str = "") -> CaptureError:
        known = self._before.reached.values()
        codes = [one.__code__ for one in known if isinstance(one, FunctionType)]
        return CaptureError(
            f"wanted tensors of their own under the names that a step writes, got {got} in {what} (at "
            f"{changing_lines(what, codes)}), which one program would not renew; {instead}use "
            "execution='compiled' or 'eager'"
        )

    def _name(self, change: StateChange, stand_ins: dict[int, Tensor]) -> Name:
        assert change.put is not None
        reached = self._before.reached
        parts = [*members_of(change.now)]
        keys = (key for part in parts if isinstance(part, dict) for key in dict.keys(part))
        known = {id(one): one for one in (*parts, *keys) if id(one) in reached}
        known |= {
            n: t for n, t in self._parameters.items() if n in {*map(id, self._traced(change))}
        }
        # Without what autograd knows of the trace, which would be kept as long as the program.
        return Name(change.put, copy.deepcopy(change.now, {**known, **stand_ins}), known)

    def _lay_apart(self, graph: fx.Graph, num_state: int, carried: Sequence[int]) -> None:
        (end,) = graph.find_nodes(op="output")
        loss, *others = end.args[0]
        inputs = graph.find_nodes(op="placeholder")
        copies = {inputs[number] for number in carried}
        if any(copies.intersection(written_nodes(node)) for node in graph.nodes):
            what = next(c.what for c in self._changes if c.before is not None)
            raise self._refused(
                what, "a tensor that the step writes into before it puts another one"
            )
        places = [memory_number(node.meta["val"]) for node in inputs]
        state = {place for number, place in enumerate(places[:num_state]) if number not in carried}
        taken, results = {*places, memory_number(loss.meta["val"])}, [loss]
        for node, tensor in zip(others, self._computed.values(), strict=True):
            place = memory_number(node.meta["val"])
            if place in state:
                change = next(c for c in self._changes if any(t is tensor for t in self._traced(c)))
                raise self._refused(change.what, _OF_STATE, "put a clone there, or ")
            if place in taken:
                with graph.inserting_before(end):
                    apart = graph.call_function(torch.ops.aten.clone.default, (node,))
                apart.meta = {**node.meta}
                results.append(apart)
            else:
                results.append(node)
            taken.add(place)
        end.args = (results,)


def _why_not(tensor: Tensor) -> str:
    """What is at a tensor of a trace that no program returns."""
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or is_noted(tensor):
        return "a tensor that is not dense"
    if tensor.is_leaf and tensor.requires_grad:
        return "a tensor that is given a gradient of its own"
    return "a tensor that retains its gradient" if tensor.retains_grad else ""
