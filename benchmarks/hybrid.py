"""Hybrid execution: every way to run a model, Ridgeline's and the others', interleaved.

    python benchmarks/hybrid.py                     # all models, inference and training
    python benchmarks/hybrid.py --only mlp          # one of them

The contenders have models of their own, built alike, and take turns; what they compute is compared. The
figures are medians over the turns with quartiles, and ratios are taken turn by turn. This is `ridgeline
bench hybrid` with more to choose; the result goes to `benchmarks/results/`.
"""

import sys
from pathlib import Path

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.experiments.hybrid import run
from ridgeline.experiments.hybrid.cases import MODELS
from ridgeline.experiments.hybrid.text import experiment_text
from ridgeline.experiments.result_files import file_name, hardware_of, parser_of, say
from ridgeline.reporting.terminal.text import console

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the experiment, print its tables, write its result."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--only", default=",".join(MODELS), help="models, parted by commas")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument("--titles", default="", help="cases whose purpose and title contain this")
    parser.add_argument("--contenders", nargs="+", default=[], help="these only, beside eager")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="what it may take")
    parser.add_argument("--cold", action="store_true", help="an empty compile cache for everyone")
    parser.add_argument(
        "--output", type=output_file, help="JSON file; default: below benchmarks/results/"
    )
    arguments = parser.parse_args()
    experiment = run(
        quick=arguments.quick,
        only=arguments.only.split(","),
        limit_s=arguments.limit,
        cold=arguments.cold,
        device=arguments.device,
        titles=arguments.titles,
        contenders=arguments.contenders,
        progress=say,
    )
    console().print(experiment_text(experiment))
    only = arguments.only
    what = "hybrid" if only == ",".join(MODELS) else f"hybrid_{only.replace(',', '-')}"
    name = file_name(what, hardware_of(experiment.devices, experiment.host))
    print(f"written to {experiment.save(arguments.output or RESULTS / name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
