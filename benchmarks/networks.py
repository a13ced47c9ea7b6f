"""Everyday networks of many kinds: `auto` beside eager, `torch.compile`, channels-last and graphs by hand.

    python benchmarks/networks.py                               # all, on the GPU if there is one
    python benchmarks/networks.py --networks resnet50 vgg16     # some
    python benchmarks/networks.py --kinds recurrent graph       # some kinds
    python benchmarks/networks.py --from mine.py                # your own
    python benchmarks/networks.py --workers 4                   # several GPUs, DDP beside ours
    python benchmarks/networks.py --parallel-gpus 8             # eight networks at a time
    python benchmarks/networks.py --write-docs FILE...          # docs/accuracy.md from results

Each task on a network (first starts, the plan, the turns, the check against the plain loop) is a process of
its own, so that a crash costs one row. The result is written whenever a task is done, so that an end before
the last keeps what was measured; with --continue a later call goes on with the networks that are not done.
`ridgeline bench networks` is this with less to choose.
"""

import argparse
import signal
import sys
from pathlib import Path

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.errors import RidgelineError
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.experiment import run
from ridgeline.experiments.networks.request import TASKS
from ridgeline.experiments.networks.result import NetworksExperiment
from ridgeline.experiments.networks.results.page import page
from ridgeline.experiments.networks.results.text import experiment_text
from ridgeline.experiments.networks.settings import settings_for
from ridgeline.experiments.result_files import model_of, parser_of, say
from ridgeline.reporting.terminal.text import console

INTERRUPTED = 130
"""Exit status after Ctrl-C, by the custom of shells."""
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"


def file_name(experiment: NetworksExperiment) -> str:
    """`networks_<hardware>_<date>.json`."""
    count, _, name = experiment.hardware.rpartition(" x ")
    hardware = f"{count}x{model_of(name)}" if count else name.replace(" ", "-")
    return f"networks_{hardware}_{experiment.date.replace('-', '')}.json"


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = parser_of(__doc__)
    made.add_argument("--list", action="store_true", help="names and kinds, and what is missing")
    made.add_argument("--networks", nargs="+", default=[], metavar="NAME", help="default: all")
    made.add_argument(
        "--from",
        nargs="+",
        dest="sources",
        default=[],
        metavar="FILE",
        help="your own networks: Python files with NETWORKS",
    )
    made.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="default: all")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    made.add_argument("--scale", choices=("gpu", "cpu"), help="default: that of the device")
    made.add_argument("--allow", nargs="*", help="default: bf16 random on a GPU, else nothing")
    made.add_argument("--turns", type=int)
    made.add_argument("--steps-per-turn", type=int, help="0: as many as fill a quarter second")
    made.add_argument("--seconds", type=float, help="what TrainStep may take to choose a plan")
    made.add_argument("--run-steps", type=int, help="that TrainStep is told it will train")
    made.add_argument("--workers", type=int, default=1, help="processes that train together")
    made.add_argument("--parallel-gpus", type=int, default=1, help="networks at a time")
    made.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all")
    made.add_argument("--limit", type=float, metavar="SECONDS", help="of a task (600)")
    made.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no network then")
    made.add_argument("--warm", action="store_true", help="use this user's caches, not empty ones")
    made.add_argument("--machine", metavar="FILE", help="a machine profile to use")
    made.add_argument(
        "--out", type=output_file, metavar="FILE", help="default: below benchmarks/results/"
    )
    made.add_argument("--continue", dest="goes_on", action="store_true", help="what --out lacks")
    made.add_argument("--write-docs", nargs="+", type=Path, metavar="FILE")
    return made


def write_docs(files: list[Path], target: Path = PAGE) -> None:
    """Make the page from results, whatever their order: newer ones replace older ones."""
    found = sorted(map(NetworksExperiment.load, files), key=lambda one: one.date)
    target.write_text(page(found))
    print(f"wrote {target}")


def measure(arguments: argparse.Namespace) -> int:
    """Run the experiment; print its tables, write its result after each task. Returns the exit status."""
    settings = settings_for(
        arguments.device,
        scale=arguments.scale,
        allow=None if arguments.allow is None else tuple(arguments.allow),
        turns=arguments.turns,
        steps=arguments.steps_per_turn,
        budget_s=arguments.seconds,
        run_steps=arguments.run_steps,
        workers=arguments.workers,
        parallel=arguments.parallel_gpus,
        tasks=None if arguments.tasks is None else tuple(arguments.tasks),
        limit_s=arguments.limit,
        stop_after_s=arguments.stop_after,
        is_warm=arguments.warm,
        machine=arguments.machine,
    )
    earlier = None
    if arguments.goes_on and arguments.out is not None and arguments.out.exists():
        earlier = NetworksExperiment.load(arguments.out)

    written: dict[str, Path] = {}

    def publish(experiment: NetworksExperiment) -> None:
        target = arguments.out or RESULTS / file_name(experiment)
        written["last"] = experiment.save(target)

    try:
        experiment = run(
            only=arguments.kinds,
            names=arguments.networks,
            sources=arguments.sources,
            settings=settings,
            earlier=earlier,
            publish=publish,
            progress=say,
        )
    except KeyboardInterrupt:
        kept = written.get("last")
        said = (
            f"what was measured is in {kept}; --continue --out {kept} goes on"
            if kept
            else "nothing is kept"
        )
        print(f"networks.py: interrupted; {said}", file=sys.stderr)
        return INTERRUPTED
    console().print(experiment_text(experiment))
    print(f"written to {arguments.out or RESULTS / file_name(experiment)}")
    return 0


def _end(*_: object) -> None:
    """An end from outside takes the children along, as an interrupt does."""
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """List, run, or write the page."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, _end)
    if arguments.list:
        for network in catalog(arguments.sources).values():
            missing = f" (needs {', '.join(network.missing)})" if network.missing else ""
            print(f"{network.name:24} {network.kind:34} {network.title}{missing}")
    elif arguments.write_docs:
        write_docs(arguments.write_docs)
    else:
        try:
            return measure(arguments)
        except RidgelineError as error:
            print(f"networks.py: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
