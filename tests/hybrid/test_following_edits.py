"""A hybridized model follows ordinary edits of the model: its results stay those of the model itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.calls.dispatch import REPLACED
from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.hybridize import hybridize
from ridgeline.plan import Execution

pytestmark = pytest.mark.usefixtures("compiled_in_this_process")


class Edited(nn.Module):
    """Reads what people edit: submodules, lists, tuples, dictionaries, a default of the class."""

    offset = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.act = nn.Linear(4, 4, bias=False), nn.ReLU()
        self.register_buffer("mask", None)
        self.scales, self.pair, self.config = [1.0, 2.0], (1.0, 2.0), {"alpha": 1.0}
        self.others = [nn.Linear(4, 4)]
        self.shifts = [torch.ones(4)]
        self.function = torch.tanh
        self.gain: Any = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.body(x)) + self.others[0](x) + self.shifts[0]
        for scale in self.scales:
            x = x * scale
        x = self.function(x) * self.pair[0] * self.config["alpha"] * self.gain + self.offset
        return x if self.mask is None else x * self.mask


def set_entry(container: Any, key: Any, value: Any) -> None:
    container[key] = value


EDITS: dict[str, Callable[[Edited], Any]] = {
    "submodule": lambda m: setattr(m, "act", nn.Tanh()),
    "bias": lambda m: setattr(m.body, "bias", nn.Parameter(torch.randn(4))),
    "buffer": lambda m: setattr(m, "mask", torch.zeros(4)),
    "hook": lambda m: m.body.register_forward_hook(lambda _, __, out: out * 2),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "list element": lambda m: set_entry(m.scales, 0, 3.0),
    "list longer": lambda m: m.scales.append(5.0),
    "list to tuple": lambda m: setattr(m, "scales", (1.0, 7.0)),
    "tuple": lambda m: setattr(m, "pair", (3.0, 2.0)),
    "dictionary entry": lambda m: set_entry(m.config, "alpha", 3.0),
    "dictionary": lambda m: setattr(m, "config", {"alpha": 4.0}),
    "module in a list": lambda m: set_entry(m.others, 0, nn.Linear(4, 4)),
    "weight in a list": lambda m: setattr(m.others[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "tensor in a list": lambda m: set_entry(m.shifts, 0, torch.zeros(4)),
    "function": lambda m: setattr(m, "function", torch.sigmoid),
    "default of the class": lambda m: setattr(m, "offset", 9.0),
    "number to tensor": lambda m: setattr(m, "gain", torch.randn(4)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_every_edit_is_noticed(edit: Callable[[Edited], Any]) -> None:
    """The guards before a captured call fail after the edit, and not before."""
    model, x = Edited(), torch.randn(2, 4)
    arguments = {"fn": model, "args": (x,)}
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds(arguments)
        edit(model)
        assert not guards.holds(arguments)
        assert CallReads(model, (x,)).guards.holds(arguments)


@interpreted()
def test_results_stay_those_of_the_model() -> None:
    """One edit after the other, each compared with the model itself."""
    model, x = Edited(), torch.randn(2, 4)
    with hybridize(model, x, "compiled", max_shapes=4) as hybrid:
        for name in ("submodule", "hook", "dictionary entry", "list longer", "weight in a list"):
            EDITS[name](model)
            torch.testing.assert_close(hybrid(x), model(x).detach(), msg=name)
        assert REPLACED in hybrid.report.notes
        assert hybrid.report.counters["eager_calls"] == 0


@pytest.mark.parametrize("mode", ["script", "compiled"])
@interpreted()
def test_a_new_head_a_late_bias_and_hooks(mode: Execution) -> None:
    """Replaced entries of a Sequential, a bias taken and given, a hook added and removed."""
    model, x = (
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
        torch.randn(1, 4),
    )

    def check() -> None:
        torch.testing.assert_close(hybrid(x), model(x).detach())

    with hybridize(model, x, mode) as hybrid:
        model[2] = nn.Linear(4, 3)
        check()
        for bias in (nn.Parameter(torch.randn(4)), None, nn.Parameter(torch.randn(4))):
            model[0].bias = bias
            check()
        hook = model[0].register_forward_hook(lambda _, __, out: out * 2)
        check()
        hook.remove()
        check()
        assert hybrid.report.counters["rebuilds"] == 4  # the hook is another setting


def test_containers_of_a_closure_are_followed() -> None:
    """A list and a dictionary that a function holds; values met before are not captured again."""
    scales, settings = [2.0], {"a": 1.0}
    fn = lambda x: x * scales[0] * settings["a"]  # noqa: E731 - a closure is the subject
    x = torch.randn(3)
    with hybridize(fn, x, "script", max_shapes=3) as hybrid:
        for first, second in ((5.0, 1.0), (5.0, 7.0), (2.0, 1.0)):
            scales[0], settings["a"] = first, second
            torch.testing.assert_close(hybrid(x), fn(x))
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 3, "rebuilds": 0}


def test_a_value_of_another_type_is_another_value() -> None:
    """2 and 2.0 are equal, and give results of different dtypes; equal numbers of one type are the same."""
    settings = {"k": 2}
    fn = lambda x: x * settings["k"]  # noqa: E731 - a closure is the subject
    with hybridize(fn, torch.arange(3), "script") as hybrid:
        settings["k"] = 2.0  # type: ignore[assignment]
        assert hybrid(torch.arange(3)).dtype == torch.float32
    model, x = Edited(), torch.randn(2, 4)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        model.gain = float("2.0")
        model.scales[1] = float("2.0")
        assert guards.holds({"fn": model, "args": (x,)})


def test_a_cache_that_the_code_fills_is_no_edit() -> None:
    """Each shape is captured once a call has put its entry there, and all shapes go on being served."""
    cache: dict[int, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.ones(len(x))
        return x + cache[len(x)]

    with hybridize(fn, torch.randn(2), "compiled", max_shapes=2) as hybrid:
        for rows in (2, 3, 4, 2, 3, 4, 5, 2, 3):
            x = torch.randn(rows)
            torch.testing.assert_close(hybrid(x), x + 1)
        # First calls of 2, 3, 4 and 5 rows, and the second of 4; what was captured of the example is gone.
        assert hybrid.report.counters == {"eager_calls": 5, "shapes": 3, "rebuilds": 1}
