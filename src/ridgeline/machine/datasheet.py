"""What the vendor states of a GPU: its peak rates, to set measured ceilings beside."""

import re
from typing import NamedTuple

from ridgeline.machine.quantity import Quantity


class Sheet(NamedTuple):
    """Peak rates of one GPU at its rated clock, of dense matrices.

    `float32` is the rate of its ordinary cores. The others are those of its tensor cores, adding up in
    float32, as torch has them do; what they have no unit for is not there.
    """

    name: str
    """Regular expression of the whole name of the device, without the vendor's."""
    memory: float
    """B/s."""
    rates: dict[str, float]
    """FLOP/s by the dtype of a ceiling."""
    source: str


def _sheet(name: str, gb_per_s: float, source: str, **tflops: float) -> Sheet:
    return Sheet(
        name, 1e9 * gb_per_s, {dtype: 1e12 * rate for dtype, rate in tflops.items()}, source
    )


def _tensor(float32: float, tf32: float, half: float) -> dict[str, float]:
    # From Ampere on both halves of 16 bits have one rate.
    return {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half}


_VOLTA = "NVIDIA V100 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet; tensor cores halved, as it counts sparsity"
SHEETS = (
    # Before Ampere tensor cores multiply float16 only: no tf32, no bfloat16.
    _sheet(r"V100-SXM2-(16|32)GB", 900, _VOLTA, float32=15.7, float16=125),
    _sheet(r"V100-PCIE-(16|32)GB", 900, _VOLTA, float32=14, float16=112),
    _sheet(r"V100S-PCIE-32GB", 1134, _VOLTA, float32=16.4, float16=130),
    _sheet(
        r"T4", 320, "NVIDIA Turing GPU architecture whitepaper, Tesla T4", float32=8.1, float16=65
    ),
    _sheet(r"A100-(SXM4|PCIE)-40GB", 1555, _A100, **_tensor(19.5, 156, 312)),
    _sheet(r"A100-SXM4-80GB", 2039, _A100, **_tensor(19.5, 156, 312)),
    _sheet(r"A100 80GB PCIe", 1935, _A100, **_tensor(19.5, 156, 312)),
    _sheet(r"A10", 600, "NVIDIA A10 Tensor Core GPU datasheet", **_tensor(31.2, 62.5, 125)),
    # GeForce cards reach half of their tensor rate where sums are kept in float32, as torch keeps them.
    _sheet(
        r"GeForce RTX 3090",
        936,
        "NVIDIA Ampere GA102 GPU architecture whitepaper, FP32 accumulate",
        **_tensor(35.6, 35.6, 71),
    ),
    _sheet(
        r"GeForce RTX 4090",
        1008,
        "NVIDIA Ada GPU architecture whitepaper, FP32 accumulate",
        **_tensor(82.6, 82.6, 165.2),
    ),
    _sheet(
        r"L4",
        300,
        "NVIDIA L4 Tensor Core GPU datasheet; tensor cores halved, as it counts sparsity",
        **_tensor(30.3, 60, 121),
    ),
    _sheet(r"H100 80GB HBM3", 3350, _H100, **_tensor(67, 494.5, 989.5)),
    _sheet(r"H100 PCIe", 2000, _H100, **_tensor(51, 378, 756.5)),
    _sheet(
        r"H200",
        4800,
        "NVIDIA H200 Tensor Core GPU datasheet; tensor cores halved, as it counts sparsity",
        **_tensor(67, 494.5, 989.5),
    ),
    _sheet(
        r"B200",
        8000,
        "NVIDIA Blackwell architecture technical brief, HGX B200; tensor cores halved, as it counts sparsity",
        **_tensor(80, 1100, 2250),
    ),
)
"""Others of a family (A10G, RTX 4090 D, a slice of a GPU) have other rates and are not among these."""


def sheet_of(device: str) -> Sheet | None:
    """The sheet of a GPU by the name that torch has for it; None where it is not known."""
    # Drivers differ in what they write before the model: `Tesla T4`, `NVIDIA A10`.
    name = re.sub(r"^(NVIDIA |Tesla )+", "", device)
    # The whole name: A10 and A100 begin alike, and variants have rates of their own.
    return next((sheet for sheet in SHEETS if re.fullmatch(sheet.name, name)), None)


def stated(device: str, family: str, dtype: str) -> Quantity | None:
    """What the vendor states where a ceiling was measured; None where nothing is known.

    Elementwise operators have none: theirs is the best of all sizes, and small ones stay within a cache.
    Convolutions may exceed it: some algorithms multiply less often than the definition does.

    `device` is the name of the GPU; family and dtype as of `machine.Ceiling`.
    """
    sheet = sheet_of(device)
    if sheet is None:
        return None
    if family == "memory":
        return _quantity(sheet.memory, "B/s")
    if family not in ("matmul", "convolution") or dtype not in sheet.rates:
        return None
    return _quantity(sheet.rates[dtype], "FLOP/s")


def _quantity(value: float, unit: str) -> Quantity:
    return Quantity(value=value, unit=unit, low=value, high=value, n=0, source="datasheet")
