"""torch's compiler, imported while this process waits for another one."""

import contextlib
import importlib
import threading
from collections.abc import Iterator

import torch

COMPILER = "torch._inductor.compile_fx"
"""Brings the parts of the compiler that are imported when something is compiled first."""


@contextlib.contextmanager
def importing_compiler(device: str) -> Iterator[None]:
    """Inside, a thread imports the compiler where it may be needed next; it has ended afterwards.

    What cannot be imported is not reported here: compiling reports it.

    Args:
        device: Of the step: on `cuda` compiled plans are tried as a rule.

    Cost: 2 to 3 s of one core, of which the first plan that compiles has that much less to do.
    """
    if device != "cuda":
        yield
        return
    thread = threading.Thread(target=_import_compiler, name="import of the compiler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Whoever compiles next would wait for the lock of the import anyway.
        thread.join()


def _import_compiler() -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(COMPILER)
        torch.compiler.list_backends()  # imports all of them, as the first call of a compiled function
