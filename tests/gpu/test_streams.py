"""Stream lanes on a GPU: dependencies across streams, in eager runs and inside a capture."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from ridgeline.engine import Engine
from ridgeline.engine.lanes.streams import device_lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LATE = 2_000_000
LANES = ("copy-in:0", "compute:0", "copy-out:0", "communication:0")


def push_chain(engine: Engine, x: torch.Tensor, rounds: int) -> torch.Tensor:
    """Add 1 on every lane in turn, late; returns the sum so far as another lane reads it."""
    variable, seen = engine.variable("x"), engine.variable("seen")
    copies = torch.zeros(rounds * len(LANES), device="cuda")

    def add() -> None:
        torch.cuda._sleep(LATE // 10)
        x.add_(1)

    for step in range(rounds * len(LANES)):
        engine.push(add, writes=(variable,), lane=LANES[step % len(LANES)], name="add")
        engine.push(
            lambda step=step: copies[step].copy_(x[0]),
            reads=(variable,),
            writes=(seen,),
            lane=LANES[(step + 1) % len(LANES)],
            name="look",
        )
    engine.wait_all()
    return copies


def test_every_stream_sees_what_was_written_before_and_nothing_later() -> None:
    """Reads and writes in turn, on four streams, while the host runs ahead."""
    with Engine(lanes=device_lanes("cuda:0")) as engine:
        x = torch.zeros(1000, device="cuda")
        torch.cuda._sleep(LATE)
        x.add_(5)  # on the caller's stream, before the first push
        copies = push_chain(engine, x, 8)
        assert copies.tolist() == [6.0 + i for i in range(32)]


def test_the_host_does_not_wait_in_a_push() -> None:
    """Nor in a wait for a stream's task."""
    with Engine(lanes=device_lanes("cuda:0")) as engine:
        x = torch.zeros(1000, device="cuda")
        push_chain(engine, x, 1)
        torch.cuda.synchronize()
        end = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(100 * LATE)
            push_chain(engine, x, 1)
            end.record()
            assert not end.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_thread_waits_for_the_stream_whose_result_it_uses() -> None:
    """A copy to pinned memory that a CPU lane writes to disk, say."""
    with Engine(lanes=device_lanes("cuda:0")) as engine:
        result = engine.variable("result")
        source = torch.full((1 << 20,), 3.0, device="cuda")
        host = torch.zeros(1 << 20, pin_memory=True)
        sums = []

        def send() -> None:
            torch.cuda._sleep(10 * LATE)
            host.copy_(source, non_blocking=True)

        engine.push(send, writes=(result,), lane="copy-out:0")
        engine.push(lambda: sums.append(float(host.sum())), reads=(result,), lane="disk")
        engine.wait_all()
        assert sums == [3.0 * (1 << 20)]


def test_lanes_record_into_a_graph() -> None:
    """Twice, after eager use, from the same engine and on the same variables' lanes."""
    with Engine(lanes=device_lanes("cuda:0")) as engine:
        x = torch.zeros(1000, device="cuda")
        push_chain(engine, x, 1)
        graphs = []
        for _ in range(2):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                copies = push_chain(engine, x, 2)
            graphs.append((graph, copies))
        x.zero_()
        for graph, copies in graphs:
            start = float(x[0])
            graph.replay()
            assert copies.tolist() == [start + 1 + i for i in range(8)]
        assert float(push_chain(engine, x, 1)[-1]) == 20.0


def test_the_sanitizer_finds_no_race() -> None:
    """Every access of every stream is ordered by events that torch's sanitizer sees."""
    program = textwrap.dedent(
        """
        import torch
        from ridgeline.engine import Engine
        from ridgeline.engine.lanes.streams import device_lanes

        lanes = ("copy-in:0", "compute:0", "copy-out:0", "communication:0")
        x = torch.zeros(1000, device="cuda")
        y = torch.zeros(1000, device="cuda")
        with Engine(lanes=device_lanes("cuda:0")) as engine:
            a, b = engine.variable("a"), engine.variable("b")
            for step in range(40):
                engine.push(lambda: x.add_(1), writes=(a,), lane=lanes[step % 4])
                engine.push(lambda: y.add_(x), reads=(a,), writes=(b,), lane=lanes[(step + 1) % 4])
            engine.wait_all()
            assert float(y[0]) == 820.0, float(y[0])
        """
    )
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "data race" not in done.stderr
