"""Copies that overlap: results out of the GPU, batches into it, every way to do it, interleaved.

    python benchmarks/copies.py                     # both directions
    python benchmarks/copies.py --only results      # the seeds' experiment: 50 products, copied back

Ridgeline's `to_host` and `feed` stand beside the sequential form, torch's `non_blocking`, pinned memory
on a side stream by hand, and `DataLoader` with pinned memory. What they compute is compared; figures are
medians over turns with quartiles, ratios are taken turn by turn. This is `ridgeline bench overlap` with
the result kept; beside the table it prints how far ours is from the limit.
"""

import sys
from pathlib import Path

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.overlap import run
from ridgeline.experiments.result_files import file_name, hardware_of, parser_of, say
from ridgeline.experiments.ways.result import WayCase
from ridgeline.experiments.ways.text import experiment_text
from ridgeline.reporting.terminal.text import console

RESULTS = Path(__file__).parent / "results"


def distances(case: WayCase) -> list[str]:
    """Every measured way as a multiple of the case's limit."""
    shares = [(row.name, row.of_limit) for row in case.rows]
    return [f"{case.name}: {way}: {1 / share:.3f} x the limit" for way, share in shares if share]


def main() -> int:
    """Run the experiment, print its tables, write its result."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--only", nargs="+", default=[], help="cases: results, batches")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="what it may take")
    parser.add_argument(
        "--output", type=output_file, help="JSON file; default: below benchmarks/results/"
    )
    arguments = parser.parse_args()
    experiment = run(
        quick=arguments.quick,
        only=arguments.only,
        limit_s=arguments.limit,
        device=arguments.device,
        progress=say,
    )
    console().print(experiment_text(experiment))
    for case in experiment.cases:
        print("\n".join(distances(case)))
    name = file_name("copies", hardware_of(experiment.devices, experiment.host))
    print(f"written to {experiment.save(arguments.output or RESULTS / name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
