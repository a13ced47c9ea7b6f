"""The networks of the experiment: enough of them, of enough kinds, each the same every time, each trains."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from ridgeline.cli.bench import EXPERIMENTS
from ridgeline.errors import TaskError
from ridgeline.experiments.networks.catalog import FAMILIES, catalog, chosen
from ridgeline.experiments.networks.network import Network
from ridgeline.experiments.networks.sides.forms import (
    NetworkSubject,
    forms_by_hand,
    optimizer_options,
    plain_forms,
)
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.workers.world import World

CPU = World(0, 1, 0, torch.device("cpu"))
GPU = World(0, 1, 0, torch.device("cuda", 0))
NETWORKS = list(catalog().values())
MORE_NETWORKS = Path(__file__).parents[2] / "benchmarks/more_networks.py"
ALL_NETWORKS = list(catalog([str(MORE_NETWORKS)]).values())
OWN = """
from ridgeline.experiments.networks.families.perceptrons import NETWORKS as KNOWN
import dataclasses
import beside
NETWORKS = [dataclasses.replace(KNOWN[0], name=beside.NAME)]
"""


def needed(network: Network) -> Network:
    if network.missing:
        pytest.skip(f"{network.name} needs {', '.join(network.missing)}, which is not installed")
    return network


@pytest.fixture
def subject() -> NetworkSubject:
    return NetworkSubject(network=catalog()["unet"], world=CPU, scale="cpu")


def test_there_are_enough() -> None:
    """At least 24 of at least 10 kinds, 16 of which need nothing installed, and 6 for several workers."""
    assert len(NETWORKS) == sum(len(family.NETWORKS) for family in FAMILIES) >= 24
    alone = [network for network in NETWORKS if not network.needs]
    assert len(alone) >= 16
    assert len({network.kind for network in alone}) >= 10
    assert sum(network.several_workers for network in alone) >= 6


def test_kinds_are_those_of_the_command() -> None:
    """Every word that `ridgeline bench networks --only` takes names a kind, and every kind has a word."""
    words, kinds = EXPERIMENTS["networks"].parts, {network.kind for network in NETWORKS}
    assert all(any(word in kind for kind in kinds) for word in words)
    assert all(any(word in kind for word in words) for kind in kinds)


@pytest.mark.parametrize("network", ALL_NETWORKS, ids=lambda network: network.name)
def test_every_network_trains(network: Network) -> None:
    """Three plain steps have finite losses, and all that is trained of more than one dimension moves, no more."""
    setup = needed(network).build("cpu", "cpu")
    step = PlainStep(
        setup.model, setup.model, setup.loss_fn, setup.optimizer, clip_norm=network.clip_norm
    )
    before = [p.detach().clone() for p in setup.model.parameters()]
    losses = [step(setup.batch) for _ in range(3)]
    assert all(loss.dim() == 0 and loss.isfinite() for loss in losses)
    for old, new in zip(before, setup.model.parameters(), strict=True):
        if new.dim() >= 2:
            assert torch.equal(old, new) is not new.requires_grad


@pytest.mark.parametrize(
    "network",
    [network for network in NETWORKS if network.several_workers and not network.needs],
    ids=lambda network: network.name,
)
def test_workers_share_weights_and_not_data(network: Network) -> None:
    """Built again it has the same bits, whatever was drawn meanwhile; another worker has another batch."""
    first = network.build("cpu", "cpu")
    torch.rand(3)
    before = torch.get_rng_state()
    again = network.build("cpu", "cpu")
    assert torch.equal(before, torch.get_rng_state())
    other = network.build("cpu", "cpu", rank=1)
    for a, b, c in zip(*(one.model.parameters() for one in (first, again, other)), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    tensors = [[x for x in one.batch if x.unique().numel() > 2] for one in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(tensors[0], tensors[1], strict=True))
    assert not torch.equal(tensors[0][0], tensors[2][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["vgg99"]}, "wanted networks out of resnet50, vgg16, .* got 'vgg99'"),
        ({"kinds": ["poems"]}, "wanted kinds out of GAN, .* got 'poems' .* name some of those"),
        ({"names": ["mlp"], "kinds": ["GAN"]}, "wanted at least one network, got names and kinds"),
    ],
)
def test_unknown_networks_are_refused(arguments: dict[str, list[str]], message: str) -> None:
    """The message lists what there is."""
    with pytest.raises(TaskError, match=message):
        chosen(**arguments)


def test_networks_are_chosen_by_name_and_kind() -> None:
    """A word names all kinds that contain it; order is that of the catalog."""
    assert [one.name for one in chosen(["vae", "mlp"])] == ["vae", "mlp"]
    assert {one.kind for one in chosen(kinds=["coder"])} == {
        "encoder", "decoder", "encoder-decoder", "autoencoder",
    }  # fmt: skip
    assert all(one.several_workers for one in chosen(several_workers=True))


def test_plain_forms_are_those_that_make_sense(subject: NetworkSubject) -> None:
    """Channels-last where there are convolutions, DDP around several workers, graphs on a GPU alone."""
    names = [form.name for form in plain_forms(subject)]
    assert names == [
        "eager", "eager, channels-last", "torch.compile", "torch.compile, channels-last",
    ]  # fmt: skip
    recurrent = NetworkSubject(network=catalog()["cell_loop"], world=CPU, scale="cpu")
    assert [form.name for form in plain_forms(recurrent)] == ["eager", "torch.compile"]
    two = World(0, 2, 0, torch.device("cpu"))
    together = NetworkSubject(network=recurrent.network, world=two, scale="cpu")
    assert [form.name for form in plain_forms(together)] == ["DDP", "DDP + torch.compile"]
    assert forms_by_hand(subject) == forms_by_hand(together) == []
    on_gpu = NetworkSubject(network=recurrent.network, world=GPU, scale="cpu")
    assert [form.name for form in forms_by_hand(on_gpu)] == [
        "graph of torch.compile", "graph of eager",
    ]  # fmt: skip


def test_a_model_that_computes_its_widths_is_looked_at_as_well(subject: NetworkSubject) -> None:
    """RegNet reads values of tensors while it is made, which a model on no device cannot."""

    def make_model() -> nn.Module:
        return nn.Conv2d(3, *torch.arange(4, 5).tolist(), 3)

    parts = subject.network.parts("cpu")._replace(make_model=make_model)
    network = dataclasses.replace(subject.network, parts=lambda _: parts)
    state = torch.get_rng_state()
    assert dataclasses.replace(subject, network=network).is_convolutional
    assert torch.equal(torch.get_rng_state(), state)


def test_forms_compute_the_same(subject: NetworkSubject) -> None:
    """Channels-last changes the order of additions and nothing else."""
    eager, channels_last = (
        form.make(subject) for form in plain_forms(subject) if "compile" not in form.name
    )
    for _ in range(3):
        torch.testing.assert_close(channels_last.run(), eager.run(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("name", "is_captured", "options"),
    [
        ("unet", False, {"fused": True}),
        ("unet", True, {"fused": True, "capturable": True}),
        ("dlrm", True, {"fused": True}),
        ("gru_classifier", False, {}),
        ("gru_classifier", True, {"capturable": True}),
        ("skip_gram_sparse", False, {}),
    ],
)
def test_peers_have_their_fastest_optimizer(
    name: str, is_captured: bool, options: dict[str, bool]
) -> None:
    """Fused where there is one and gradients are dense; fit for capture where it is captured."""
    found = optimizer_options(catalog()[name], CPU.device, is_captured=is_captured)
    assert found == options


def test_clipping_is_that_of_torch() -> None:
    """The plain loop's step with a clip norm moves SGD's parameters by at most that norm."""
    model = nn.Linear(4, 1)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = PlainStep(model, model, lambda m, x: 1e3 * m(x).sum(), optimizer, clip_norm=0.5)
    step(torch.ones(2, 4))
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5), rtol=1e-4, atol=0.0)


def test_networks_of_a_users_file(tmp_path: Path) -> None:
    """They alone are taken, by names beside the catalog's; the file finds what lies next to it."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    (tmp_path / "beside.py").write_text("NAME = 'mine'")
    assert [one.name for one in chosen(sources=[str(file)])] == ["mine"]
    assert [one.name for one in chosen(["mine", "vae"], sources=[str(file)])] == ["vae", "mine"]
    assert list(catalog([str(file)])) == [*catalog(), "mine"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"wanted a Python file with networks, got .*mine\.py; name a file"),
        ("1 / 0", r"got ZeroDivisionError while running .*mine\.py: division by zero; fix"),
        (
            "NETWORKS = [3]",
            r"wanted NETWORKS, a sequence of .*Network, in .*mine\.py, got \[3\]; see",
        ),
        ("NETWORKS = 3", r"wanted NETWORKS, a sequence of .*Network, in .*mine\.py, got 3; see"),
        ("x = 3", r"wanted NETWORKS, a sequence of .*Network, in .*mine\.py, got None; see"),
        (OWN.replace("beside.NAME", "'vae'").replace("import beside", ""), "second 'vae' in"),
    ],
)
def test_files_without_networks_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    """What is wrong with the file is said before anything is measured."""
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TaskError, match=message):
        chosen(sources=[str(file)])
