"""A job that the cuda backend moves, with callbacks around it: what it registers is nothing but them.

Commands on stdin: ``check``, ``refuse`` (the next on_snapshot raises).
"""

import json
import os
import sys
import time

import coslice.workload
from coslice.testing.gpu_job import Device


def say(**facts: object) -> None:
    line = json.dumps({"at_us": time.monotonic_ns() // 1000, **facts})
    sys.stdout.write(f"{line}\n")  # at once: two threads speak
    sys.stdout.flush()


refusing = False


def out() -> None:
    if refusing:
        raise RuntimeError("the communicator is in use")
    say(event="out")


def back() -> None:
    say(event="back")


device = Device(0)
device.allocate(int(sys.argv[1]))
handle = coslice.workload.register(on_snapshot=out, on_restore=back)
if handle.error is not None:
    say(event="refused", text=str(handle.error))
    raise SystemExit(3)
say(event="registered", pid=os.getpid())
for line in sys.stdin:
    if line.strip() == "check":
        say(event="checked", ok=device.check())
    elif line.strip() == "refuse":
        refusing = True
        say(event="refusing")
os._exit(0)
