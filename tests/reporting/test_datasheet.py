"""Datasheets of GPUs: found by name alone, and shown beside what was measured."""

import msgspec
import pytest
from sample_machine import make_machine, measured_quantity

from printed import as_text
from ridgeline.machine import Ceiling, Device, Machine, Setting
from ridgeline.machine.datasheet import SHEETS, sheet_of, stated
from ridgeline.reporting.page.page_machine import machine_reading, machine_section
from ridgeline.reporting.terminal.text import machine_text

GPU = Setting(device="cuda", workers=1)
NAMES = {
    "Tesla V100-SXM2-32GB": (900e9, 125e12),
    "Tesla V100-PCIE-16GB": (900e9, 112e12),
    "Tesla V100S-PCIE-32GB": (1134e9, 130e12),
    "Tesla T4": (320e9, 65e12),
    "NVIDIA A100-SXM4-40GB": (1555e9, 312e12),
    "A100-PCIE-40GB": (1555e9, 312e12),
    "NVIDIA A100-SXM4-80GB": (2039e9, 312e12),
    "NVIDIA A100 80GB PCIe": (1935e9, 312e12),
    "NVIDIA A10": (600e9, 125e12),
    "NVIDIA GeForce RTX 3090": (936e9, 71e12),
    "NVIDIA GeForce RTX 4090": (1008e9, 165.2e12),
    "NVIDIA L4": (300e9, 121e12),
    "NVIDIA H100 80GB HBM3": (3350e9, 989.5e12),
    "NVIDIA H100 PCIe": (2000e9, 756.5e12),
    "NVIDIA H200": (4800e9, 989.5e12),
    "NVIDIA B200": (8000e9, 2250e12),
}
OTHERS = (
    "NVIDIA A10G",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H100 NVL",
    "NVIDIA H200 NVL",
    "NVIDIA GB200",
    "NVIDIA L40S",
    "Intel(R) Xeon(R) Processor",
    "",
)


def with_gpu(name: str) -> Machine:
    """The sample machine with a GPU and three of its ceilings."""
    machine = make_machine()
    ceilings = tuple(
        Ceiling(setting=GPU, family=family, dtype=dtype, rate=measured_quantity(rate, unit))
        for family, dtype, rate, unit in (
            ("matmul", "bfloat16", 700e12, "FLOP/s"),
            ("elementwise", "float32", 6e12, "B/s"),
            ("memory", "float32", 4.2e12, "B/s"),
        )
    )
    return msgspec.structs.replace(
        machine,
        devices=(*machine.devices, Device(kind="cuda", index=0, name=name, memory_bytes=1 << 37)),
        ceilings=(*machine.ceilings, *ceilings),
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_gpu_has_one_sheet(name: str) -> None:
    """By the name that torch has for it; its tensor cores are faster than its others, and no rate is of sparsity."""
    sheet = sheet_of(name)
    assert sheet is not None
    assert (sheet.memory, sheet.rates["float16"]) == NAMES[name]
    assert sheet.source.startswith("NVIDIA ")
    assert set(sheet.rates) <= {"float32", "tf32", "bfloat16", "float16"}
    assert sheet.rates["float32"] < sheet.rates["float16"]
    half = sheet.rates.get("bfloat16", sheet.rates["float16"])
    assert half == sheet.rates["float16"]
    # A multiplication in tf32 takes twice as long as one in 16 bits, to the digits that are printed.
    assert sheet.rates.get("tf32", half / 2) == pytest.approx(half / 2, rel=0.025)


def test_every_sheet_is_of_some_gpu() -> None:
    """None is out of reach behind another."""
    assert {sheet_of(name) is not None for name in NAMES} == {True}
    assert len({id(sheet_of(name)) for name in NAMES}) == len(SHEETS)


@pytest.mark.parametrize("name", OTHERS)
def test_relatives_and_processors_have_none(name: str) -> None:
    """Nothing is guessed."""
    assert sheet_of(name) is None
    assert stated(name, "matmul", "float32") is None


def test_what_is_stated_of_a_ceiling() -> None:
    """Rates of memory and of matrices; nothing of units that are not there, or of what stays in a cache."""
    value = stated("Tesla V100-SXM2-32GB", "convolution", "float16")
    assert value is not None
    assert (value.value, value.unit, value.source, value.n) == (125e12, "FLOP/s", "datasheet", 0)
    memory = stated("Tesla V100-SXM2-32GB", "memory", "float32")
    assert memory is not None
    assert str(memory) == "900 GB/s (datasheet)"
    for family, dtype in (("matmul", "bfloat16"), ("matmul", "tf32"), ("elementwise", "float32")):
        assert stated("Tesla V100-SXM2-32GB", family, dtype) is None


def test_datasheets_stand_beside_what_was_measured() -> None:
    """The value and the share of it that was reached, and where it is from; on both."""
    machine = with_gpu("NVIDIA H200")
    lines = as_text(machine_text(machine), width=200).splitlines()
    row = next(line for line in lines if line.startswith("matmul bfloat16") and "cuda" in line)
    assert "700 TFLOP/s   990 TFLOP/s (70.7 %)" in row
    row = next(line for line in lines if line.startswith("memory float32") and "cuda" in line)
    assert "4.20 TB/s" in row
    assert "4.80 TB/s (87.5 %)" in row
    assert all("%)" not in line for line in lines if line.startswith("elementwise"))
    assert all("%)" not in line for line in lines if "cpu threads" in line)
    source = "Datasheet: NVIDIA H200 Tensor Core GPU datasheet; tensor cores halved, as it counts sparsity."
    assert source in lines
    page = str(machine_section(machine, None)).replace("\xa0", " ")
    assert "990 TFLOP/s (70.7 %)" in page
    assert source in page
    assert "(matmul, bfloat16), 70.7 % of the datasheet's, while 1 GPU run." in machine_reading(
        machine, GPU
    )


@pytest.mark.parametrize("machine", [make_machine(), with_gpu("NVIDIA Unheard Of")])
def test_without_a_datasheet_there_is_no_column(machine: Machine) -> None:
    """Nothing is said of it."""
    assert "Datasheet" not in as_text(machine_text(machine))
    page = str(machine_section(machine, None))
    assert "atasheet" not in page
