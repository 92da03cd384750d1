"""A job for the fault tests: the real client and, with ``--state``, real torch state that moves.

Loads what it needs, then waits for ``begin`` before it registers: several load side by side and register in
the order that the test says. Obeys lines on stdin (``acquire``, ``yield``, ``digest``, ``leave``), one after
the other; says what happened as JSON lines on stdout. ``--stall-snapshot``: says when its snapshot begins and
never finishes it.
``--fail-restore``: what was saved never comes back. ``--late``: has no state before it is told ``register``.
"""

import argparse
import ctypes
import hashlib
import json
import os
import sys
import threading

import coslice
from coslice.errors import CosliceError

BOUND = 60.0


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def stall() -> None:
    say("snapshotting")
    threading.Event().wait()


def refuse(*_: object) -> None:
    raise RuntimeError("this state does not come back")


class Job:
    def __init__(self, options: argparse.Namespace) -> None:
        self.client = coslice.connect()
        self.state: list[object] = []
        self.options = options
        if options.state and not options.late:
            self.register(options)

    def register(self, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(os.getpid())
        self.model = torch.nn.Linear(1024, options.state // 4096, bias=False)
        self.handle = coslice.workload.register(
            self.model,
            on_snapshot=stall if options.stall_snapshot else None,
            on_restore=refuse if options.fail_restore else None,
        )
        if self.handle.error is not None:
            raise self.handle.error

    def obey(self, command: str) -> None:
        match command:
            case "acquire":
                grant = self.client.acquire(timeout=BOUND)
                say("granted", epoch=grant.leases[0].epoch, restored=grant.restored)
            case "register":
                self.register(self.options)
                say("registered")
            case "yield":
                self.client.yield_()
                say("yielded")
            case "digest":
                # Read in place: a copy would be device memory, and what numpy has seen cannot move.
                weight = self.model.weight
                data = (ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())
                say("digest", digest=hashlib.sha256(data).hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=int, default=0)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--stall-snapshot", action="store_true")
    parser.add_argument("--fail-restore", action="store_true")
    options = parser.parse_args()
    if options.state:
        import torch  # noqa: F401  (seconds that need not be in the test's order)
    if sys.stdin.readline().strip() != "begin":
        return
    job = Job(options)
    say("ready")
    for line in sys.stdin:
        if (command := line.strip()) == "leave":
            break
        try:
            job.obey(command)
        except CosliceError as error:
            say("error", kind=type(error).__name__, message=str(error))
    job.client.close()
    say("left")


if __name__ == "__main__":
    main()
