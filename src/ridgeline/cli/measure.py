"""`ridgeline measure`: what this machine can do, measured."""

import argparse

from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.command import FINE, Output
from ridgeline.reporting.effects.machine_effects import machine_effects
from ridgeline.reporting.effects.stairs import stairs_grid
from ridgeline.reporting.terminal.text import grid_text, machine_text


class MeasureCommand:
    """Probe this machine and print its ceilings with their spread.

    What is known about the same hardware and software is not measured again.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        effort = parser.add_mutually_exclusive_group()
        effort.add_argument(
            "--quick", action="store_true", help="rates and costs alone, in seconds (the default)"
        )
        effort.add_argument(
            "--full",
            action="store_true",
            help="more sizes and samples, a walk through memory, and a file in the current directory "
            "written and read; takes minutes, and continues where it was interrupted",
        )
        parser.add_argument(
            "--refresh", action="store_true", help="measure again what is already known"
        )
        add_file_argument(parser, "also write the profile here")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Measure, save, show."""
        from ridgeline.probe.measure import measure

        machine = measure(quick=not args.full, refresh=args.refresh, progress=output.progress)
        if args.output is not None:
            output.progress(f"wrote {machine.save(args.output)}")
        shown = [machine_text(machine)]
        if machine.stairs:
            shown.append(grid_text(stairs_grid(machine.stairs, machine.caches)))
        shown += map(grid_text, machine_effects(machine))
        output.result(machine, *shown)
        return FINE
