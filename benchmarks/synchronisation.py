"""Gradient synchronisation: all-reduces and stores by size, steps over links of several rates, interleaved.

    python benchmarks/synchronisation.py                                   # all
    python benchmarks/synchronisation.py sync --only resnet18 --rates 100mbit   # two hosts, a slow link

`allreduce` sets every exact algorithm beside the backend's own all-reduce. `sync` trains a model over two
hosts on this machine (network namespaces, so it takes root and iproute2), ours beside
DistributedDataParallel and its hooks. `kvstore` pushes to and pulls from key-value stores, beside gloo. What
they compute is compared; figures are medians over turns with quartiles, ratios are taken turn by turn. These
are `ridgeline bench allreduce`, `sync` and `kvstore` with the result kept; beside the table of `sync` it
prints how far each step is from the limit, and from its prediction.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.experiments import allreduce, kvstore, sync
from ridgeline.experiments.result_files import file_name, hardware_of, parser_of, say
from ridgeline.experiments.sync.steps import COMPUTE
from ridgeline.experiments.ways.result import WayCase, WayExperiment
from ridgeline.experiments.ways.text import experiment_text
from ridgeline.reporting.terminal.text import console

RESULTS = Path(__file__).parent / "results"
EXPERIMENTS = {"allreduce": allreduce.run, "sync": sync.run, "kvstore": kvstore.run}


def distances(case: WayCase) -> list[str]:
    """Every measured way as a multiple of the case's limit, of computing alone, and of what was predicted."""
    said = []
    parts = {row.name: row.seconds for row in case.rows if row.kind == "part"}
    alone = parts.get(COMPUTE)
    for row in case.rows:
        if row.of_limit:
            said.append(f"{row.name}: {1 / row.of_limit:.3f} x the limit")
        if alone is not None and row.seconds is not None and row.kind != "part":
            said.append(f"{row.name}: {row.seconds.value / alone.value:.3f} x {COMPUTE}")
        if row.predicted_s is not None and row.seconds is not None:
            said.append(f"{row.name}: {row.seconds.value / row.predicted_s:.3f} x its prediction")
    return [f"{case.name}: {line}" for line in said]


def with_load(experiment: WayExperiment, before: Sequence[float]) -> WayExperiment:
    """The experiment, each case with a note on what else the cores did."""
    cores = experiment.host.cores
    note = (
        f"load average of the {cores} cores over a minute: {before[0]:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after; the experiment itself is about {cores}"
    )
    cases = [msgspec.structs.replace(case, notes=(*case.notes, note)) for case in experiment.cases]
    return msgspec.structs.replace(experiment, cases=tuple(cases))


def _end(*_: object) -> None:
    """An end from outside takes workers and network namespaces along, as an interrupt does."""
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Run the experiments, print their tables, write their results."""
    signal.signal(signal.SIGTERM, _end)
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", default=[*EXPERIMENTS], help="allreduce, sync, kvstore")
    parser.add_argument("--quick", action="store_true", help="a minute or two each")
    parser.add_argument("--only", nargs="+", default=[], help="cases: sizes, or models")
    parser.add_argument("--rates", nargs="+", default=[], help="of sync: 100mbit, 1gbit, none ...")
    parser.add_argument("--workers", type=int, help="of allreduce: processes that take part")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="what each may take, about")
    parser.add_argument("--output", type=Path, help="directory; default: benchmarks/results/")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"wanted some of {', '.join(EXPERIMENTS)}, got {unknown[0]!r}")
    for name in arguments.names:
        more: dict[str, Any] = {}
        if name == "sync":
            more["rates"] = arguments.rates
        elif name == "allreduce":
            more["workers"] = arguments.workers
        before = os.getloadavg()
        experiment = EXPERIMENTS[name](
            quick=arguments.quick,
            only=arguments.only,
            limit_s=arguments.limit,
            progress=say,
            **more,
        )
        experiment = with_load(experiment, before)
        console().print(experiment_text(experiment))
        for case in experiment.cases:
            print(*distances(case), sep="\n")
        directory = arguments.output or RESULTS
        directory.mkdir(parents=True, exist_ok=True)
        hardware = hardware_of(experiment.devices, experiment.host, is_joint=True)
        print(f"written to {experiment.save(directory / file_name(experiment.name, hardware))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
