"""A child that does what its network is called: `ends well`, `dies`, `raises`, `hangs`."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

request = json.loads(Path(sys.argv[-1]).read_text())
told = {"first_s": 1.0, "doing": "taking turns" if request["network"] == "hangs" else ""}
Path(request["answer"]).write_text(json.dumps(told))
if request["network"] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if request["network"] == "raises":
    raise RuntimeError("CUDA error: device-side assert triggered")
if request["network"] == "hangs":
    threading.Event().wait()
