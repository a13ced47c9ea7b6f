"""Steps without the value checks of `torch.distributions`, which a captured or compiled program cannot hold.

A distribution looks at the values of its parameters when it is made, and raises where they are none: the
host waits for the device at each. torch's compiler switches these checks off for the whole process; here they
are off inside captured and compiled steps only.
"""

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution

NOTE = (
    "torch.distributions do not check their arguments here, as under torch.compile: each check waits for the "
    "device; eager execution checks them"
)


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Distributions made inside check nothing, as `unchecked`, and what asks sees plain False.

    torch's compiler switches the checks off for good when it is first used; here they are put back.
    """
    before = Distribution._validate_args  # noqa: SLF001 - it can be set by a method, but not asked for
    Distribution._validate_args = False  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        Distribution._validate_args = before  # noqa: SLF001


class _Off:
    """Stands for False where `validate_args` is kept, and remembers that it was asked."""

    def __init__(self) -> None:
        self.was_asked = False

    def __bool__(self) -> bool:
        self.was_asked = True
        return False


@contextlib.contextmanager
def unchecked(notes: list[str] | None = None) -> Iterator[None]:
    """Distributions made inside check nothing, unless they were given `validate_args=True` themselves.

    Args:
        notes: Receives `NOTE` where a check was left out; None for compiled code, in which that is unknown.
    """
    before = Distribution._validate_args  # noqa: SLF001 - it can be set by a method, but not asked for
    if before is False:  # by the user, or by torch's compiler
        yield
        return
    off = before if isinstance(before, _Off) else _Off()
    is_told = notes is not None or before is off
    Distribution._validate_args = off if is_told else False  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        Distribution._validate_args = before  # noqa: SLF001
        if notes is not None and off.was_asked and NOTE not in notes:
            notes.append(NOTE)
