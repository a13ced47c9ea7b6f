"""The fixture that watches every test does see what a test leaves behind."""

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy of that file imports lies beside the file itself."""
    paths = [str(CONFTEST.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.parametrize(
    ("body", "leak"),
    [
        ("import os; os.environ['LEFT'] = '1'", "environment variable LEFT changed"),
        ("import os; os.environ.pop('PRESENT')", "environment variable PRESENT changed"),
        (
            "import threading; threading.Thread(target=DONE.wait, name='left', daemon=True).start()",
            "thread left",
        ),
        (
            "import subprocess; KEPT.append(subprocess.Popen(['sleep', '60']))",
            "child process * (sleep)",
        ),
        (
            (
                "import torch.distributed as d; "
                "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
            ),
            "an open torch process group",
        ),
    ],
)
def test_leak_fails_the_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, body: str, leak: str
) -> None:
    """Each kind of leak fails the test that made it, by name."""
    monkeypatch.setenv("PRESENT", "1")
    source = CONFTEST.read_text().replace("GRACE_S = 30.0", "GRACE_S = 0.2")
    pytester.makeconftest(source)
    pytester.makepyfile(
        f"""
        import threading
        DONE, KEPT = threading.Event(), []

        def test_leaks():
            {body}

        def test_after():
            DONE.set()
            for process in KEPT:
                process.wait()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test left behind: {leak}*"])


@pytest.mark.parametrize("words", [(), ("--hypothesis-seed=1",)])
def test_laws_have_no_time_limit_and_no_luck(
    pytester: pytest.Pytester, words: tuple[str, ...]
) -> None:
    """Whichever module is read first: a busy host must not fail an example, nor one that takes long to draw."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        f"""
        from hypothesis import HealthCheck, given, settings, strategies as st

        DEFINED = settings.default

        @given(st.integers())
        def test_law(number):
            assert DEFINED.deadline is None
            assert HealthCheck.too_slow in DEFINED.suppress_health_check
            assert DEFINED.derandomize is {not words}
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", *words).assert_outcomes(passed=1)


def test_the_users_terminal_is_none_of_the_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed lines are compared as they are in one of the usual width, without colours."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import os, shutil

        def test_width():
            assert shutil.get_terminal_size().columns == 80
            assert "FORCE_COLOR" not in os.environ
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_clean_test_passes(pytester: pytest.Pytester) -> None:
    """What a test starts and ends itself is no leak."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import subprocess, threading

        def test_clean(monkeypatch):
            monkeypatch.setenv("MINE", "1")
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            subprocess.run(["true"], check=True)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_only_tests_on_gpus_see_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with two GPUs other tests, their fixtures and processes have none, and come last."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        """
        import os, subprocess, sys, types
        import pytest

        cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
        torch = types.SimpleNamespace(cuda=cuda, manual_seed=int)
        torch.default_generator = types.SimpleNamespace(manual_seed=int)
        sys.modules["torch"] = torch
        SEEN = []

        def look():
            told = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
            child = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
            return cuda.is_available(), cuda.device_count(), child.stdout.strip()

        @pytest.fixture(scope="module")
        def before():
            return look()

        def test_on_the_cpu(before):
            assert before == look() == (False, 0, "")
            assert SEEN == ["quiet", "gpu"]

        def test_on_the_cpu_again():
            assert look() == (False, 0, "")

        @pytest.mark.gpu
        def test_on_a_gpu():
            assert look() == (True, 2, "0,1")
            SEEN.append("gpu")

        @pytest.mark.gpu
        @pytest.mark.quiet
        def test_that_compares_times():
            SEEN.append("quiet")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4)


def test_a_mark_that_is_not_spelt_out_is_refused(pytester: pytest.Pytester) -> None:
    """A file that `make test` would not find by it."""
    pytester.makeconftest(CONFTEST.read_text())
    path = pytester.makepyfile("import pytest\n@getattr(pytest.mark, 'alone')\ndef test(): ...")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stderr.fnmatch_lines(
        [
            f"ERROR: wanted pytest.mark.alone in the text of {path}, whose tests have that mark, got *"
        ]
    )


def test_folders_with_long_files_come_first(pytester: pytest.Pytester) -> None:
    """Whatever their names are."""
    pytester.makeconftest(CONFTEST.read_text())
    for folder in ("laws", "session"):
        pytester.mkdir(folder).joinpath(f"test_{folder}.py").write_text("def test(): ...")
    told = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--collect-only", "-q").outlines
    assert told[:2] == ["session/test_session.py::test", "laws/test_laws.py::test"]


def test_lasting_objects_are_set_aside(pytester: pytest.Pytester) -> None:
    """Where there are many, so that garbage collections do not look at them; what a test makes is collected.

    Also what is imported while a test runs, before the next one.
    """
    source = CONFTEST.read_text().replace("MOST_OBJECTS = 50_000", "MOST_OBJECTS = 0")
    pytester.makeconftest(source)
    pytester.makepyfile(
        """
        import gc, sys, weakref

        class Node: ...
        lasting = Node()

        def test_objects():
            assert gc.get_freeze_count() > 1000
            assert not any(found is lasting for found in gc.get_objects())
            node = Node()
            node.itself, gone = node, weakref.ref(node)
            del node
            gc.collect()
            assert gone() is None

        def test_an_import():
            sys.modules |= {f"imported {number}": Node() for number in range(200)}

        def test_what_was_imported():
            assert not any(found is sys.modules["imported 7"] for found in gc.get_objects())
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)


@pytest.mark.parametrize("begins", ["import torch", ""])
def test_the_compiler_keeps_no_trace(pytester: pytest.Pytester, begins: str) -> None:
    """It would make it in full, though nobody reads it, for a handler of pytest's; whenever torch is imported."""
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        f"""
        import logging
        {begins}

        def test_that_imports():
            import torch

        def test_handlers():
            kinds = [type(handler) for handler in logging.getLogger("torch.__trace").handlers]
            assert [kind.__name__ for kind in kinds] == ["LazyTraceHandler"]  # which goes, once asked
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
