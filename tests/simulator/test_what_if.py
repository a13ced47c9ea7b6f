"""What-ifs: what each faster part changes, and what is refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.codec import decode, encode
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.curves.what_if import PARTS, parse_what_if, what_if
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.workload import TensorSpec
from strategies import machines, make_machine, make_workload, workloads

MS = 1_000_000
TWO = Plan(workers=2, threads=1)


def test_what_if_scales_what_it_names() -> None:
    """Each part makes its own share of the step faster and leaves the rest."""
    machine, workload = make_machine(dispatch_s=1e-3, latency_s=1e-3), make_workload()
    plain = simulate(machine, workload, TWO)
    compute = simulate(what_if(machine, {"compute": 2.0}), workload, TWO)
    assert plain.step_ns - compute.step_ns == pytest.approx(12_500_000 / 2, abs=10)
    links = simulate(what_if(machine, {"links": 2.0}), workload, TWO)
    assert links.total_ns("all_reduce") == pytest.approx(plain.total_ns("all_reduce") / 2, abs=2)
    dispatch = simulate(what_if(machine, {"dispatch": 1e9}), workload, Plan())
    assert dispatch.step_ns == 12_500_000
    both = what_if(machine, {"links": 2.0, "collectives": 2.0})
    assert simulate(both, workload, TWO).total_ns("all_reduce") == pytest.approx(
        plain.total_ns("all_reduce") / 4, abs=2
    )


def test_what_if_scales_timings_by_what_limits_them() -> None:
    """Timings of computing operators follow `compute`; without a workload they stay, and it is said."""
    workload = make_workload()
    machine = make_machine(timings={op.key: 1e-3 for op in workload.ops})
    faster = what_if(machine, {"compute": 4.0}, workload)
    assert simulate(faster, workload, Plan()).step_ns == 9 * MS // 4
    blind = what_if(machine, {"compute": 4.0})
    assert simulate(blind, workload, Plan()).step_ns == 9 * MS
    assert blind.warnings[-1] == (
        "operator timings were left as measured: no workload says what limits them"
    )
    assert blind.fingerprint == "test?compute=4x"


def test_what_if_scales_timings_of_other_precisions_as_well() -> None:
    """A plan in another precision runs the operators of that trace, which have timings of their own."""
    plain = make_workload()
    spec = TensorSpec(shape=(2,), stride=(1,), dtype="bfloat16")
    ops = tuple(msgspec.structs.replace(op, dtype="bfloat16", inputs=(spec,)) for op in plain.ops)
    narrow = msgspec.structs.replace(plain, precision="bf16", ops=ops)
    workload = msgspec.structs.replace(plain, variants=(narrow,))
    machine = make_machine(timings={op.key: 1e-3 for op in (*workload.ops, *ops)})
    plan = Plan(precision="bf16")
    assert simulate(machine, workload, plan).step_ns == 9 * MS
    faster = what_if(machine, {"compute": 4.0}, workload)
    assert simulate(faster, workload, plan).step_ns == 9 * MS // 4


@pytest.mark.parametrize(
    "text", ["links=2x,launch=free", "Links = 2X, LAUNCH = Free", " links=2 ,launch=free "]
)
def test_case_and_spaces_do_not_count(text: str) -> None:
    """What can mean one thing only is taken."""
    assert parse_what_if(text) == {"links": 2.0, "dispatch": 1e9}


@pytest.mark.parametrize(
    "text",
    [
        "link=2x",
        "links",
        "links=0x",
        "links=fast",
        "",
        "links=infx",
        "links=nanx",
        "compute=1e-320x",
        "links=2e9x",
    ],
)
def test_what_if_messages(text: str) -> None:
    """What-ifs say which parts there are."""
    with pytest.raises(MachineError) as error:
        parse_what_if(text)
    assert str(error.value) == (
        "wanted PART=FACTORx with a part of compute, memory, dispatch, links, collectives, stragglers, launch, "
        f"communication and a factor from 1e-06 to 1e+09 or free, got {text!r} in the what-if; for example links=2x"
    )


@given(
    st.dictionaries(st.sampled_from(PARTS), st.floats(1e-6, 1e9) | st.floats(), min_size=1),
    machines,
    st.sampled_from([1, 2]),
)
def test_every_factor_is_refused_or_used(
    factors: dict[str, float], machine: Machine, workers: int
) -> None:
    """A prediction is made of any factor that is taken, and it can be saved; text and program agree."""
    text = ",".join(f"{part}={factor!r}x" for part, factor in factors.items())
    if not all(1e-6 <= factor <= 1e9 for factor in factors.values()):
        with pytest.raises(MachineError, match="and a factor from 1e-06 to 1e"):
            what_if(machine, factors)
        with pytest.raises(MachineError, match="and a factor from 1e-06 to 1e"):
            parse_what_if(text)
        return
    assert parse_what_if(text) == factors
    plan = Plan(workers=workers, threads=2 // workers)
    try:
        timeline = simulate(what_if(machine, factors), make_workload(), plan)
    except MachineError as error:  # two factors meet in a collective, which then takes a century
        if "wanted a step of at most" not in str(error):
            raise
        return
    assert decode(Timeline, encode(timeline), where="t.json") == timeline


def test_parse_what_if() -> None:
    """Factors may end in x, parts are separated by commas."""
    assert parse_what_if("links=2x, compute=1.5") == {"links": 2.0, "compute": 1.5}
    with pytest.raises(MachineError, match="wanted each part once, got links twice in the what-if"):
        parse_what_if("links=2x,links=3x")


@settings(max_examples=30)
@given(workloads, st.floats(1.1, 10.0))
def test_faster_links_never_slow_a_step(workload, factor: float) -> None:
    """More bandwidth with the same buckets and no contention never makes a step longer."""
    machine = make_machine(latency_s=1e-4, bandwidth=1e8)
    faster = what_if(machine, {"links": factor}, workload)
    assert simulate(faster, workload, TWO).step_ns <= simulate(machine, workload, TWO).step_ns
