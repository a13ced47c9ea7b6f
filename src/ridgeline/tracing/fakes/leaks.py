"""Fake tensors that a trace has left in the user's objects, and how they get out again.

A step that keeps a tensor outside of its model (a table that is made once) keeps a fake one when it is
traced, and every later step would compute with it: no error, and nothing is trained. What code names is put
back by `Undo`; here the rest is found, among all objects of the process.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Iterator

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ridgeline.errors import WorkloadError
from ridgeline.reach.reach import is_leaf

PAUSES_S = (0.01, 0.1, 1.0)
"""Before another look. Autograd's thread of a GPU may let go of the last gradients after `backward` returns:
seen on a host whose 16 cores were busy."""
AT_START = 1000
"""No program that sets its objects aside has fewer. Python 3.12 itself begins with 375 of its own."""
_CacheType = type(functools.cache(id))


@contextlib.contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Garbage collections inside look at what was made inside alone, and so does `left_fakes`.

    They take as long as there are objects. Where the program has set some aside itself (`gc.freeze`), nothing
    changes.
    """
    is_ours = gc.get_freeze_count() <= AT_START
    if is_ours:
        # Frozen objects are neither collected nor listed by `gc.get_objects`.
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextlib.contextmanager
def all_objects_shown() -> Iterator[None]:
    """Objects that the program has set aside itself (`gc.freeze`) are found inside, too: one may hold a fake.

    Cost: What was made since then is set aside with them at the end.
    """
    is_frozen = gc.get_freeze_count() > AT_START
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def left_fakes(mode: FakeTensorMode) -> list[Tensor]:
    """The tensors of a fake mode that are still alive.

    Cost: A garbage collection (of all objects 0.05 to 0.5 s); up to four where tensors of a GPU seem left.
    """
    found = _alive(mode)
    for pause_s in PAUSES_S:
        if not any(fake.fake_device.type == "cuda" for fake in found):
            break
        found.clear()  # it holds them, too
        time.sleep(pause_s)
        found = _alive(mode)
    return [*found]


def _alive(mode: FakeTensorMode) -> list[FakeTensor]:
    gc.collect()
    return [
        found for found in gc.get_objects() if type(found) is FakeTensor and found.fake_mode is mode
    ]


def are_out_of_reach(fakes: list[Tensor]) -> bool:
    """Whether there are some, and no code can come by them.

    No object of Python holds one then, and none is a real tensor's gradient. A transform of torch.func that
    fails in the middle (a Hessian under `vmap`, say) leaves tensors in torch's own memory for good.

    `fakes` are all that are left; nothing else may hold them.

    Cost: Looks at all objects, twice.
    """
    if not fakes or any(holder is not fakes for holder in gc.get_referrers(*fakes)):
        return False
    lost = {id(fake) for fake in fakes}
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    real = (tensor for tensor in tensors if id(tensor) not in lost and is_leaf(tensor))
    return all(id(tensor.grad) not in lost for tensor in real)


def expel(fakes: list[Tensor]) -> None:
    """Empty the caches that hold fake tensors: `functools.cache`, `lru_cache`, and dictionaries.

    Raises:
        WorkloadError: something else holds one.
    """
    # Popped, so that this list holds none of them while their holders are looked for.
    while fakes:
        fake = fakes.pop()
        for holder in gc.get_referrers(fake):
            if holder is not fakes:
                _drop(fake, holder)


def _drop(fake: Tensor, holder: object) -> None:
    """Drop what leads to a fake tensor from one of its holders."""
    if isinstance(holder, _CacheType):
        holder.cache_clear()
    elif isinstance(holder, (dict, tuple, list)):
        # A cache keeps a result that is a tuple or a list, which holds the tensor one step further down.
        caches = [above for above in gc.get_referrers(holder) if isinstance(above, _CacheType)]
        for above in caches:
            above.cache_clear()
        if not caches and isinstance(holder, dict):
            for key in [key for key, value in holder.items() if value is fake]:
                del holder[key]


def refuse_left(fakes: list[Tensor]) -> None:
    """Raise where fake tensors are left after all.

    Raises:
        WorkloadError: names the first of them.
    """
    if fakes:
        raise WorkloadError(
            "wanted a step that keeps its tensors in the model, the optimizer or where loss_fn names them, "
            f"got one of shape {tuple(fakes[0].shape)} that was kept elsewhere while the step was traced "
            "without data; start the program again, and call the step once before it is traced"
        )
