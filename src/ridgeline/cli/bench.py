"""`ridgeline bench`: the experiments, ours beside what others offer, on this machine."""

import argparse
from pathlib import Path

from ridgeline.cli.command import FINE, Output

EXPERIMENTS = ("hybrid",)
MODELS = ("mlp", "resnet18", "gpt2")


class Command:
    """Run an experiment: ours and the others' ways, in turns, with medians and ratios.

    NAME is `hybrid`: every way to execute a model, for inference and training, with what compiling costs
    and when it is earned back. It takes minutes and keeps the machine busy.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        parser.add_argument("name", metavar="NAME", choices=EXPERIMENTS, help="hybrid")
        parser.add_argument(
            "--quick",
            action="store_true",
            help="fewer and smaller cases, about two minutes on a CPU",
        )
        parser.add_argument(
            "--only",
            type=models,
            default=MODELS,
            metavar="MODELS",
            help="some of mlp,resnet18,gpt2 (default: all)",
        )
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help="also write the result here, as JSON"
        )

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Run, save, show."""
        from ridgeline.experiments.hybrid import run
        from ridgeline.experiments.hybrid.text import experiment_text

        experiment = run(quick=args.quick, only=args.only, progress=output.progress)
        if args.output is not None:
            output.progress(f"wrote {experiment.save(args.output)}")
        output.result(experiment, experiment_text(experiment))
        return FINE


def models(text: str) -> tuple[str, ...]:
    """Names of models parted by commas, for argparse."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"wanted some of {','.join(MODELS)}, got {name!r}")
    return names
