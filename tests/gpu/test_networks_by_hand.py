"""A whole step in one CUDA graph, written by hand: it trains as the plain loop does."""

import pytest
import torch
from torch import nn

from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.sides.by_hand import whole_step_graph
from ridgeline.experiments.networks.sides.forms import NetworkSubject, forms_by_hand, plain_forms
from ridgeline.experiments.plain_step import PlainStep
from ridgeline.workers.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def subject_of(name: str) -> NetworkSubject:
    world = World(0, 1, 0, torch.device("cuda", torch.cuda.current_device()))
    return NetworkSubject(network=catalog()[name], world=world, scale="cpu")


@pytest.mark.parametrize("name", ["grouped_cnn", "heat_equation", "message_passing", "mlp"])
def test_a_replay_is_a_step(name: str) -> None:
    """After its warm-up the graph goes on with the losses that the eager loop has from there.

    None of these draws random numbers, of which a graph takes others.
    """
    subject = subject_of(name)
    eager = next(form for form in plain_forms(subject) if form.name == "eager").make(subject)
    by_hand = {form.name: form for form in forms_by_hand(subject)}
    graph = by_hand["graph of eager"].make(subject)
    wanted = [float(eager.run()) for _ in range(7)]
    # Three steps warm it up; the capture itself runs none.
    got = [float(graph.run()) for _ in range(4)]
    graph.close()
    assert got == pytest.approx(wanted[3:], rel=1e-3)
    assert len({round(loss, 7) for loss in got}) > 1


def test_a_capture_that_fails_leaves_the_others_running() -> None:
    """One that waits for the device after it has drawn: torch alone would refuse to draw from then on."""
    model = nn.Linear(4, 4).cuda()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.dropout(model(batch)).square().mean()
        loss.item()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = PlainStep(model, model, loss_fn, optimizer)
    with pytest.raises(RuntimeError):
        whole_step_graph(step, torch.ones(4, 4, device="cuda"))
    assert torch.rand(3, device="cuda").isfinite().all()
    step(torch.ones(4, 4, device="cuda"))
