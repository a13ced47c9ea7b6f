"""Workers that come later: they find the values that are there, wait for nobody's past, and count once."""

import json
from pathlib import Path

import joining_worker
import pytest
from joining_worker import BEFORE, DYING, FIRST_VALUE, TOGETHER

from torchrun import LATER, torchrun

SCRIPT = Path(joining_worker.__file__)


@pytest.mark.parametrize(("staleness", "kills"), [("None", "lets"), ("0", "lets"), ("2", "kills")])
def test_a_worker_joins_two_that_train(staleness: str, kills: str) -> None:
    """All go on, and so they do with another one in place of one that is killed; each push counts once."""
    told = json.loads(torchrun(2, SCRIPT, staleness, kills, **{LATER: "2"}).stdout.splitlines()[-1])
    pushed = {2: DYING, 3: TOGETHER} if kills == "kills" else {2: TOGETHER}
    assert [one["rank"] for one in told["joined"]] == [*pushed]
    for one in told["joined"]:
        assert one["num_workers"] == 2
        for _, versions in one["begun"]:
            assert min(versions["0"], versions["1"]) >= BEFORE
            assert str(one["rank"]) not in versions
    assert told["at"] == [0, 1]
    for value, versions in zip(told["values"], told["versions"], strict=True):
        counted = {int(rank): count for rank, count in versions.items()}
        assert {rank: counted[rank] for rank in pushed} == pushed
        assert counted[0] == counted[1] > BEFORE
        wanted = FIRST_VALUE - sum((rank + 1) * count for rank, count in counted.items())
        rows = value if isinstance(value, list) else [[value]]
        assert {number for row in rows for number in row} == {wanted}
