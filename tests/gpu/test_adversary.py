"""Generated programs in the modes that a GPU replays, beside plain PyTorch."""

from pathlib import Path

import pytest
import torch

from adversary.children import Child
from adversary.devices import GPU_MODES, device_of, warm_calls
from adversary.excluded import excluded
from adversary.making import make
from adversary.rendering import render
from adversary.scripts import script
from adversary.worlds import purpose_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDS = range(3)


@pytest.mark.parametrize("mode", GPU_MODES)
def test_every_replayed_mode_is_plain_pytorch(mode: str, tmp_path: Path) -> None:
    """Or refuses with an error of ours; in a process of its own, which a failed capture may spoil."""
    outcomes = []
    with Child(120.0, interprets=True, device=device_of(mode)) as child:
        for seed in SEEDS:
            program = make(seed, purpose_of(mode), excluded(mode), warm_calls(mode))
            verdict, _ = child.examine(program, mode, shrinks=False)
            if verdict.outcome == "failed":
                path = tmp_path / f"program_{seed}.py"
                path.write_text(script(program, verdict))
                pytest.fail(f"{verdict.kind} in call {verdict.call} of {path}:\n{verdict.detail}")
            outcomes.append((verdict.outcome, verdict.detail))
    assert "equal" in dict(outcomes), outcomes


def test_programs_compute_on_the_gpu(tmp_path: Path) -> None:
    """All that they make is there."""
    namespace: dict[str, object] = {}
    exec(render(make(5, "step"), "cuda"), namespace)
    model = namespace["make"]().model  # type: ignore[operator]
    assert {p.device.type for p in model.parameters()} == {"cuda"}
