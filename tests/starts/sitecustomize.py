"""What each Python process that the tests start does first, since this folder is in their `PYTHONPATH`.

Importing torch and its compiler makes 400,000 objects that stay. At Python's own threshold, 700, the collector looks
at them a hundred times and more meanwhile: a quarter of the seconds of a process that does little else (2.3 s of CPU
for torch and `ridgeline.runtime.training.loop`, of which 0.6 s).

A launcher, what it launches, and Ridgeline's own workers and servers are run by a warm process, which has imported
torch (`warm.py`), where there is one and it has imported with the same variables, but for the number of threads; what
runs programs on a heap that is checked, by one with such a heap.
"""

import gc
import os
import sys

OBJECTS = 50_000
"""Made since the last collection, before the next: what a test leaves in cycles is still collected as it runs."""
WARM, WARM_CHECKED = "WARM_PROCESS", "WARM_CHECKED_PROCESS"
ENDING = {"ends_with_parent": True, "takes_along": True}
WORKERS = {
    "ridgeline.probe.groups.group_worker": {},
    "ridgeline.cli.training.worker": {"ends_with_parent": True},
    "ridgeline.lint.child_worker": ENDING,
    "ridgeline.packages.program_worker": ENDING,
}
"""Modules that do not depend on the number of their process, and how they end (`relay.hand_over`)."""

gc.set_threshold(OBJECTS, 10, 10)


def have_run() -> None:
    """Have the warm process run what this process was started for, and end as that does; or go on, as ever."""
    import relay

    warm, path, here = os.environ[WARM], list(sys.path), os.getcwd()  # noqa: PTH109
    status = None
    match sys.orig_argv[1:]:
        case ["-P", "-u", "-m", name, *words] if name in WORKERS:
            how = {"path": path, "has_threads": True, **WORKERS[name]}
            warm = os.environ.get(WARM_CHECKED, warm) if "MALLOC_CHECK_" in os.environ else warm
            status = relay.hand_over(warm, [name, *words], module=name, **how)
        case ["-m", "ridgeline", "kvserver", "--beside", *words]:
            own, name = ["ridgeline", "kvserver", "--beside", *words], "ridgeline.__main__"
            status = relay.hand_over(warm, own, module=name, path=[here, *path], has_threads=True)
        case ["-m", "torch.distributed.run" as name, *words]:
            how = {"path": [here, *path], "has_threads": True}
            status = relay.hand_over(warm, [name, *words], module=name, **how)
        case ["-u", script, *words] if (
            script.endswith(".py") and "TORCHELASTIC_RUN_ID" in os.environ
        ):
            beside = os.path.dirname(os.path.abspath(script))  # noqa: PTH100, PTH120 - as Python does
            status = relay.hand_over(warm, [script, *words], path=[beside, *path], has_threads=True)
    if status is not None:
        relay.end(status)


if WARM in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    have_run()
