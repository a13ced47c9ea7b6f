"""`interpolate` with its gradient: eager, compiled, and compiled with Ridgeline's gradients, in turns.

    python benchmarks/resizing.py [--device cuda] [--turns 9] [--out FILE]

Prints the median milliseconds of each, the distance of its gradient from one in float64, and what moving
the bytes (two tensors read and two written) takes at the measured speed of a copy.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.result_files import now
from ridgeline.programs import inductor

LARGE = (
    *((16, 64, 64, 2, "bilinear"), (16, 64, 64, 2, "bicubic"), (16, 256, 32, 4, "bilinear")),
    *((16, 256, 16, 8, "bilinear"), (16, 21, 32, 16, "bilinear"), (8, 32, 256, 2, "bilinear")),
    (16, 256, 64, 1.6, "bilinear"),
)
SMALL = ((2, 16, 32, 2, "bilinear"), (2, 64, 16, 4, "bilinear"), (2, 16, 32, 2, "bicubic"))
"""Images, channels, height and width, factor, mode."""
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def main() -> None:
    """Run the contest, print its table, write it where wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=output_file)
    wanted = parser.parse_args()
    on_gpu = torch.device(wanted.device).type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    result: dict[str, Any] = {"date": now(), "device": name, "torch": torch.__version__, "rows": []}
    dtypes = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,)
    for dtype, layout, case in itertools.product(dtypes, FORMATS, LARGE if on_gpu else SMALL):
        result["rows"].append(measured(case, dtype, layout, wanted.device, wanted.turns))
        if wanted.out:  # after each, so that an interrupted run keeps what it has
            wanted.out.write_text(json.dumps(result, indent=1))


def measured(
    case: tuple[Any, ...], dtype: torch.dtype, layout: str, device: str, turns: int
) -> dict[str, Any]:
    """A row of the table: one case, all ways in turns."""
    count, channels, side, factor, mode = case
    size = (int(side * factor),) * 2
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, device=device, generator=generator)
        return values.to(dtype).to(memory_format=FORMATS[layout])

    def run(x: Tensor) -> Tensor:
        return functional.interpolate(x, size=size, mode=mode)

    x, gradient = draw(count, channels, side, side), draw(count, channels, *size)
    wanted = _gradient(run, x.double(), gradient.double())
    torch.compiler.reset()
    ways = {
        "eager": run,
        "compiled": torch.compile(run, dynamic=False),
        "ridgeline": torch.compile(run, dynamic=False, **inductor.plain_arguments()),
    }
    far = {name: _distance(_gradient(way, x, gradient), wanted) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            taken[name].append(_milliseconds(lambda way=way: _gradient(way, x, gradient), device))
    moved = 2 * (x.nbytes + gradient.nbytes)
    limit = moved / _bytes_a_ms(gradient, device)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    shown = "  ".join(f"{name} {ms:8.3f} ms ({far[name]:.0e})" for name, ms in medians.items())
    print(f"{dtype!s:14} {layout:13} {case!s:34} {shown}  limit {limit:.3f} ms", flush=True)
    kind = {"case": case, "dtype": str(dtype), "layout": layout, "limit_ms": limit}
    return {**kind, "milliseconds": medians, "of_turns": taken, "distance": far}


def _gradient(run: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(run(x), x, gradient)[0]


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def _milliseconds(act: Callable[[], object], device: str, times: int = 5) -> float:
    """Of one of several; on a GPU by its clock, whose queue is full before, so that no launch counts."""
    act()
    if torch.device(device).type != "cuda":
        begin = time.perf_counter()
        for _ in range(times):
            act()
        return (time.perf_counter() - begin) * 1e3 / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(5_000_000)  # noqa: SLF001 - torch's own tests fill queues with it
    first.record()
    for _ in range(times):
        act()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times


def _bytes_a_ms(tensor: Tensor, device: str) -> float:
    other = torch.empty_like(tensor)
    taken = min(_milliseconds(lambda: other.copy_(tensor), device) for _ in range(5))
    return 2 * tensor.nbytes / taken


if __name__ == "__main__":
    main()
