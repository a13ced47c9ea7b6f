"""Which ops must come before which, from the storages that they read and write in eager order.

An op that reads a storage comes after the last one that wrote it, an op that takes a view after the op that
made the view, and an op that writes in place after all that read before.
"""

from collections.abc import Sequence

from ridgeline.tracing.recorder import Record, Use


def dependencies(records: Sequence[Record]) -> tuple[tuple[int, ...], ...]:
    """For each op the indices of the ops that it must wait for, ascending."""
    found: list[tuple[int, ...]] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    view_maker: dict[tuple[object, ...], int] = {}
    for index, record in enumerate(records):
        before: set[int] = set()
        for use in record.inputs:
            maker = view_maker.get(_look(use))
            if maker is not None:
                before.add(maker)
            if use.storage in writer:
                before.add(writer[use.storage])
        for storage in record.written:
            # What is written is among the inputs, so that it waits for the last writer as well.
            before.update(readers.pop(storage, ()))
            writer[storage] = index
        taken = {use.storage for use in record.inputs}
        # A view reads nothing: who writes later need not wait for it, but whoever uses the view waits for its
        # maker.
        if not record.is_view:
            for storage in taken.difference(record.written):
                readers.setdefault(storage, []).append(index)
        looks = {_look(use) for use in record.inputs}
        for use in record.outputs:
            if use.storage not in taken:
                writer[use.storage] = index
            elif _look(use) not in looks:
                view_maker[_look(use)] = index
        before.discard(index)
        found.append(tuple(sorted(before)))
    return tuple(found)


def _look(use: Use) -> tuple[object, ...]:
    """What a tensor shows of its storage."""
    return use.storage, use.offset, use.shape, use.stride, use.dtype
