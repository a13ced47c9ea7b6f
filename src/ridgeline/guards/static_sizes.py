"""Sizes of tensors that a program reads: each is fixed, even where it was marked as one that may change."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._dynamo.variables import builder

_sizes_of = builder._automatic_dynamic  # noqa: SLF001 - no setting leaves marks out


@contextlib.contextmanager
def sizes_read_as_they_are() -> Iterator[None]:
    """Inside, TorchDynamo passes over marks of dynamic sizes, since a captured program serves one size only.

    A user sets them (`torch._dynamo.mark_dynamic`), and so do compiled programs on what they return.
    """

    def static(e: Any, tx: Any, source: Any, static_shapes: bool, *args: Any, **kwargs: Any) -> Any:
        return _sizes_of(e, tx, source, True, *args, **kwargs)

    with mock.patch.object(builder, "_automatic_dynamic", static):
        yield
