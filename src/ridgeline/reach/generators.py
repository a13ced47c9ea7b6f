"""The random states of Python, NumPy and torch at one moment, put back later."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch


class HostGenerators(NamedTuple):
    """The states of Python's and NumPy's generators at one moment; NumPy's is None where it is not in use."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "HostGenerators":
        """As they are."""
        # Not imported here: a program that has not done so draws nothing from it.
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), numpy.random.get_state() if numpy else None)

    def drawn(self) -> str:
        """Whose random numbers were drawn since, in words; an empty text where nobody's were."""
        now = HostGenerators.now()
        if now.python != self.python:
            return "Python's random module"
        # As text, since `==` would compare the arrays in it element by element.
        if self.numpy is not None and str(now.numpy) != str(self.numpy):
            return "NumPy"
        return ""

    def restore(self) -> None:
        """As they were."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class Generators:
    """The random states of Python, NumPy and torch, on the CPU and on every GPU, when it is made."""

    def __init__(self) -> None:
        self._host = HostGenerators.now()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put them back."""
        self._host.restore()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Random state of Python, NumPy and torch as before, at the end."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()


def accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What asks a generator for its state, and what gives it one."""
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state, generator.set_state
    if isinstance(generator, kind := random.Random):  # whose methods a user's class may replace
        return partial(kind.getstate, generator), partial(kind.setstate, generator)
    bits = generator.bit_generator
    return partial(getattr, bits, "state"), partial(setattr, bits, "state")
