"""Saved programs on a GPU: packaged, loaded, captured into a CUDA graph, refused elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from ridgeline.errors import BatchError, PackageError
from ridgeline.packages import package as package_module
from ridgeline.packages.callables import PackagedCallable, package_callable
from ridgeline.packages.host import describe_host
from ridgeline.packages.package import read_package
from ridgeline.runtime.steps.load import LoadedCallable, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[nn.Module, PackagedCallable]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))
    net = net.cuda().eval()
    with package_callable(net, torch.randn(4, 64, device="cuda")) as packaged:
        yield net, packaged


def plain(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x)


def test_packaged_and_loaded_give_the_plain_results(
    network: tuple[nn.Module, PackagedCallable], tmp_path: Path
) -> None:
    """The packaged callable sees updated parameters; the loaded one keeps those of the file."""
    net, packaged = network
    loaded = load(packaged.save(tmp_path / "net.pt2"))
    assert isinstance(loaded, LoadedCallable)
    x = torch.randn(4, 64, device="cuda")
    before = plain(net, x)
    torch.testing.assert_close(loaded(x), before)
    with torch.no_grad():
        net[3].bias.add_(1)
    torch.testing.assert_close(packaged(x), plain(net, x))
    torch.testing.assert_close(loaded(x), before)
    for value in loaded.state.values():
        assert value.is_cuda


def test_unaligned_and_strided_inputs_are_right(
    network: tuple[nn.Module, PackagedCallable],
) -> None:
    """Kernels that read 16 bytes at once get inputs that start anywhere, or skip elements."""
    net, packaged = network
    wide = torch.randn(4 * 130 + 1, device="cuda")
    for x in (wide[1:257].view(4, 64), wide[:520].view(4, 130)[:, :128:2]):
        torch.testing.assert_close(packaged(x), plain(net, x))


def test_a_loaded_program_is_captured_and_replayed(
    network: tuple[nn.Module, PackagedCallable], tmp_path: Path
) -> None:
    """The program needs nothing of the host, so a CUDA graph holds it; new inputs and state count."""
    _net, packaged = network
    loaded = load(packaged.save(tmp_path / "net.pt2"))
    assert isinstance(loaded, LoadedCallable)
    x = torch.randn(4, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loaded(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = loaded(x)
    x.normal_()
    loaded.state["3.bias"].add_(2)
    graph.replay()
    torch.testing.assert_close(out, loaded(x))


def test_inputs_elsewhere_are_refused(network: tuple[nn.Module, PackagedCallable]) -> None:
    """An input on the host is named, and nothing is copied behind the user's back."""
    with pytest.raises(
        BatchError, match=r"^wanted input 0 as \(4, 64\) float32 on cuda:0, got .* on cpu;"
    ):
        network[1](torch.randn(4, 64))


def test_other_gpus_and_hosts_are_refused(
    network: tuple[nn.Module, PackagedCallable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for one generation of GPU does not load on another, nor on the host."""
    path = network[1].save(tmp_path / "net.pt2")
    with pytest.raises(PackageError, match=r"^wanted a program for cpu, got one made for cuda in "):
        read_package(path, device="cpu")
    here = describe_host(torch.device("cuda"))
    other = msgspec.structs.replace(here, capability="sm_10")
    monkeypatch.setattr(package_module, "describe_host", lambda _device: other)
    with pytest.raises(PackageError, match=rf"^wanted a GPU of {here.capability}, .* got sm_10;"):
        read_package(path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_program_runs_on_another_gpu_of_the_host(
    network: tuple[nn.Module, PackagedCallable], tmp_path: Path
) -> None:
    """The device index is chosen at loading."""
    net, packaged = network
    loaded = load(packaged.save(tmp_path / "net.pt2"), device="cuda:1")
    assert torch.cuda.current_device() == 0
    x = torch.randn(4, 64, device="cuda:0")
    torch.testing.assert_close(loaded(x.to("cuda:1")).to("cuda:0"), plain(net, x))
