"""Programs of fixed seeds in every mode, beside plain PyTorch; what is known to fail is in `excluded`."""

from pathlib import Path

import pytest

from adversary.devices import EMULATED_MODES, GPU_MODES, warm_calls
from adversary.excluded import EXCLUDED, excluded
from adversary.grammar import catalogue
from adversary.interpreting import interpreted
from adversary.judging import judge
from adversary.making import make
from adversary.rendering import render
from adversary.scripts import script
from adversary.worlds import MODES, purpose_of

SEEDS = range(4)


@pytest.mark.parametrize("mode", [*MODES, *EMULATED_MODES])
def test_every_mode_is_plain_pytorch(mode: str, tmp_path: Path) -> None:
    """Or refuses with an error of ours; and it does not refuse most programs."""
    outcomes = []
    with interpreted():
        for seed in SEEDS:
            program = make(seed, purpose_of(mode), excluded(mode), warm_calls(mode))
            path = tmp_path / f"program_{seed}.py"
            path.write_text(render(program))
            verdict = judge(program, path, mode)
            if verdict.outcome == "failed":
                path.write_text(script(program, verdict))
                pytest.fail(f"{verdict.kind} in call {verdict.call} of {path}:\n{verdict.detail}")
            outcomes.append(verdict.outcome)
    assert outcomes.count("equal") >= len(outcomes) / 4


def test_what_is_excluded_exists() -> None:
    """Every word is one of the grammar, and every mode one of ours."""
    known = {*catalogue.CHANGES, *catalogue.INPUTS, *catalogue.CONTEXTS, *catalogue.OPTIMIZERS}
    for name, feature in catalogue.FEATURES.items():
        known |= {name, *(f"{name}/{change}" for change in feature.changes)}
    for entry in EXCLUDED:
        assert set(entry.words) <= known
        assert set(entry.modes) <= {
            *MODES,
            *EMULATED_MODES,
            *GPU_MODES,
            *(m.partition("@")[0] for m in GPU_MODES),
        }
