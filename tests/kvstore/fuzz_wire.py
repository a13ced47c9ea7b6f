"""Mutated messages for the decoders and for a server's shard: each is a message or refused, and nothing else.

    python tests/kvstore/fuzz_wire.py [INPUTS] [SEED]

Says every 50,000 inputs how many were refused, and how much memory is held; ends with status 1 where memory has
grown. `test_fuzz.py` runs a few thousand.
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import psutil
import torch
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.shard import Sender, Shard
from ridgeline.runtime.kvstore.serving.wire import Answer, Call, Shape, ValueSlot
from ridgeline.runtime.kvstore.updaters import SetOptimizer

ROUND = 5_000
"""Inputs for one shard."""
TOLD = 50_000
MOST_GROWTH_BYTES = 64 << 20
"""Between the first and the last time that memory is looked at."""
INTERESTING = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xD3, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)
"""First bytes of what msgpack holds: lengths, and numbers of many bytes."""
SLOT, SHAPE = ValueSlot("w", 0), Shape("float32", (6, 2))
BODIES: tuple[wire.Body, ...] = (
    wire.Init(SLOT, SHAPE),
    wire.Know(SLOT, SHAPE),
    wire.Push(SLOT, SHAPE),
    wire.Push(SLOT, SHAPE, {"type": "2bit", "threshold": 0.5}),
    wire.Push(SLOT, SHAPE, {"type": "int8"}),
    wire.PushRows(SLOT, Shape("float32", (2, 2))),
    wire.Pull(SLOT),
    wire.Pull(SLOT, 2),
    SetOptimizer("sgd", 1.0, {"lr": 0.1, "momentum": 0.9}),
    SetOptimizer("adam", 0.5, {"lr": 0.1, "betas": [0.9, 0.99]}),
    wire.SetUpdater("add"),
    wire.States(),
    wire.LoadStates(40),
    wire.Barrier(),
    wire.Share("ridgeline-" + "0" * 32, "host"),
    wire.Beat(),
    wire.Join(),
    wire.Enter(SLOT),
    wire.Enter(SLOT, 3),
    wire.Leave(),
)
ANSWERS = (
    Answer(3),
    Answer(4, "wanted this, got that", is_parked=True),
    Answer(5, shape=SHAPE, is_shared=True, versions={0: 7, 1: 9}),
)


class Counts(NamedTuple):
    """What became of inputs."""

    inputs: int
    refused: int
    failed: int
    done: int


def fuzz(inputs: int, seed: int) -> Counts:
    """Mutate messages, decode them, and have a shard handle those that are calls.

    Raises:
        Exception: whatever a decoder or a shard raises but `KVStoreError`: what is looked for.
    """
    chance = random.Random(seed)
    headers = [wire.encode(Call(0, 1, 1, body)) for body in BODIES]
    answers = [wire.encode(answer) for answer in ANSWERS]
    refused = failed = done = 0
    shard = Shard(2, None)
    for number in range(inputs):
        if number % ROUND == 0:
            shard = begun(chance.choice((None, 0, 1)))
        if number % 8 == 0:
            refused += not is_answer(mutated(chance, answers))
            continue
        try:
            call = wire.decode_call(mutated(chance, headers))
        except KVStoreError:
            refused += 1
            continue
        for reply in shard.handle(numbered(chance, shard, call), frames(chance)):
            wire.decode_answer(wire.encode(reply.answer))
            failed += bool(reply.answer.error)
            done += not reply.answer.error
    return Counts(inputs, refused, failed, done)


def begun(staleness: int | None) -> Shard:
    """A shard that holds a value."""
    shard = Shard(2, staleness)
    shard.handle(Call(0, 0, 1, wire.Init(SLOT, SHAPE)), [wire.frame_of(torch.zeros(6, 2))])
    shard.handle(Call(0, 0, 2, SetOptimizer("sgd", 1.0, {"lr": 0.1})), [])
    return shard


def is_answer(header: bytes) -> bool:
    """Whether bytes are taken for one."""
    try:
        wire.decode_answer(header)
    except KVStoreError:
        return False
    return True


def mutated(chance: random.Random, headers: Sequence[bytes]) -> bytes:
    """One of them with up to four changes; now and then as it is, or nothing but noise."""
    if chance.random() < 0.02:
        return chance.randbytes(chance.randrange(80))
    data = bytearray(chance.choice(headers))
    for _ in range(chance.randrange(5)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                data[place : place + 1] = bytes([chance.choice(INTERESTING)])
            case 2:
                data[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                del data[place : place + chance.randrange(1, 9)]
            case 4:
                del data[place:]
                data += chance.choice(headers)[place:]
            case _:
                data[place:place] = data[place : place + chance.randrange(1, 9)]
    return bytes(data)


def numbered(chance: random.Random, shard: Shard, call: Call) -> Call:
    """Mostly the call that comes next on its connection, which is then done."""
    if chance.random() < 0.2:
        return call
    sender = Sender(call.worker, call.channel)
    return msgspec.structs.replace(call, number=shard._done.get(sender, 0) + 1)


def frames(chance: random.Random) -> list[memoryview]:
    """None, one or several, of sizes that fit and others."""
    made: list[Tensor] = [
        torch.tensor([0, chance.randrange(8)]),
        torch.zeros(6, 2),
        torch.zeros(2, 2),
        torch.zeros(3, dtype=torch.uint8),
        torch.full((6, 2), float("nan")),
    ]
    chosen = chance.choices(made, k=chance.choice((0, 1, 1, 1, 2, 2, 3)))
    return [memoryview(bytearray(wire.frame_of(one))) for one in chosen]


def main() -> int:
    """Fuzz as often as asked."""
    given = [int(word) for word in sys.argv[1:]]
    inputs, seed = [*given, *(1_000_000, 0)[len(given) :]]
    process, begun_s, held = psutil.Process(), time.monotonic(), []
    totals = [0, 0, 0, 0]
    for part in range(0, inputs, TOLD):
        counts = fuzz(min(TOLD, inputs - part), seed + part)
        totals = [total + one for total, one in zip(totals, counts, strict=True)]
        held.append(process.memory_info().rss)
        sys.stdout.write(
            f"{totals[0]} inputs: {totals[1]} refused, {totals[2]} calls failed, {totals[3]} done; "
            f"{held[-1] >> 20} MiB, {time.monotonic() - begun_s:.0f} s\n"
        )
        sys.stdout.flush()
    return int(held[-1] - held[0] > MOST_GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main())
