"""A process that uses an imaginary TPU: FOLDER DEVICE. Run it as a script.

It has a thread of the runtime's name and a device file open, under a lease, so that nobody else can open it.
SIGUSR1 (from the fake tool) parks it, SIGUSR2 brings it back. Says where it is in ``FOLDER/PID``.
"""

import ctypes
import fcntl
import os
import signal
import sys
import threading
from pathlib import Path

folder, device = Path(sys.argv[1]), sys.argv[2]
PR_SET_NAME = 15
named = threading.Event()
held = -1


def runtime() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"libtpu0123abcd")
    named.set()
    threading.Event().wait()


def say(where: str) -> None:
    scratch = folder / f".{os.getpid()}"
    scratch.write_text(where)
    scratch.replace(folder / str(os.getpid()))


def attach() -> None:
    global held
    held = os.open(device, os.O_RDWR)
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    say("attached")


def park() -> None:
    os.close(held)
    (folder / "lock").touch()
    say("parked")


signal.signal(signal.SIGIO, signal.SIG_IGN)  # somebody wants the device; it will be told it is busy
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
threading.Thread(target=runtime, daemon=True).start()
named.wait()
attach()
print("ready", flush=True)
while True:
    if signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR1:
        park()
    else:
        try:
            attach()
        except OSError as error:
            say(f"broken: {error.strerror}")
