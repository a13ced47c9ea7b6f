"""Copies of an optimizer that does not remember what it would are refused as its `state_dict()` is."""

import json
from pathlib import Path
from typing import Any

import pytest
from copied_cases import ALGORITHMS

from torchrun import torchrun

WHOLE, NEW = {"deepcopy": "2", "pickle": "2"}, {"deepcopy": "0", "pickle": "0"}
ADVICE = (
    "call step.optimizer_state() on all workers before the step is closed: the first one gets all of it, for "
    "load_state_dict"
)
REFUSED = {
    "sharded": f"wanted the whole state of Adam, got that of this worker's part of the parameters; {ADVICE}",
    "kvstore": f"wanted the state of Adam, got that of an optimizer whose updates a store makes; {ADVICE}",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers over gloo found, in one start."""
    output = tmp_path_factory.mktemp("copied") / "found.json"
    torchrun(2, Path(__file__).with_name("copied_cases.py"), output)
    told: dict[str, Any] = json.loads(output.read_text())
    return told


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_copy_remembers_all_or_is_refused(found: dict[str, Any], algorithm: str) -> None:
    """It would begin anew, with the parts of one worker or with nothing; once all was loaded it is as any other."""
    text = REFUSED.get(algorithm)
    trained = WHOLE if text is None else {"deepcopy": text, "pickle": text}
    assert found[algorithm]["copies"] == {
        "before": NEW,
        "live": trained,
        "closed": trained,
        "loaded": WHOLE,
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_alone_finds_the_gradients_or_is_refused(
    found: dict[str, Any], algorithm: str
) -> None:
    """Without gradients it would do nothing, where a plain loop applies those of the last batch again."""
    said = found[algorithm]["alone"]
    assert said == (
        ""
        if algorithm == "all_reduce"
        else "wanted gradients for Adam.step(), called between two training steps, got none in any parameter: "
        f"with sync.algorithm={algorithm!r} no worker has all of them after a step; compute some with "
        "backward() before, or train with execution='eager' on all-reduce, which leaves those of the last "
        "step in `.grad`"
    )
