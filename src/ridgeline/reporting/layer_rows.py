"""Layers and their intensities as tables and pictures show them: equal ones together, kinds by name."""

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import times
from ridgeline.simulator.layers.intensity import Intensities, Intensity, Way
from ridgeline.simulator.layers.layers import names_of

KINDS = {"matmul": "fully connected", "gather": "embedding"}
"""What people call a layer whose work is of a family; others are called by the family."""
_WAYS: tuple[tuple[Way | None, str], ...] = (
    ("data", "all by data parallelism"),
    ("model", "all by model parallelism"),
    (None, "each layer the better way"),
)


class LayerRow(NamedTuple):
    """Layers that are alike."""

    members: tuple[Intensity, ...]

    @property
    def one(self) -> Intensity:
        """What is true of each of them."""
        return self.members[0]

    @property
    def flops(self) -> int:
        """Of all of them."""
        return sum(member.layer.flops for member in self.members)

    @property
    def name(self) -> str:
        """Of the first, and how many more there are."""
        return names_of([member.layer for member in self.members])


def rows_of(found: Intensities) -> tuple[LayerRow, ...]:
    """The layers that have something to split, equal ones in one row, in their order."""
    rows: dict[tuple[object, ...], list[Intensity]] = {}
    for one in found.layers:
        layer = one.layer
        if layer.is_split:
            # What makes layers equal on the wire, whatever they are called.
            key = (layer.family, layer.dtype, layer.flops, one.data_bytes, one.model_bytes)
            rows.setdefault(key, []).append(one)
    return tuple(LayerRow(tuple(members)) for members in rows.values())


def kind(family: str) -> str:
    """What people call layers of a family."""
    return KINDS.get(family, family)


def layers_grid(found: Intensities) -> Grid:
    """Layers that are alike in a row, with what each worker sends for them; bytes are of all of them."""
    head = (
        *(
            "Layer",
            "Kind",
            "FLOP",
            "Data: sent",
            "FLOP/B",
            "Bound",
            "Model: sent",
            "FLOP/B",
            "Bound",
        ),
        *("Higher", "Data from"),
    )
    rows = tuple(map(_cells, rows_of(found)))
    return Grid(f"Layers of {found.title}", head, rows, right=(2, 3, 4, 6, 7, 10))


def _cells(row: LayerRow) -> tuple[str, ...]:
    one, count = row.one, len(row.members)
    return (
        row.name,
        kind(one.layer.family),
        units.quantity(row.flops, "FLOP"),
        units.num_bytes(count * one.data_bytes),
        _per_byte(one.data_intensity),
        _bound(one, "data"),
        units.num_bytes(count * one.model_bytes),
        _per_byte(one.model_intensity),
        _bound(one, "model"),
        "" if one.better is None else f"{one.better}, {times(one.ratio)}",
        "" if one.samples is None else units.digits3(one.samples),
    )


def rest_lines(found: Intensities) -> list[str]:
    """What is in no row: layers that have nothing to split, and FLOP outside of layers."""
    lines = []
    rest = [one for one in found.layers if not one.layer.is_split]
    if rest:
        lines.append(
            f"{len(rest)} more, such as {rest[0].layer.name}, have parameters but no columns to split: "
            f"{units.num_bytes(sum(one.data_bytes for one in rest))} sent under data parallelism, nothing of "
            "their own under model parallelism, where they follow the layer before"
        )
    if found.other_flops:
        lines.append(f"{units.quantity(found.other_flops, 'FLOP')} are in no layer with parameters")
    return lines


def ways_grid(found: Intensities) -> Grid:
    """What a worker sends for all layers, in one way or the other."""
    link = found.link_bytes_per_s
    rows = tuple(
        (
            name,
            units.num_bytes(sent),
            units.digits3(found.flops / sent) if sent else "",
            units.seconds(sent / link) if link else "",
        )
        for way, name in _WAYS
        for sent in (found.sent(way),)
    )
    return Grid("What all layers send", ("Way", "Sent", "FLOP/B", "On the link"), rows)


def intensity_reading(found: Intensities) -> str:
    """One sentence a kind of layer on the better way, and one on what the link makes of it."""
    rows = rows_of(found)
    members = [member for row in rows for member in row.members]
    families = dict.fromkeys(member.layer.family for member in members)
    parts = [_of_kind(family, members, found.flops) for family in families]
    if not parts:
        return "No layer has weights to split."
    text = "; ".join(parts)
    told = [f"{text[0].upper()}{text[1:]}"]
    if found.link_bytes_per_s and found.rates:
        told.append(_of_link(found, members))
    return ". ".join(told) + "."


def _of_kind(family: str, members: Sequence[Intensity], flops: int) -> str:
    mine = [member for member in members if member.layer.family == family]
    data, model = sum(m.data_bytes for m in mine), sum(m.model_bytes for m in mine)
    share = units.percent(sum(m.layer.flops for m in mine) / flops) if flops else "none"
    # The fewer bytes, the higher the intensity: both ways share the FLOP alike.
    low, high = sorted((data, model))
    name = f"{kind(family)} layers ({len(mine)}, {share} of the FLOP)"
    way = "data" if data == low else "model"
    if low == high:
        return f"{name}: both ways send {'as much' if low else 'nothing'}"
    if not low:
        return f"{name}: {way} parallelism sends nothing"
    other = "model" if way == "data" else "data"
    # A sum over layers may favour one way, and single ones of them the other.
    against = sum(m.better == other for m in mine)
    but = f", though not for {against} of them" if against else ""
    return f"{name}: {way} parallelism has {times(high / low)} the intensity{but}"


def _of_link(found: Intensities, members: Sequence[Intensity]) -> str:
    # Layers of one dtype have one ridge point, which is told once.
    ridges = dict.fromkeys(m.ridge for m in members if m.ridge is not None)
    if not ridges:
        return "No layer has a ridge point"
    below = " or ".join(units.digits3(ridge) for ridge in ridges)
    rate = units.quantity(found.link_bytes_per_s or 0.0, "B/s")
    counts = {way: sum(m.is_link_bound(way) for m in members) for way in ("data", "model")}
    both = sum(m.is_link_bound("data") and m.is_link_bound("model") for m in members)
    return (
        f"The link of each of {found.workers} workers carries {rate} and decides below {below} FLOP per "
        f"byte: for {counts['data']} of {len(members)} layers under data parallelism, {counts['model']} "
        f"under model parallelism, {both} either way"
    )


def _per_byte(intensity: float | None) -> str:
    return "" if intensity is None else units.digits3(intensity)


def _bound(one: Intensity, way: Way) -> str:
    intensity = one.data_intensity if way == "data" else one.model_intensity
    if one.ridge is None or intensity is None:
        return ""
    return "link" if one.is_link_bound(way) else "compute"
