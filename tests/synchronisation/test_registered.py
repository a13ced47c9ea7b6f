"""An algorithm and a compression of one's own: one assignment each, and everybody knows them."""

import io
from pathlib import Path

import msgspec
import pytest
from toy_entries import GOSSIP, HALF, MIB, MS, planned

from ridgeline.machine import Setting
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.planner.assumed import with_assumed_rates
from ridgeline.reporting.charts.chart_timeline import frame_colour, timeline_figure
from ridgeline.reporting.report import report
from ridgeline.reporting.terminal.text import console
from ridgeline.reporting.terminal.text_step import timeline_text
from ridgeline.reporting.trace_json import trace_bytes
from ridgeline.simulator.exchange.synchronising import sent_bytes
from ridgeline.simulator.memory import peak_memory_bytes
from ridgeline.simulator.replay import replay
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    CollectiveTraffic,
    frame_names,
    operations,
)
from ridgeline.timeline import Timeline
from strategies import make_machine, make_workload

pytestmark = pytest.mark.usefixtures("toys")


def simulated(latency_s: float = 0.0, **fields: object) -> Timeline:
    machine = make_machine(latency_s=latency_s, bandwidth=1e9)
    workload = make_workload(backward=[20 * MS] * 4, gradient_bytes=[MIB] * 4)
    return simulate(machine, workload, planned(**fields))


def test_a_plan_with_them_survives_its_file(tmp_path: Path) -> None:
    """It is made, printed, saved and loaded in the new words, and exact as the entries say."""
    plan = planned(algorithm="gossip", options={"hops": 3})
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert "algorithm='gossip', options={'hops': 3}" in repr(plan)
    assert plan.exact
    assert not planned(compression="half").exact


def test_frames_have_the_name_of_the_algorithm() -> None:
    """The step has the frames of the entry in place of the default's, and a replay gives them back."""
    timeline = simulated(algorithm="gossip")
    names = frame_names(Sync(algorithm="gossip"), 4)
    assert names[0] == "murmur/0"
    assert tuple(s.name for s in timeline.lane("communication")) == names
    again = replay(timeline)
    assert [(s.name, s.start_ns) for s in again.frames] == [
        (s.name, s.start_ns) for s in timeline.frames
    ]


def test_collectives_of_the_entry_are_priced() -> None:
    """Two broadcasts of the bucket take what two such tables say, latency included."""
    spans = {s.name: s for s in simulated(latency_s=1e-3, algorithm="gossip").frames}
    assert spans["murmur/0"].duration_ns == pytest.approx(2 * (MS + MIB), abs=2)


def test_fewer_bytes_take_less_and_the_codec_takes_time() -> None:
    """Half a bucket crosses; three bytes are moved for each, in turns with the backward pass that is beside."""
    plain = {s.name: s for s in simulated().frames}
    spans = {s.name: s for s in simulated(compression="half").frames}
    assert spans["all_reduce/0"].duration_ns == pytest.approx(2 * 3 * MIB + MIB / 2, abs=4)
    flags_ns = 4 * 4  # one of each parameter, with the last bucket
    assert spans["all_reduce/3"].duration_ns == pytest.approx(3 * MIB + MIB / 2 + flags_ns, abs=4)
    for number, extra in enumerate((0, 3 * MIB, 3 * MIB, 3 * MIB, 0)):
        name = f"backward/{number}"
        assert spans[name].duration_ns - plain[name].duration_ns == pytest.approx(extra, abs=4)
    for name in ("forward", "optimizer"):
        assert spans[name].duration_ns == pytest.approx(plain[name].duration_ns, abs=4)


@pytest.mark.parametrize("execution", ["eager", "compiled", "graph"])
def test_a_gpu_runs_the_codec_as_kernels(execution: Execution) -> None:
    """Each bucket is encoded in backward and decoded before the optimizer, however the step is issued."""
    COMPRESSIONS["half"] = HALF._replace(devices=("cuda",))
    plan = msgspec.structs.replace(planned(compression="half"), threads=0, execution=execution)
    workload = make_workload(device="cuda", backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    timeline = simulate(make_machine(device="cuda", dispatch_s=1e-5), workload, plan)
    for name, last in (("bucket_encode", "backward/3"), ("bucket_decode", "optimizer")):
        found = [span for span in timeline.spans if span.name == name]
        assert [span.attributes["module"] for span in found] == [f"bucket/{n}" for n in range(4)]
        frame = timeline.named(last)
        assert frame is not None
        assert frame.start_ns <= found[-1].start_ns < found[-1].end_ns <= frame.end_ns


def test_what_is_predicted_to_be_sent_and_kept() -> None:
    """Bytes by bucket follow from the entry; what the compression remembers is part of the peak."""
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    assert sent_bytes(workload, planned()) == (MIB,) * 4
    assert sent_bytes(workload, planned(compression="half")) == (MIB // 2,) * 4
    assert sent_bytes(workload, Plan()) == ()
    kept = peak_memory_bytes(workload, planned(compression="half"))
    assert kept - peak_memory_bytes(workload, planned()) == 4 * MIB


def test_machines_are_measured_and_assumed_by_the_entries() -> None:
    """The union of what is offered, each once, and the broadcast of buffers; nothing for words alone."""
    assert operations("cpu") == ("all_reduce", "broadcast")
    ALGORITHMS["gossip"] = GOSSIP._replace(
        traffic=lambda payload, workers: (CollectiveTraffic("all_gather", payload),)
    )
    assert operations("cpu") == ("all_reduce", "broadcast", "all_gather")
    COMPRESSIONS["half"] = HALF._replace(exchange="gather")
    assert operations("cpu") == ("all_reduce", "broadcast", "all_gather")
    ALGORITHMS["gossip"] = ALGORITHMS["gossip"]._replace(transport="")
    assert operations("cuda") == ("all_reduce", "broadcast")
    assert operations("cpu") == ("all_reduce", "broadcast", "all_gather")
    bare = msgspec.structs.replace(make_machine(), collectives=())
    machine = with_assumed_rates(bare, Setting(device="cpu", workers=2, threads=1), "why")
    assert [c.operation for c in machine.collectives] == ["all_reduce", "broadcast", "all_gather"]


def test_reports_speak_of_them(tmp_path: Path) -> None:
    """Bucket frames have the label of the entry, the colour of communication, and arrows to them."""
    timeline = simulated(algorithm="gossip")
    names = {trace["name"]: trace for trace in timeline_figure([timeline])["data"]}
    assert names["Gossip protocol"]["text"] == ["0", "1", "2", "3"]
    assert "All-reduce" not in names
    assert frame_colour("murmur/3") == frame_colour("all_reduce/3") == "@communication"
    buffer = io.StringIO()
    console(buffer).print(timeline_text([timeline]))
    assert "R gossip protocol" in buffer.getvalue()
    assert trace_bytes({"predicted": timeline}).count(b'"bucket ready"') == 2 * 4
    page = report(tmp_path / "report.html", predicted=timeline).read_text()
    assert "Gossip protocol" in page
