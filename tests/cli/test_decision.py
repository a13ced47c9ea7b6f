"""What the command line says of trials that compile."""

import sys
from pathlib import Path

from ridgeline.cli.decision import Decision, _announce, _warning, trial_words
from ridgeline.plan import Plan
from ridgeline.simulator.step import simulate

sys.path.append(str(Path(__file__).parents[1]))

from chained_workloads import make_chain  # the path above makes them importable
from strategies import make_machine, make_timeline


def test_trials_tell_what_preparing_took() -> None:
    """A step's time stands alone where nothing was prepared, else both are said."""
    spans = [("forward", "compute", 0, 1_500_000)]
    assert trial_words(make_timeline(spans)) == "1.50 ms a step"
    prepared = make_timeline(spans, counters={"compile_s": 12.5})
    assert trial_words(prepared) == "1.50 ms a step, after 12.5 s of preparing it"


def test_silence_while_compiling_is_announced() -> None:
    """Before a trial and before training it is said that compiling comes first, and about how long."""
    workload, said = make_chain((3, 3)), []
    assert _warning(Plan(), workload) == ""
    assert _warning(Plan(execution="compiled"), workload) == " (compiles first, about 8.60 s)"
    for execution in ("eager", "compiled"):
        plan = Plan(execution=execution)
        predicted = simulate(make_machine(), workload, plan)
        _announce(
            Decision(
                machine=make_machine(),
                workload=workload,
                plan=plan,
                predicted=predicted,
                expected=predicted,
            ),
            said.append,
        )
    assert said == [
        "compiled compiles before the first step: about 8.60 s, less where torch has it in its cache"
    ]
