"""Which device a worker trains on, of what a user may write for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.errors import LaunchError, PlanError
from ridgeline.workers.world import World


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_may_be_named_as_torch_does(device: Any) -> None:
    """By its name, or by an object."""
    assert World.join(device=device).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda:0")])
def test_a_gpu_is_never_taken_for_the_host(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written: training on the host instead would be slow, and silent."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert World.join(device=device).device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "wanted device='cpu' or 'cuda', got 'mps'; Ridgeline trains on these two"),
        (
            torch.device("meta"),
            "wanted device='cpu' or 'cuda', got 'meta'; Ridgeline trains on these two",
        ),
        ("gpu", "wanted device='cpu' or 'cuda', got 'gpu'"),
        ("", "wanted device='cpu' or 'cuda', got ''"),
        (1.5, "wanted device='cpu' or 'cuda', got 1.5"),
        (
            "cuda:1",
            (
                "wanted device='cuda', which is cuda:0 for local rank 0, got 'cuda:1'; start with "
                "CUDA_VISIBLE_DEVICES=1 to train on that GPU alone"
            ),
        ),
    ],
)
def test_another_device_is_refused(
    device: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is moved."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for plan in ("auto", rl.Plan()):
        with pytest.raises(LaunchError) as caught:
            rl.TrainStep(model, lambda m, b: m(b).sum(), optimizer, plan, device=device)
        assert str(caught.value) == message


def test_a_mesh_of_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device object is compared like its name."""

    class Mesh:
        device_type = "cpu"

    monkeypatch.setattr("ridgeline.workers.world.given_group", lambda *_: None)
    mesh: Any = Mesh()
    with pytest.raises(
        PlanError, match="wanted device='cpu', as the mesh has it, got device='cuda'"
    ):
        World.join(device=torch.device("cuda"), mesh=mesh)


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ({"RANK": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=x"),
        ({"RANK": "0"}, "MASTER_ADDR=None"),
        (
            {"RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "of 2 workers none has rank 2",
        ),
    ],
)
def test_an_environment_that_names_no_group_is_told(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], got: str
) -> None:
    """By its variables, and what torch says of them."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **named}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        LaunchError, match=f"wanted a process group to join by RANK.*{got}.*torchrun"
    ):
        World.join(device="cpu")


@pytest.mark.parametrize("told", ["x", "", "-1"])
def test_a_number_on_the_host_that_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """Before anything is made of it."""
    monkeypatch.setenv("LOCAL_RANK", told)
    with pytest.raises(LaunchError) as caught:
        World.join(device="cpu")
    assert str(caught.value) == (
        f"wanted this worker's number on its host in LOCAL_RANK, got LOCAL_RANK={told}; start all workers by "
        "torchrun, which sets it on each, or remove it"
    )


class Placed(nn.Module):
    """A model whose parameters lie on GPUs of these numbers, made on a host without any."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = numbers

    def parameters(self, recurse: bool = True) -> Any:
        """As `nn.Module` has them, by their devices alone."""
        del recurse
        return (SimpleNamespace(device=torch.device("cuda", number)) for number in self._numbers)


@pytest.mark.parametrize(
    ("device", "model", "in_group", "number"),
    [
        (None, None, True, 1),
        ("cuda", None, True, 1),
        ("cuda:2", None, True, 2),
        ("cuda:2", Placed(0), True, 2),
        (None, Placed(2, 2), True, 2),
        (None, Placed(0, 2), True, 1),
        (None, nn.Linear(2, 1), True, 1),
        (None, Placed(2), False, 2),
        ("cuda:2", None, False, 2),
        (None, None, False, 0),
    ],
)
def test_a_worker_without_a_number_has_the_gpu_that_its_script_names(
    device: str | None,
    model: nn.Module | None,
    in_group: bool,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.multiprocessing.spawn` tells none, nor does a script that trains on one GPU of several."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: in_group)
    monkeypatch.setattr("ridgeline.workers.world.mesh_over", lambda *_: None)
    for name, value in {"is_available": True, "device_count": 3, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert World.join(device=device, model=model).device == torch.device("cuda", number)
