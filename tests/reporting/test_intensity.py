"""Layers on the wire, drawn and told: equal ones together, the better way in words, ridge points as lines."""

import json
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from plotly_figures import taken_by_plotly
from test_report import read

from layered_workloads import CONVOLUTION, LINEAR, NORM, LayerSpec, layered
from printed import as_text
from ridgeline.codec import decode
from ridgeline.reporting.charts.chart_intensity import intensity_figure
from ridgeline.reporting.layer_rows import intensity_reading, layers_grid, rest_lines, rows_of
from ridgeline.reporting.report import report
from ridgeline.reporting.terminal.text_intensity import intensity_text
from ridgeline.simulator.layers.intensity import Intensities, intensities
from strategies import make_machine

TWIN = CONVOLUTION._replace(name="again <b>")
SMALL = LINEAR._replace(name="small", weights=100, flops=200)


@pytest.fixture(scope="module")
def found() -> Intensities:
    first = CONVOLUTION._replace(name="stem", weights=500)
    layers = (first, NORM, CONVOLUTION, TWIN, LINEAR)
    return intensities(layered(layers, other_flops=5_000), 2, make_machine(latency_s=0.0))


def test_equal_layers_share_a_row(found) -> None:
    """With what all of them send, and FLOP per byte of each; norms are told of below."""
    rows = rows_of(found)
    assert [row.name for row in rows] == ["stem", "conv and 1 more", "fc"]
    assert layers_grid(found).rows[1] == (
        *("conv and 1 more", "convolution", "480 MFLOP", "7.81 KiB", "60000", "compute"),
        *("938 KiB", "500", "compute", "data, 120 x", "0.0667"),
    )
    assert rest_lines(found) == [
        (
            "1 more, such as norm, have parameters but no columns to split: 800 B sent under data parallelism, "
            "nothing of their own under model parallelism, where they follow the layer before"
        ),
        "5.00 kFLOP are in no layer with parameters",
    ]


def test_the_sentence(found) -> None:
    """Each kind with its share and better way, then what the link makes of it."""
    assert intensity_reading(found) == (
        "Convolution layers (3, 96.8 % of the FLOP): data parallelism has 112 x the intensity; fully connected "
        "layers (1, 3.2 % of the FLOP): model parallelism has 12.4 x the intensity. The link of each of 2 workers "
        "carries 1.00 GB/s and decides below 1.00 FLOP per byte: for 0 of 4 layers under data parallelism, 0 under "
        "model parallelism, 0 either way."
    )


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (
            (CONVOLUTION, LINEAR, SMALL),
            "(2, 9.1 % of the FLOP): model parallelism has 12.3 x the intensity, though not for 1 of them.",
        ),
        ((NORM,), "No layer has weights to split."),
    ],
)
def test_the_sentence_without_a_machine(layers: tuple[LayerSpec, ...], told: str) -> None:
    """Nothing of links that nobody measured; and a kind may have both sorts of layers."""
    assert intensity_reading(intensities(layered(layers), 2)).endswith(told)


def test_dots_and_lines(found) -> None:
    """One dot a row at its two intensities, equal axes with their diagonal, a ridge line each way."""
    figure = intensity_figure(found)
    assert figure is not None
    dots = {one["name"]: one for one in figure["data"] if one["mode"] == "markers"}
    assert list(dots) == ["convolution", "fully connected"]
    rows = rows_of(found)
    assert dots["convolution"]["x"] == [row.one.data_intensity for row in rows[:2]]
    assert dots["fully connected"]["y"] == [rows[2].one.model_intensity]
    assert "again" not in json.dumps(figure)
    layout = figure["layout"]
    assert layout["xaxis"]["range"] == layout["yaxis"]["range"]
    assert layout["xaxis"]["type"] == layout["yaxis"]["type"] == "log"
    ridges = [one for one in figure["data"] if one.get("name") == "ridge point"]
    assert [(one["x"][0] == one["x"][1], one["y"][0] == one["y"][1]) for one in ridges] == [
        (True, False),
        (False, True),
    ]
    assert ridges[0]["x"][0] == ridges[1]["y"][0] == pytest.approx(1.0)
    assert [one["showlegend"] for one in ridges] == [True, False]


def test_what_has_no_place_on_logarithmic_axes(tmp_path) -> None:
    """Layers that compute nothing, such as embeddings: the page says how many, and may have no figure."""
    embedding = LayerSpec("embed", "gather", 1_000, 100, 0)
    assert intensity_figure(intensities(layered((embedding, NORM)), 2)) is None
    found = intensities(layered((embedding, LINEAR)), 2)
    figure = intensity_figure(found)
    assert figure is not None
    assert [one["name"] for one in figure["data"] if one["mode"] == "markers"] == [
        "fully connected"
    ]
    page = read(report(tmp_path / "r.html", intensities=found))
    assert "1 of 2 rows have no dot: they compute or send nothing." in "\n".join(page.text)


def test_plotly_takes_the_figure(found) -> None:
    """Every property exists, every value fits."""
    assert len(taken_by_plotly(intensity_figure(found) or {}).data) == 5


def test_names_stay_text_in_the_figure() -> None:
    """Plotly reads tags in texts: what a user named is not one."""
    figure = intensity_figure(intensities(layered((TWIN,)), 2))
    assert figure is not None
    (dots,) = (one for one in figure["data"] if one["mode"] == "markers")
    assert "again <b>" not in dots["text"][0]
    assert "again" in dots["text"][0]


def test_the_text(found) -> None:
    """Heading, rows, the whole either way, and the sentence."""
    told = as_text(intensity_text(found))
    assert (
        "Layers of layers  2 workers, 8 samples together, 744 MFLOP each; bytes that each sends"
        in told
    )
    for line in (
        "all by data parallelism",
        "all by model parallelism",
        "each layer the better way",
    ):
        assert line in told
    flat = " ".join(told.split())
    assert " ".join(intensity_reading(found).split()) in flat
    assert f"{rest_lines(found)[1]}." in flat


def test_the_page(found, tmp_path) -> None:
    """One section, its figure and tables, the formulas, and the noun to save."""
    page = read(report(tmp_path / "r.html", intensities=found))
    assert page.sections == ["intensity", "data"]
    text = "\n".join(page.text)
    assert "Layers on the wire, 2 workers, 8 samples" in text
    assert "2 (n-1)/n of their bytes" in text
    assert "Gholami et al., SPAA 2018" in text
    assert "ridgeline simulate --report makes the page again." in text
    assert "figure-intensity" in page.scripts
    held = page.scripts["noun-intensities"]
    assert decode(Intensities, held.encode(), where="page") == found
