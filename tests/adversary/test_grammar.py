"""The tables of the grammar: every entry runs in plain PyTorch, and programs of seeds come to it."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from adversary.grammar import catalogue
from adversary.judging import run_plain
from adversary.making import each, make
from adversary.portraits import Ambient
from adversary.program import Purpose
from adversary.rendering import render
from adversary.worlds import World

FIRST = 300
"""Seeds of a range, for calls and for steps."""
RANGES = 12
RAISES = {"step": {"of inference"}, "call": set[str]()}
"""What plain PyTorch refuses: autograd saves no tensor of inference."""


def words() -> set[str]:
    """Everything that programs are made of, as exclusions name it."""
    found = {*catalogue.CHANGES, *catalogue.INPUTS, *catalogue.CONTEXTS, *catalogue.OPTIMIZERS}
    for name, feature in catalogue.FEATURES.items():
        found |= {name, *(f"{name}/{change}" for change in feature.changes)}
    return found - {"plain", "sgd"}


def test_each_entry_is_in_the_first_programs_of_some_seed() -> None:
    """Of few ranges of seeds, which leave out a tenth or so each; none is left out by all."""
    wanted, num_ranges = words(), Counter[str]()
    for begin in range(0, RANGES * FIRST, FIRST):
        seeds = range(begin, begin + FIRST)
        programs = (make(seed, purpose) for seed in seeds for purpose in ("call", "step"))
        found = {word for program in programs for word in program.words()}
        assert len(wanted - found) < len(wanted) / 5
        num_ranges.update(found)
    assert set(num_ranges) == wanted


@pytest.mark.parametrize("purpose", ["call", "step"])
def test_general_entries_run_in_plain_pytorch(purpose: Purpose, tmp_path: Path) -> None:
    """Changes, inputs, contexts and optimizers: a call that raises in every mode would be called equal."""
    raised = set()
    for program in each(purpose):
        if program.uses:
            continue  # features are run by the tests of the machinery
        path = tmp_path / "program.py"
        path.write_text(render(program))
        before = Ambient.now()
        world = World(path)
        run_plain(program, world)
        try:
            with warnings.catch_warnings(action="ignore"):
                for index in range(len(program.calls)):
                    world.call(index)
        except RuntimeError as error:
            if "Inference tensors cannot be saved for backward" not in str(error):
                raise
            raised |= set(program.words())
        finally:
            world.close()
            before.restore()
    assert raised == RAISES[purpose]
    assert torch.get_default_dtype() == torch.float32


def test_what_features_make_is_made_on_the_device(tmp_path: Path) -> None:
    """Of a layer that stays on the CPU, plain PyTorch would refuse the first call on a GPU."""
    path, seen, elsewhere = tmp_path / "program.py", set[str](), set[str]()
    for program in each("step"):
        if not program.uses or (name := program.words()[0]) in seen:
            continue
        seen.add(name)
        # There is no generator on the device on which no tensor has values.
        text = render(program, "meta").replace(
            "torch.Generator(device='meta')", "torch.Generator()"
        )
        path.write_text(text)
        with warnings.catch_warnings(action="ignore"):
            world = World(path)
        tensors = [*world.w.model.parameters(), *world.w.model.buffers()]
        elsewhere |= {name for tensor in tensors if tensor.device.type != "meta"}
        world.close()
    assert len(seen) > 200
    assert not elsewhere
