"""A child that does what its network is called: `ends well`, `dies`, `raises`, `hangs`."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

request = json.loads(Path(sys.argv[-1]).read_text())
told = {"first_s": 1.0, "doing": "taking turns" if request["network"] == "hangs" else ""}
answer = Path(request["answer"])
answer.with_suffix(".new").write_text(json.dumps(told))
answer.with_suffix(".new").rename(answer)  # whole, for who looks whether it is there
if request["network"] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if request["network"] == "raises":
    raise RuntimeError("CUDA error: device-side assert triggered")
if request["network"] == "hangs":
    threading.Event().wait()
