"""Special methods of classes (`__len__`, `__add__`): a class may get one while Python runs.

Torch's compiler (2.13) asks a class once which of them it has, and remembers that for the whole process,
whatever is compiled anew.
"""

from typing import Any

from torch._dynamo import variables


def ask_for_slots_anew() -> None:
    """Have the compiler of this process ask a class each time; again, too."""
    protocol: Any = getattr(variables, "object_protocol", None)
    if hasattr(protocol, "_get_cached_slots"):
        protocol._get_cached_slots = protocol.get_type_slots  # noqa: SLF001 - it has no setting for that
