"""Which collectives are measured follows from the algorithms that are offered."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe.findings import Findings
from ridgeline.probe.groups.group import run_in_group
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.rates import collectives
from ridgeline.simulator.exchange.communication import collective_seconds
from strategies import make_machine


def test_an_algorithm_has_its_collectives_measured() -> None:
    """Three workers give tables of what the entries name, each once, though no size is divided by three."""
    reply = run_in_group("probe_targets:sharing_survey", b"", workers=3, threads=1, device="cpu")
    found = msgspec.json.decode(reply, type=Findings).collectives
    names = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"}
    assert {table.operation for table in found} == names
    assert len(found) == len(names)
    machine = msgspec.structs.replace(make_machine(), collectives=found)
    for table in found:
        assert [point.num_bytes for point in table.table] == [1 << 10, 1 << 20]
        cost = collective_seconds(machine, table.operation, 1 << 20, table.setting)
        assert cost == (table.table[-1].seconds.value, "")


@given(
    st.floats(1e-6, 1e-1),
    st.floats(1e4, 1e12),
    st.integers(4, 10),
)
def test_what_a_slow_link_has_no_time_for_is_left_out(
    latency_s: float, bytes_per_s: float, num_sizes: int
) -> None:
    """Three sizes are taken in any case; with more, the least rounds of all are within the seconds.

    The least rounds of a slow call are its most, and so are no more than it is asked for; the call that told
    how long it takes is a sample.
    """
    sizes = [1 << (10 + 2 * power) for power in range(num_sizes)]
    now = {size: latency_s + size / bytes_per_s for size in sizes}
    called: list[int] = []
    calls: collectives.Calls = {
        ("all_reduce", size): lambda size=size: called.append(size) for size in sizes
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_time", lambda call, peers: (call(), now[called[-1]])[1])
        alone = Peers(0, 1, torch.device("cpu"))
        found, rounds, samples = collectives._affordable(calls, alone, limit_s=2.0)
    taken = [size for _, size in found]
    assert taken == sizes[: len(taken)]
    assert called == [size for size in taken for _ in range(2)]
    is_slow = {size: now[size] > collectives.SLOW_S for size in sizes}
    assert rounds == {
        ("all_reduce", size): collectives.SLOW_ROUNDS if is_slow[size] else collectives.MOST_ROUNDS
        for size in taken
    }
    assert samples == {("all_reduce", size): [now[size]] if is_slow[size] else [] for size in taken}
    least_of = {True: collectives.SLOW_ROUNDS, False: collectives.LEAST_ROUNDS}
    rounds_s = [least_of[is_slow[size]] * now[size] for size in taken]
    if len(taken) > collectives.LEAST_SIZES:
        assert sum(rounds_s) <= 2.0
    if len(taken) < num_sizes:
        assert len(taken) >= collectives.LEAST_SIZES
        least = least_of[4 * now[taken[-1]] > collectives.SLOW_S]
        assert sum(rounds_s) + least * 4 * now[taken[-1]] > 2.0
