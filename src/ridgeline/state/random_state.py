"""The random state of a worker: everything that dropout, augmentation and shuffling may draw from."""

import hashlib
import random
import sys

import msgspec
import torch

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError
from ridgeline.workers.world import World


class RandomState(Value, frozen=True, kw_only=True):
    """States of the generators of one worker. `numpy` is None where numpy is not in use."""

    torch_cpu: bytes
    torch_cuda: bytes | None
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float] | None


def seed_worker(seed: int, rank: int, *, step: int = 0) -> None:
    """Give a worker other than rank 0 random numbers of its own; rank 0 continues as seeded.

    So every worker drops out other units, and a run on one worker draws what the plain loop draws.
    """
    if rank:
        digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
        # A digest, so that neighbouring ranks and steps draw unrelated numbers.
        seed_all(int.from_bytes(digest[:8], "big") >> 1)


def seed_all(seed: int) -> None:
    """Seed every generator alike on all workers, before the model is made."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        # NumPy takes 32 bits.
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def capture(world: World) -> bytes:
    """The worker's random state, as JSON.

    Cost: On CUDA, waits for the device.
    """
    numpy_state = None
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        numpy_state = (str(name), tuple(keys.tolist()), int(rest[0]), int(rest[1]), float(rest[2]))
    version, internal, gauss = random.getstate()
    cuda = None
    if world.device.type == "cuda":
        cuda = torch.cuda.get_rng_state(world.device).numpy().tobytes()
    state = RandomState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=cuda,
        python=(version, internal, gauss),
        numpy=numpy_state,
    )
    return msgspec.json.encode(state)


def apply(data: bytes, world: World) -> None:
    """Put the worker's generators into a captured state.

    Raises:
        CheckpointError: the data is not a captured random state.
    """
    try:
        state = msgspec.json.decode(data, type=RandomState)
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"wanted the random state of rank {world.rank}, got content that does not fit: {error}; "
            "the checkpoint is damaged, resume from the one before"
        ) from error
    # A `bytearray`, since torch warns of memory that cannot be written.
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    if state.torch_cuda is not None and world.device.type == "cuda":
        cuda = torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8)
        torch.cuda.set_rng_state(cuda, world.device)
    random.setstate(state.python)
    if state.numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state.numpy)
