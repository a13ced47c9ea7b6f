"""Intensities of layers: bytes by the laws, ridge points by the machine, sums of the whole step."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

sys.path.append(str(Path(__file__).parents[1]))

from layered_workloads import CONVOLUTION, LINEAR, NORM, LayerSpec, layered
from ridgeline import laws
from ridgeline.codec import decode, encode
from ridgeline.errors import PlanError
from ridgeline.machine.cluster import parse_cluster
from ridgeline.simulator.layers.intensity import Intensities, intensities
from strategies import make_machine

specs = st.builds(
    LayerSpec,
    name=st.uuids().map(str),
    family=st.sampled_from(["matmul", "convolution", "normalization", "gather"]),
    weights=st.integers(1, 10**5).map(lambda n: 10 * n),
    outputs=st.integers(1, 10**5),
    flops=st.integers(0, 10**9),
)


@given(
    st.lists(specs, min_size=1, max_size=6, unique_by=lambda spec: spec.name),
    st.integers(2, 64),
    st.integers(0, 10**6),
)
def test_sums_are_those_of_the_step(layers, workers, other) -> None:
    """FLOP in layers and outside of them, and the all-reduce of all gradients under data parallelism."""
    workload = layered(layers, other_flops=other)
    found = intensities(workload, workers)
    assert (
        found.flops
        == workload.flops
        == sum(o.layer.flops for o in found.layers) + found.other_flops
    )
    assert found.other_flops == other
    whole = sum(parameter.num_bytes for parameter in workload.gradients)
    assert found.sent("data") == pytest.approx(laws.data_parallel_bytes(whole, workers))
    assert found.sent(None) <= min(found.sent("data"), found.sent("model"))
    assert found.samples == workers * workload.samples


def test_a_chain_by_hand() -> None:
    """The first layer's input wants no gradient; the norm sends nothing of its own."""
    conv, norm, linear = intensities(layered(), 2).layers
    assert conv.data_bytes == 4 * 1_000
    assert conv.model_bytes == 0.5 * (2 * 4 * 4 * 10_000)
    assert (norm.data_bytes, norm.model_bytes, norm.better) == (4 * 200, 0.0, None)
    assert norm.model_intensity is None
    assert linear.data_bytes == 4 * 1_000_000
    assert linear.model_bytes == 0.5 * (2 * 4 * 4 * 100) + 2 * 4 * 4 * 10_000
    assert (conv.better, linear.better) == ("data", "model")
    assert conv.ratio == pytest.approx(160_000 / 4_000)
    assert linear.ratio == pytest.approx(4_000_000 / 321_600)
    flops = 3 * 4 * 20_000_000
    assert conv.data_intensity == pytest.approx(flops / 4_000)
    assert conv.model_intensity == pytest.approx(flops / 160_000)
    assert linear.samples == pytest.approx(8 * 4_000_000 / 321_600)


def test_the_batch_of_equal_bytes_is_one() -> None:
    """With as many samples neither way is better."""
    samples = intensities(layered((CONVOLUTION, LINEAR), samples=1), 2).layers[1].samples
    assert samples is not None
    grown = intensities(layered((CONVOLUTION, LINEAR), samples=round(samples / 2)), 2).layers[1]
    assert grown.ratio == pytest.approx(1.0, rel=0.05)


def test_the_ridge_point_is_the_machines() -> None:
    """Ceilings of 1 GFLOP/s; an all-reduce over 2 of 1 GB/s puts as many bytes on each link as it reduces."""
    machine = make_machine(latency_s=0.0)
    found = intensities(layered(), 2, machine)
    assert found.link_bytes_per_s == pytest.approx(1e9)
    conv, norm, linear = found.layers
    assert conv.ridge == pytest.approx(1.0)
    assert norm.ridge is None
    assert not norm.is_link_bound("data")
    assert not conv.is_link_bound("data")
    assert not linear.is_link_bound("model")
    slow = intensities(layered(), 4, structs.replace(machine, cluster=parse_cluster("2:100kbit")))
    assert slow.link_bytes_per_s == pytest.approx(12_500, rel=1e-3)
    linear = slow.layers[2]
    assert linear.is_link_bound("data")
    assert linear.ridge == pytest.approx(1e9 / 12_500, rel=1e-3)
    assert any("by the laws of rings and trees" in note for note in slow.notes)


def test_each_layer_has_the_ridge_point_of_its_own_dtype() -> None:
    """Two linear layers in two precisions are limited by two ceilings."""
    machine = make_machine(latency_s=0.0)
    narrow = [
        structs.replace(c, dtype="bfloat16", rate=c.rate.times(8.0))
        for c in machine.ceilings
        if c.family == "matmul"
    ]
    machine = structs.replace(machine, ceilings=(*machine.ceilings, *narrow))
    half = LINEAR._replace(name="half", dtype="bfloat16")
    found = intensities(layered((LINEAR, half)), 2, machine)
    assert [one.ridge for one in found.layers] == pytest.approx([1.0, 8.0])


def test_what_was_not_measured_is_told() -> None:
    """Without a ceiling, or collectives, there is no ridge point, and a note says so."""
    machine = make_machine()
    half = [LayerSpec("fc", "matmul", 1_000, 100, 10, "bfloat16")]
    found = intensities(layered(half), 2, machine)
    assert found.layers[0].ridge is None
    assert found.notes == ("no ceiling of matmul in bfloat16 was measured: it has no ridge point",)
    alone = intensities(layered(), 2, structs.replace(machine, collectives=()))
    assert alone.link_bytes_per_s is None
    assert alone.notes[-1].startswith(
        "there is no ridge point: wanted the time of all_reduce over 2 workers"
    )
    assert intensities(layered(), 2).notes == ()


def test_a_workload_without_places_has_no_traffic() -> None:
    """Its gradients are known, what splitting it sends is not: a note says so."""
    workload = layered()
    blind = structs.replace(
        workload, ops=tuple(structs.replace(op, memory=()) for op in workload.ops)
    )
    found = intensities(blind, 2)
    assert found.sent("data") == intensities(workload, 2).sent("data")
    assert found.notes[-1].startswith("the workload does not say where tensors lie")


def test_a_worker_alone_is_refused() -> None:
    """It sends nothing either way."""
    with pytest.raises(PlanError) as caught:
        intensities(layered(), 1)
    assert str(caught.value) == (
        "wanted at least 2 workers to share layers, got 1; a worker alone sends nothing"
    )


def test_the_noun_survives_its_file() -> None:
    found = intensities(layered((CONVOLUTION, NORM)), 8, make_machine())
    assert decode(Intensities, encode(found), where="here") == found
