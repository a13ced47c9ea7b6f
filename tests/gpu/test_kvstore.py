"""Stores whose values are on GPUs: of one process with one or several, and of a worker a GPU."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.runtime import kvstore
from torchrun import torchrun

SCRIPT = Path(__file__).parent / "store_cases.py"
COUNT = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not COUNT, reason="needs a CUDA device")]


def on_each(value: Tensor) -> list[Tensor]:
    """A multiple of it for each device, one more at each."""
    return [(number + 1) * value.to(f"cuda:{number}") for number in range(COUNT)]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_devices_of_a_process_add_up(kind: str) -> None:
    """All get the sum, whatever the stream on which it was made."""
    with kvstore.create(kind) as store:
        store.init(["w", "v"], [torch.zeros(300, 200, device="cuda"), torch.zeros(70)])
        outs = [[torch.empty_like(one) for one in on_each(torch.ones(300, 200))]]
        outs.append([torch.empty_like(one) for one in on_each(torch.ones(70))])
        for step in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(1_000_000)
                pushed = [on_each(torch.full((300, 200), step + 1.0)), on_each(torch.ones(70))]
                store.push(["w", "v"], pushed)
                for tensors in pushed:
                    for tensor in tensors:
                        tensor.zero_()  # a push has read it
                store.pull(["w", "v"], outs)
                for out in outs[0]:
                    assert torch.equal(
                        out, torch.full_like(out, (step + 1) * COUNT * (COUNT + 1) / 2)
                    )
        for out in outs[1]:
            assert torch.equal(out, torch.full_like(out, COUNT * (COUNT + 1) / 2))


def test_updates_are_those_of_the_optimizer_alone() -> None:
    """Adam on the device, bit for bit, and its momenta through a file."""
    first = torch.randn(500, generator=torch.Generator().manual_seed(0)).cuda()
    alone = first.clone().requires_grad_()
    reference = torch.optim.Adam([alone], lr=0.1, foreach=False)
    with kvstore.create("device") as store:
        store.init("w", first)
        store.set_optimizer("adam", lr=0.1, foreach=False)
        for step in range(4):
            gradient = torch.full((500,), step + 0.5, device="cuda")
            alone.grad = gradient.clone()
            reference.step()
            store.push("w", gradient)
        assert torch.equal(store.pull("w").get(), alone.detach().cpu())


@pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")
def test_workers_with_a_gpu_each(tmp_path: Path) -> None:
    """Sums, training, rows and bits by NCCL, and the kinds that go through the host."""
    output = tmp_path / "found.json"
    torchrun(COUNT, SCRIPT, output)
    for rank in range(COUNT):
        told = json.loads(Path(f"{output}.{rank}").read_text())
        assert told.pop("device").startswith("cuda")
        wrong = [(kind, name) for kind, found in told.items() for name in found if not found[name]]
        assert not wrong
