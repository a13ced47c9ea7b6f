"""The fixture that watches every test does see what a test leaves behind."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


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
    source = CONFTEST.read_text().replace("GRACE_S = 5.0", "GRACE_S = 0.2")
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
