"""The predicted peak of a step's memory against what the allocator held at most.

    python benchmarks/memory_peak.py [--device cuda] [--networks resnet50 vgg16] [--jobs 4] [--output FILE]

Predicted is what the trace knows, and the workspaces of operators, measured in a process that does not train;
`traced` is the former alone. Held is, on a GPU, `torch.cuda.max_memory_allocated()` over eager steps of a
process that holds nothing else; on a CPU, what the step's tensors held, and every allocation that torch's
profiler tells of, added up. The steps are those after the optimizer has made its state. Each network is a
process of its own, and a few run side by side: sizes are compared, not times.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import ridgeline as rl
from ridgeline import units
from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.network import Setup
from ridgeline.experiments.result_files import file_name, now, parser_of, this_hardware
from ridgeline.machine import Machine, Setting
from ridgeline.probe.attempts import survey_in_group
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.host import fingerprint
from ridgeline.simulator.memory import PEAK_CATEGORIES, memory_peak, peak_memory_bytes
from ridgeline.workload import Workload

RESULTS = Path(__file__).parent / "results"
WARM_STEPS = 3
STEPS = 3
BAR = 0.05
SAMPLES_S = 0.05
"""Seconds of samples: sizes need none, but operators are measured as they are for a prediction."""
DEADLINE_S = 90.0
FAILED = "it failed"
GPU_JOBS = 4
"""Most of a network's seconds on a GPU are those of one core, which imports and traces."""
GPU_LIMIT_S = 110.0
"""No network begins after this, so that all ends within two minutes and a half."""
NETWORKS = (
    "resnet50", "vgg16", "densenet121", "mobilenet_v2", "convnext_tiny", "vit_b_16", "bert_base",
    "gpt2_transformers", "t5_small", "lstm_language_model", "unet", "dlrm", "graph_attention", "mlp",
    "resnet18_small_images", "vit_small", "diffusion_unet", "dcgan_generator", "conformer_ctc", "translator",
    "gru_classifier", "gpt2_dropout",
)  # fmt: skip
"""At least ten kinds of networks, also of those that need torch alone; those whose packages are missing are
left out, and named."""


def main() -> int:
    """Measure each network in a process of its own, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(catalog()))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU where there is one"
    )
    parser.add_argument(
        "--jobs", type=int, help=f"networks at once; default: {GPU_JOBS} on a GPU, 1 on a CPU"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        help=f"no network begins after so many seconds; default: {GPU_LIMIT_S:.0f} on a GPU, none on a CPU",
    )
    parser.add_argument("--output", type=output_file, help="default: below benchmarks/results/")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("wanted a GPU, got none that torch can use; leave out --device, or say cpu")
    if args.one:
        print(json.dumps(_measured(args.networks[0], device)))
        return 0
    on_gpu = device == "cuda"
    jobs = args.jobs or (GPU_JOBS if on_gpu else 1)
    limit_s = args.limit_s or (GPU_LIMIT_S if on_gpu else math.inf)
    start = time.monotonic()

    def row_of(name: str) -> dict[str, Any] | str:
        if missing := catalog()[name].missing:
            return _left_out(name, f"{', '.join(missing)} is not installed")
        if time.monotonic() - start > limit_s:
            return _left_out(name, f"{limit_s:.0f} s had passed")
        return _in_a_process(name, device, jobs)

    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(args.networks, pool.map(row_of, args.networks), strict=True))
    rows = [row for row in found.values() if isinstance(row, dict)]
    left_out = {name: row for name, row in found.items() if isinstance(row, str)}
    if not rows:
        parser.error("wanted networks that can be measured, got none; see the lines above")
    errors = sorted(abs(row["error"]) for row in rows)
    met = sum(error <= BAR for error in errors)
    print(
        f"{met} of {len(errors)} within {BAR:.0%}; median {statistics.median(errors):.1%}, "
        f"worst {errors[-1]:.1%}; {time.monotonic() - start:.0f} s"
    )
    result = {
        "date": now(),
        "device": this_hardware(device),
        "torch": str(torch.__version__),
        "rows": rows,
        "left_out": left_out,
    }
    place = args.output or RESULTS / file_name("memory_peak", this_hardware(device))
    place.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(why.startswith(FAILED) for why in left_out.values()))


def _left_out(name: str, why: str) -> str:
    print(f"{name:24} left out: {why}", flush=True)
    return why


def _in_a_process(name: str, device: str, jobs: int) -> dict[str, Any] | str:
    """The row of a network, or why it has none."""
    command = [sys.executable, __file__, "--networks", name, "--device", device, "--one"]
    environment = dict(os.environ)
    if device == "cuda":  # on a CPU operators take other workspaces for other numbers of threads
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return _left_out(name, f"{FAILED}: {done.stderr[-3000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    met = "met" if abs(row["error"]) <= BAR else "NOT MET"
    print(
        f"{name:24} traced {units.num_bytes(row['traced']):>10}  predicted "
        f"{units.num_bytes(row['predicted']):>10}  held {units.num_bytes(row['held']):>10}  "
        f"{row['traced_error']:+7.1%} -> {row['error']:+7.1%}  {met}",
        *(f"\n{'':24} {warning}" for warning in row["warnings"]),
        flush=True,
    )
    return row


def _measured(name: str, device: str) -> dict[str, Any]:
    setup = catalog()[name].build(device, "gpu" if device == "cuda" else "cpu")
    workload = rl.trace(
        setup.model, setup.loss_fn, setup.optimizer, setup.batch, name=name, may_run=True
    )
    found = _workspaces(workload)
    machine = _machine(found)
    peak = memory_peak(workload, rl.Plan(), machine)
    traced = peak_memory_bytes(workload, rl.Plan())
    with rl.TrainStep(
        setup.model, setup.loss_fn, setup.optimizer, rl.Plan(), device=device
    ) as step:
        for _ in range(WARM_STEPS):
            step(setup.batch)
        held = _held_on_gpu(step, setup) if device == "cuda" else _held_on_cpu(step, setup)
        requested = _requested() if device == "cuda" else held
    return {
        "network": name,
        "traced": traced,
        "predicted": peak.total_bytes,
        "held": held,
        "requested": requested,
        "traced_error": traced / held - 1.0,
        "error": peak.total_bytes / held - 1.0,
        "categories": {each: getattr(peak, f"{each}_bytes") for each in PEAK_CATEGORIES},
        "at": workload.ops[peak.op].name,
        "warnings": [line for line in found.warnings if "workspace" in line or "timed" in line],
    }


def _workspaces(workload: Workload) -> Findings:
    """What operators take, measured where training does not see it: libraries keep buffers by stream."""
    threads = 0 if workload.device == "cuda" else torch.get_num_threads()
    setting = Setting(device=workload.device, workers=1, threads=threads)
    request = Request(quick=True, timings=(setting,), workload=workload, samples_s=SAMPLES_S)
    return survey_in_group(request, setting, deadline_s=DEADLINE_S)


def _machine(found: Findings) -> Machine:
    host, devices = fingerprint.host(), fingerprint.devices()
    return Machine(
        fingerprint=fingerprint.fingerprint(host, devices),
        measured_at="",
        host=host,
        devices=devices,
        timings=found.timings,
        warnings=found.warnings,
    )


def _held_on_gpu(step: rl.TrainStep, setup: Setup) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        step(setup.batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _requested() -> int:
    """What the allocator was asked for at most: what it held without what it rounds up."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def _held_on_cpu(step: rl.TrainStep, setup: Setup) -> int:
    """What was there before a step, and the largest sum of what came and went in it.

    Gradients are not counted as there: the step lets go of them first, which the profiler does not tell of
    what was allocated before it began.
    """
    before = _bytes_of(_tensors(setup))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(setup.batch)
    now = most = 0
    events = run.profiler.kineto_results.events()
    for event in sorted(
        (each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return before + most


def _tensors(setup: Setup) -> Iterable[Tensor]:
    yield from setup.model.parameters()
    yield from setup.model.buffers()
    kept = (list(setup.optimizer.state.values()), setup.batch)
    yield from (leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


if __name__ == "__main__":
    sys.exit(main())
