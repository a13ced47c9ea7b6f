"""`ridgeline simulate`: what it predicts, for one number of workers and for several."""

import argparse
import json
from typing import Any

import msgspec
import pytest

from ridgeline import units
from ridgeline.cli.arguments import flags
from ridgeline.cli.curves import scaling_curve
from ridgeline.machine import Machine
from ridgeline.machine.host_load import HostLoad
from ridgeline.plan import Sync


def test_simulated_devices_must_share_the_batch(run, task_file, machine_file) -> None:
    """`simulate --devices 3` is a wish: a batch of 8 cannot be shared by 3, and nothing else is shown."""
    ran = run("simulate", task_file, "--machine", machine_file, "--devices", "3", "-q")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "ridgeline: wanted a global batch that 3 workers can share equally, got batch size 8; use "
        "--batch-size 6 or 9\n"
    )


def test_the_batch_that_is_advised_fits_all_numbers_of_devices(
    run, task_file, machine_file
) -> None:
    """One that 3 devices can share would be refused for the 4 beside them."""
    ran = run("simulate", task_file, "--machine", machine_file, "--devices", "2,3,4", "-q")
    assert ran.err == (
        "ridgeline: wanted a global batch that 3 workers can share equally, got batch size 8; use "
        "--batch-size 12\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        "simulate --devices 2",
        "simulate --devices 1,2",
        "simulate --devices 2 --intensity",
        "plan --devices 2",
    ],
)
def test_a_batch_of_more_than_the_data_is_told_of(words: str, run, task_file, machine_file) -> None:
    """Every prediction is then of a step of less than was asked for."""
    verb, *rest = words.split()
    words = (verb, task_file, "--machine", machine_file, "--batch-size", "4096", "-q", *rest)
    told = " ".join(run(*words).out.split())
    assert told.count("samples, so that a batch of 4096 is one of ") == 1


def test_simulate_on_another_machine(run, task_file, machine_file, tmp_path) -> None:
    """Its profile is a what-if of its own; with parts beside it nobody knows what is meant."""
    words = ("simulate", task_file, "--machine", machine_file, "--devices", "2", "-q", "--what-if")
    ran = run(*words, machine_file)
    assert (ran.status, ran.err) == (0, "")
    assert "1.00 x (1.00 to 1.00) as fast" in ran.out
    value = json.loads(run(*words, "communication=free", "--json").out)["what_if"]
    assert value["factors"] == value["lever"]["factors"] == {"collectives": 1e9}
    assert value["lever"]["step_s"] == pytest.approx(1e-9 * value["timeline"]["steps_ns"][0])
    ran = run(*words, machine_file, "--what-if", "links=2x")
    assert ran.status == 1
    assert ran.err == (
        f"ridgeline: wanted parts, or the profile of one other machine, got {machine_file}, links=2x in the "
        "what-if; ask about each by itself\n"
    )


def test_simulate_predicts_step_and_scaling(run, task_file, machine_file) -> None:
    """The prediction comes with its waterfall and with every number of workers up to the wanted."""
    words = ("simulate", task_file, "--machine", machine_file, "--devices", "2", "-q")
    ran = run(*words)
    assert (ran.status, ran.err) == (0, "")
    for heading in ("Plan", "Where the step goes", "Predicted", "Scaling"):
        assert heading in ran.out
    value = json.loads(run(*words, "--json").out)
    assert set(value) == {"plan", "timeline", "waterfall", "scaling", "levers"}
    assert [lever["factors"] for lever in value["levers"]] == [
        {part: 2.0} for part in ("compute", "memory", "launch", "communication")
    ]
    step = value["timeline"]["steps_ns"][0]
    assert sum(part["ns"] for part in value["waterfall"]) == step
    assert [point["workers"] for point in value["scaling"]] == [1, 2]


def test_simulate_tells_what_memory_is_held_for(run, task_file, machine_file) -> None:
    """The peak of a worker by category, as in the counters of the prediction; of an older profile the traced ones."""
    words = ("simulate", task_file, "--machine", machine_file, "--devices", "1", "-q")
    counters = json.loads(run(*words, "--json").out)["timeline"]["counters"]
    sizes = [
        round(counters[f"peak_{name}_bytes"])
        for name in ("parameter", "gradient", "state", "activation")
    ]
    assert "peak_workspace_bytes" not in counters
    assert sum(sizes) == counters["peak_memory_bytes"]
    held_for = ("parameters", "gradients", "optimizer state", "activations")
    parts = ", ".join(
        f"{word} {units.num_bytes(size)}" for word, size in zip(held_for, sizes, strict=True)
    )
    told = " ".join(run(*words).out.split())
    assert (
        f"Memory peak of a worker {units.num_bytes(sum(sizes))}: {parts}, workspaces of operators not "
        "measured" in told
    )


def test_simulate_several_numbers_of_workers(run, task_file, machine_file) -> None:
    """The curve alone, with intervals, what was assumed, and the same on a faster machine; strong, then weak."""
    words = ("simulate", task_file, "--machine", machine_file, "-q", "--devices")
    ran = run(*words, "1,2,...,8", "--cluster", "2:1gbit:20us", "--what-if", "communication=2x")
    assert (ran.status, ran.err) == (0, "")
    heads = [line for line in ran.out.splitlines() if line.startswith("Scaling")]
    assert heads == [
        "Scaling  predicted; strong: the workers share one batch",
        "Scaling  predicted; communication=2x",
    ]
    told = " ".join(ran.out.split())
    assert "the cluster as described (2 behind 1.00 Gbit/s, 20.0 us)" in told
    faster = "compute=2x,memory=2x,dispatch=2x"
    both = json.loads(run(*words, "1,2", "--what-if", faster, "--json").out)
    for before, after in zip(both["scaling"], both["what_if"], strict=True):
        assert after["step_s"] < 0.75 * before["step_s"]
    strong = json.loads(run(*words, "1,2,4,8", "--json").out)
    assert [point["workers"] for point in strong["scaling"]] == [1, 2, 4, 8]
    assert strong["regime"] == "strong"
    assert all(p["low_s"] <= p["step_s"] <= p["high_s"] for p in strong["scaling"])
    weak = json.loads(run(*words, "1,2,10000", "--scaling", "weak", "--json").out)
    alone = json.loads(run(*words, "10000", "--scaling", "weak", "--json").out)
    assert [point["workers"] for point in alone["scaling"]] == [1, 10000]
    samples = [point["samples_per_s"] * point["step_s"] for point in weak["scaling"]]
    assert samples == pytest.approx([8, 16, 80_000])
    assert weak["plan"]["workers"] == strong["plan"]["workers"] == 2
    ran = run(*words, "1,3")
    assert ran.status == 1
    assert ran.err.startswith("ridgeline: wanted a global batch that 3 workers can share equally")


def test_simulate_with_stragglers(run, task_file, machine_file) -> None:
    """Curves and single steps wait for the slowest, as written or as measured; without them is a what-if."""
    words = ("simulate", task_file, "--machine", machine_file, "--json", "--devices")
    curve = ("1,2,8", "--scaling", "weak", "--cluster", "2:1gbit:20us")
    alike = json.loads(run(*words, *curve).out)["scaling"]
    both = json.loads(
        run(*words, *curve, "--stragglers", "5%,1.3x:1", "--what-if", "stragglers=free").out
    )
    assert [p["step_s"] for p in both["what_if"]] == [p["step_s"] for p in alike]
    waited = [p["step_s"] - q["step_s"] for p, q in zip(both["scaling"], alike, strict=True)]
    assert waited[0] == 0.0 < min(waited[1:])
    assert "devices differ as described (5.0 % from step" in " ".join(both["scaling"][-1]["notes"])
    single = json.loads(run(*words, "2", "--stragglers", "1.5x:1").out)
    assert single["levers"][-1]["factors"] == {"stragglers": 1e9}
    assert single["levers"][-1]["gain"] > 1.2
    measured = json.loads(run(*words, "2", "--stragglers", "measured").out)
    assert [lever["factors"] for lever in measured["levers"]] == [
        {part: 2.0} for part in ("compute", "memory", "launch", "communication")
    ]  # the profile's numbers have no spread
    ran = run("simulate", task_file, "--devices", "2", "--stragglers", "some")
    assert ran.status == 2
    assert "wanted SPREAD% up to 200 %, FACTORx:COUNT" in " ".join(ran.err.split())


def test_simulate_beside_other_jobs(run, task_file, machine_file) -> None:
    """What others use of a link makes the step longer, and the notes say what is left; hosts alone know nothing of it."""
    words = ("simulate", task_file, "--machine", machine_file, "--json", "--devices", "2,4")
    alone, beside = (
        json.loads(run(*words, "--cluster", f"2:100mbit:20us{others}").out)["scaling"]
        for others in ("", ":3jobs")
    )
    assert beside[0]["step_s"] == alone[0]["step_s"]
    assert beside[1]["step_s"] > alone[1]["step_s"]
    assert "beside 3 other jobs: 25.0 Mbit/s left" in " ".join(beside[1]["notes"])


@pytest.mark.parametrize(
    ("devices", "counts"),
    [
        ("4", (4,)),
        ("1,2,4,...,64", (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,...,20", (1, 2, 4, 8, 16, 20)),
        ("2,4,6,...,11", (2, 4, 6, 8, 10, 11)),
        ("2,3,...,5", (2, 3, 4, 5)),
        ("8,1", (8, 1)),
    ],
)
def test_numbers_of_workers_go_on_as_they_began(devices: str, counts: tuple[int, ...]) -> None:
    """What stands before three dots doubles, or rises by as much each time."""
    assert flags.counts(devices) == counts


def test_dots_stand_for_no_more_numbers_than_a_table_shows() -> None:
    """What would list a billion sizes is refused before they are made."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        flags.counts("2,3,...,1000000000")
    assert str(caught.value) == (
        "wanted at most 1000 numbers in place of ..., got 999999996 in '2,3,...,1000000000'; begin with "
        "numbers that are further apart, or that double"
    )


@pytest.mark.parametrize(
    "devices", ["...", "1,...,8", "1,2,...", "4,2,...,8", "1,2,...,2", "...,2,4"]
)
def test_dots_need_numbers_around_them(devices: str) -> None:
    """Two before that rise, and a larger one after."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        flags.counts(devices)
    assert str(caught.value) == (
        f"wanted two rising numbers before ... and a larger one after it, got {devices!r}"
    )


def test_a_cluster_that_cannot_be_read(run, task_file) -> None:
    """Refused before anything is measured, with an example."""
    ran = run("simulate", task_file, "--devices", "2", "--cluster", "8x400")
    assert ran.status == 2
    assert "wanted SIZE:RATE:LATENCY for each level of a cluster, got '8x400'" in ran.err
    ran = run("simulate", task_file, "--devices", "2", "--cluster", "8:1gbit:1001jobs")
    assert ran.status == 2
    assert "wanted a finite other_jobs >= 0 and <= 1000, got 1001" in " ".join(ran.err.split())


def test_simulate_what_if(run, task_file, machine_file) -> None:
    """Faster parts make the same step faster, and the result says so."""
    words = ("simulate", task_file, "--machine", machine_file, "--devices", "2", "-q")
    ran = run(*words, "--what-if", "links=1000x", "--what-if", "compute=2x")
    assert "What if links=1000x,compute=2x" in ran.out
    heads = [line for line in ran.out.splitlines() if line.startswith("Predicted")]
    assert [head.partition("  ")[0] for head in heads] == [
        "Predicted",
        "Predicted with links=1000x,compute=2x",
    ]
    value = json.loads(run(*words, "--what-if", "links=1000x", "--json").out)
    assert value["what_if"]["factors"] == {"links": 1000.0}
    before, after = (
        part["steps_ns"][0] for part in (value["timeline"], value["what_if"]["timeline"])
    )
    assert after < before
    nothing = "compute=free,memory=free,launch=free,communication=free,links=free"
    for devices in ("2", "1,2"):
        none = run(*words, "--devices", devices, "--what-if", nothing)
        assert (none.status, none.out) == (1, "")
        assert none.err.endswith(
            f"ridgeline: wanted a what-if that leaves something of the step, got {nothing}, with which it takes "
            "no time; leave out a part\n"
        )
    wrong = run(*words, "--what-if", "luck=2x")
    assert wrong.status == 1
    assert "got 'luck=2x' in the what-if" in wrong.err


def test_between_hosts_gradients_are_all_reduced(
    run, task_file, machine_file, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is chosen for one host: some ways need it, and none is measured between several."""
    asked: list[dict[str, object]] = []
    choose = scaling_curve.choose

    def seen(*args: Any, fixed: dict[str, object], **given: Any) -> Any:
        asked.append(fixed)
        return choose(*args, fixed=fixed, **given)

    monkeypatch.setattr(scaling_curve, "choose", seen)
    words = ("simulate", task_file, "--machine", machine_file, "-q", "--cluster", "2:1gbit:20us")
    assert run(*words, "--devices", "1,2").status == 0
    assert run(*words, "--devices", "1,2,4").status == 0
    assert run(*words, "--devices", "1,8").status == 0
    exchanged = Sync().algorithm
    assert asked == [
        {"workers": 2},
        {"workers": 2, "algorithm": exchanged},
        {"workers": 8, "algorithm": exchanged},
    ]


def test_a_given_profile_is_doubted_where_it_is_used(
    run, task_file, machine_file, tmp_path
) -> None:
    """As this machine's own one is; it cannot be measured again here, so that is all that is said."""
    disturbed = msgspec.structs.replace(
        Machine.load(machine_file),
        host_load=HostLoad(others=0.5),
        suspect="a trial took twice as long",
    ).save(tmp_path / "disturbed.json")
    words = (
        f"{disturbed}: the profile was measured while other programs used 50.0 % of the processors: what is "
        f"predicted from it may be far off {disturbed}: a trial took twice as long"
    )

    def said(*words: object) -> str:
        return " ".join(run(*words).err.split())

    for verb in ("simulate", "plan", "trace"):
        assert words in said(verb, task_file, "--machine", disturbed)
        assert "far off" not in said(verb, task_file, "--machine", machine_file)
    for more in (("--devices", "1,2"), ("--intensity",)):
        assert words in said("simulate", task_file, "--machine", disturbed, *more)


def test_more_work_than_workers_is_explained(run, task_file, machine_file, tmp_path) -> None:
    """An efficiency of 741 % comes from settings whose rates differ; the page says so, and so does the terminal."""
    machine = Machine.load(machine_file)
    slow = tuple(
        msgspec.structs.replace(ceiling, rate=ceiling.rate.times(1e-3), curve=())
        if ceiling.setting.workers == 1
        else ceiling
        for ceiling in machine.ceilings
    )
    file = msgspec.structs.replace(machine, ceilings=slow).save(tmp_path / "slow.json")
    for devices in ("2", "1,2"):
        told = " ".join(
            run("simulate", task_file, "--machine", file, "--devices", devices).out.split()
        )
        assert "! 2 workers are predicted to do" in told
        assert "more than there are workers: with other threads, or a smaller batch" in told
