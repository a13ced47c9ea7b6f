"""The numbers of workers that plan, simulate and train compare."""

import msgspec
import pytest

from ridgeline.cli.arguments.inputs import worker_counts
from ridgeline.errors import PlanError
from ridgeline.machine import Device, Machine


def host(machine_file: str, *, cores: int = 2, gpus: int = 0) -> Machine:
    machine = Machine.load(machine_file)
    gpu = [Device(kind="cuda", index=i, name="gpu", memory_bytes=1 << 30) for i in range(gpus)]
    return msgspec.structs.replace(
        machine,
        host=msgspec.structs.replace(machine.host, cores=cores),
        devices=(*machine.devices, *gpu),
    )


@pytest.mark.parametrize(
    ("room", "batch_size", "asked", "counts"),
    [
        ({"cores": 2}, 8, {}, (1, 2)),
        ({"cores": 2}, 7, {}, (1,)),
        ({"cores": 6}, 12, {}, (1, 2, 4, 6)),
        ({"cores": 6}, 8, {}, (1, 2, 4)),
        ({"cores": 8}, 8, {"threads": 2}, (1, 2, 4)),
        ({"cores": 2}, 8, {"threads": 4}, (1,)),
        ({"cores": 64}, 64, {}, (1, 2, 4, 8)),
        ({"cores": 64, "gpus": 4}, 64, {"threads": 32}, (1, 2, 4)),
        ({"cores": 2}, 64, {"most": 16}, (1, 2, 4, 8, 16)),
        ({"cores": 2}, 8, {"most": 3}, (1, 2)),
        ({"cores": 2}, 9, {"wished": 3}, (1, 3)),
    ],
)
def test_counts_share_the_batch(
    machine_file, room: dict, batch_size: int, asked: dict, counts: tuple[int, ...]
) -> None:
    """Powers of two and the largest number, each dividing the batch; unasked, what there is room for."""
    assert worker_counts(host(machine_file, **room), batch_size, **asked) == counts


def test_a_wished_number_must_share_the_batch(machine_file) -> None:
    """A number that was asked for is never replaced by another."""
    with pytest.raises(PlanError) as error:
        worker_counts(host(machine_file), 8, wished=3)
    assert str(error.value) == (
        "wanted a global batch that 3 workers can share equally, got batch size 8; use --batch-size 6 "
        "or 9"
    )
