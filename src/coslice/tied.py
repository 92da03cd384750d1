"""Processes that end when the one that started them does, killed or not (prctl(2), PR_SET_PDEATHSIG).

The kernel ties a process to the *thread* that started it: start it from one that lives on.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: between fork and exec is no time to


def tie(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Called in the child: ``signum`` comes once ``parent`` ends. If it has ended already, so do we."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments``, tied to this process. Nothing of ours runs between fork and exec, where
    threads of gRPC would be in the way."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def main() -> None:
    parent, module = sys.argv[1:3]
    tie(int(parent))
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
