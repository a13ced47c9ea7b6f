"""Which collectives are measured follows from the algorithms that are offered."""

import msgspec

from ridgeline.probe.group import run_in_group
from ridgeline.probe.survey import Findings
from ridgeline.simulator.communication import collective_seconds
from strategies import make_machine


def test_an_algorithm_has_its_collectives_measured() -> None:
    """Three workers give tables of what the entries name, each once, though no size is divided by three."""
    reply = run_in_group("probe_targets:sharing_survey", b"", workers=3, threads=1, device="cpu")
    found = msgspec.json.decode(reply, type=Findings).collectives
    names = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    assert [table.operation for table in found] == names
    machine = msgspec.structs.replace(make_machine(), collectives=found)
    for table in found:
        assert [point.num_bytes for point in table.table] == [1 << 10, 1 << 20]
        cost = collective_seconds(machine, table.operation, 1 << 20, table.setting)
        assert cost == (table.table[-1].seconds.value, "")
