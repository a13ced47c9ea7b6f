"""`ridgeline bench`: the experiments, ours beside what others offer, on this machine."""

import argparse
import importlib
import sys
from typing import NamedTuple

from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.command import FINE, USAGE, Output


class Experiment(NamedTuple):
    """Where an experiment lives and what it consists of.

    Attributes:
        package: Below `ridgeline.experiments`; has `run`.
        text: Module of its `experiment_text`.
        parts: What `--only` may name: models of `hybrid`, kinds of `networks`, cases of the others.
    """

    package: str
    text: str
    parts: tuple[str, ...]


EXPERIMENTS = {
    "hybrid": Experiment("hybrid", "hybrid.text", ("mlp", "resnet18", "gpt2")),
    "async": Experiment("asynchronous", "ways.text", ("queue", "task", "memory")),
    "parallel": Experiment(
        "parallel",
        "ways.text",
        ("devices", "operators", "small", "host-and-device", "branches", "cell", "perceptron"),
    ),
    "overlap": Experiment("overlap", "ways.text", ("results", "batches")),
    "memory": Experiment("memory", "memory.text", ("levels", "storage", "loopback", "gpu")),
    "allreduce": Experiment("allreduce", "ways.text", (
        "1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB",
    )),
    "sync": Experiment("sync", "ways.text", ("resnet18", "mlp")),
    "kvstore": Experiment("kvstore", "ways.text", (
        "64KiB", "1MiB", "16MiB", "64MiB", "server-64KiB", "server-1MiB", "server-16MiB", "server-64MiB",
        "shards-adam", "shards-rprop", "shards-muon", "straggler",
    )),
    "networks": Experiment("networks", "networks.results.text", (
        "classifier", "video", "vision", "encoder", "decoder", "recurrent", "recommender", "graph",
        "segmentation", "detection", "diffusion", "GAN", "autoencoder", "speech", "perceptron", "experts",
        "physics", "contrastive", "time series", "point cloud",
    )),
}  # fmt: skip
OF_ONE = {"rates": ("--rates", "sync"), "sources": ("--from", "networks")}
"""Arguments that one experiment alone takes: its flag, and whose it is."""


class BenchCommand:
    """Run an experiment: ours and the others' ways, in turns, with medians and ratios.

    NAME is `hybrid`: every way to execute a model, for inference and training, with what compiling costs
    and when it is earned back; `async`: a front end that queues work, what a task costs and what a queue
    holds; `parallel`: independent work at the same time, on devices, streams and threads; `overlap`:
    copies that run while the device computes; `memory`: what an access costs, from the nearest cache to a
    packet, beside the textbook's numbers; `allreduce`: every exact algorithm beside the backend's own
    all-reduce, by size; `sync`: training steps over links of several rates, ours beside
    DistributedDataParallel and its communication hooks, with what was predicted; `kvstore`: pushing to and
    pulling from key-value stores beside gloo, by size; `networks`:
    `plan="auto"` beside eager, `torch.compile`, channels-last and graphs by hand, on everyday networks of
    many kinds, with every prediction beside its measurement. It takes minutes (`networks`: hours) and keeps
    the machine busy.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument(
            "name", metavar="NAME", choices=tuple(EXPERIMENTS), help=", ".join(EXPERIMENTS)
        )
        parser.add_argument(
            "--quick",
            action="store_true",
            help="fewer and smaller cases, one or two minutes on a CPU",
        )
        parser.add_argument(
            "--rates",
            type=words,
            default=(),
            metavar="RATES",
            help="of sync: rates of the link between two hosts on this machine, made as network namespaces "
            "(root, iproute2), none: unshaped (default: 100mbit,1gbit,none; quick: 1gbit,none)",
        )
        parser.add_argument(
            "--from",
            dest="sources",
            type=words,
            default=(),
            metavar="FILES",
            help="of networks: Python files with NETWORKS, to measure your own instead (see the guide)",
        )
        parts = (f"{name}: {','.join(one.parts)}" for name, one in EXPERIMENTS.items())
        parser.add_argument(
            "--only",
            type=words,
            default=(),
            metavar="PARTS",
            help=f"some parts, commas between (default: all); {'; '.join(parts)}",
        )
        add_file_argument(parser, "also write the result here, as JSON")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Run, save, show."""
        chosen = EXPERIMENTS[args.name]
        unknown = [part for part in args.only if part not in chosen.parts]
        if unknown:
            wanted = f"wanted some of {','.join(chosen.parts)}, got {unknown[0]!r} for --only"
            sys.stderr.write(f"ridgeline: {wanted} of {args.name}; name some of those\n")
            return USAGE
        own = {name: getattr(args, name) for name in OF_ONE if getattr(args, name)}
        for flag, whose in (OF_ONE[name] for name in own):
            if args.name != whose:
                wanted = f"wanted {flag} with {whose} only, got it with {args.name}"
                sys.stderr.write(f"ridgeline: {wanted}; leave it out\n")
                return USAGE
        # Networks of the user replace the catalog, unless parts of that are named as well.
        only = args.only or (() if args.sources else chosen.parts)
        # By name and only now: each of them imports torch and what it is compared with.
        package = importlib.import_module(f"ridgeline.experiments.{chosen.package}")
        text = importlib.import_module(f"ridgeline.experiments.{chosen.text}")
        experiment = package.run(quick=args.quick, only=only, progress=output.progress, **own)
        if args.output is not None:
            output.progress(f"wrote {experiment.save(args.output)}")
        output.result(experiment, text.experiment_text(experiment))
        return FINE


def words(text: str) -> tuple[str, ...]:
    """Words with commas between, for argparse."""
    return tuple(word.strip() for word in text.split(","))
