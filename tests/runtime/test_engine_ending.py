"""What is pending when the interpreter ends is finished, or said."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.parametrize("drops", [False, True])
def test_what_is_pending_when_the_interpreter_ends_is_finished(tmp_path: Path, drops: bool) -> None:
    """Nobody closes the engine, kept or dropped: the file is whole, and a failure is printed."""
    program = textwrap.dedent(f"""
        import threading
        from ridgeline.engine import Engine

        engine = Engine()
        state = engine.variable()
        main = threading.main_thread()
        engine.push(lambda: main.join(), writes=(state,), lane="disk")
        for number in range(3):
            engine.push(
                lambda number=number: open("out", "a").write(str(number)), writes=(state,), lane="disk"
            )
        engine.push(lambda: 1 / 0, lane="loader", name="last")
        if {drops}:
            main.join = lambda: None
            del engine
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (tmp_path / "out").read_text() == "012"
    assert "EngineError: ZeroDivisionError: division by zero (in task 'last'" in done.stderr


def test_collectives_that_are_pending_when_the_interpreter_ends_are_named() -> None:
    """They are not waited for, since their other workers may be gone."""
    program = textwrap.dedent("""
        import torch
        from ridgeline.engine import Engine
        from ridgeline.engine.lanes.lanes import WorkLane

        engine = Engine(lanes={"communication": WorkLane})
        engine.push(torch.futures.Future, lane="communication")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (
        "got one with 1 unfinished tasks and collectives among them, which are dropped"
        in done.stderr
    )


def test_a_thread_that_comes_back_from_a_callback_when_the_interpreter_ends_does_not_abort_it() -> (
    None
):
    """Where it is kept from a core just then, say: the work was done, and so is the process, with status 0."""
    program = textwrap.dedent("""
        import threading
        import torch
        from ridgeline.engine import Engine
        from ridgeline.engine.lanes.lanes import WorkLane

        done, main = WorkLane._done, threading.main_thread()

        def slowly(self, task, future):
            done(self, task, future)
            main.join()
            sum(range(10**7))

        WorkLane._done = slowly
        engine = Engine(lanes={"communication": WorkLane})
        sent, future = engine.variable(), torch.futures.Future()
        engine.push(lambda: future, writes=(sent,), lane="communication")
        threading.Thread(target=future.set_result, args=(None,), daemon=True).start()
        engine.wait(sent)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
