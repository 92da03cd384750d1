"""The demo's child processes: started so that none outlives the demo, their JSON lines in one queue.

Each child is asked to end by a signal and, if it does not, killed; should the demo itself be killed, the
kernel signals its children. What a child says on standard error goes to a file and is shown if the child
fails.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coslice.errors import OperationFailed
from coslice.tied import tie

STOP_TIMEOUT = 10.0


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Signals that ask us to end are heard after the block: what it does must not be left half done.

    Without it a signal during a fork is lost: Python ignores exceptions in hooks that libraries run there.
    """
    heard: list[int] = []
    before: dict[int, Any] = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[signum] = signal.getsignal(signum)
            signal.signal(signum, lambda signum, _frame: heard.append(signum))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if heard:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Line:
    """Something a child said. ``facts`` None: it ended."""

    child: str
    facts: dict[str, Any] | None


class Child:
    """One process. Its lines arrive in the queue of whoever started it."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: Path) -> None:
        self.name, self.process, self._errors = name, process, errors

    @property
    def pid(self) -> int:
        return self.process.pid

    def failure(self, others: Sequence["Child"] = ()) -> OperationFailed:
        """An error that says how it ended and what it and the others said last. It has ended already."""
        words = [f"\n    {child.name}: {line}" for child in (self, *others) for line in child.last_words()]
        return OperationFailed(f"{self.name} ended with status {self.process.wait()}" + "".join(words))

    def last_words(self) -> list[str]:
        return self._errors.read_text(errors="replace").strip().splitlines()[-12:]

    def stop(self) -> None:
        """End it, in an orderly way if it listens. Harmless if it has ended."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    """Starts processes and hears them. Leaving the context stops all that still run, last started first.

    To be used from the main thread: the kernel ties a child to the thread that started it.
    """

    def __init__(self, folder: Path, *, cpus: Set[int], all_cpus: Set[int]) -> None:
        self._folder, self._cpus, self._all_cpus = folder, cpus, all_cpus
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not keep us from stopping what we started.
        with interrupts_deferred():
            self._stack.close()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, anywhere: bool = False
    ) -> Child:
        """``anywhere``: on all cores at first; otherwise on ``cpus`` from its beginning."""
        parent = os.getpid()

        def prepare() -> None:  # in the child, before exec
            tie(parent, signal.SIGTERM)
            os.sched_setaffinity(0, self._all_cpus if anywhere else self._cpus)

        errors = self._folder / f"{name}.err"
        with interrupts_deferred(), errors.open("w") as file:
            process = subprocess.Popen(
                command,
                # What libraries leave behind goes away with our folder.
                env=dict(environment) | {"TMPDIR": str(self._folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                preexec_fn=prepare,
                # Not in the terminal's foreground group: Ctrl-C is the demo's, which then stops its children.
                start_new_session=True,
            )
            child = Child(name, process, errors)
            self._stack.callback(child.stop)
        threading.Thread(target=self._read, args=(child,), name=f"read {name}", daemon=True).start()
        return child

    def _read(self, child: Child) -> None:
        assert child.process.stdout is not None
        for text in child.process.stdout:
            try:
                facts = json.loads(text)
            except ValueError:
                continue  # a library's remark on standard output
            if isinstance(facts, dict):
                self._lines.put(Line(child.name, facts))
        self._lines.put(Line(child.name, None))

    def lines(self, *, timeout: float) -> Iterator[Line]:
        """All lines as they come; ``OperationFailed`` if the next takes longer than ``timeout`` seconds."""
        while True:
            deadline = time.monotonic() + timeout
            try:
                yield self._lines.get(timeout=timeout)
            except queue.Empty:
                waited = timeout + time.monotonic() - deadline
                raise OperationFailed(f"the demo's processes said nothing for {waited:.0f} s") from None

    def first_line(self, child: Child, *, timeout: float) -> dict[str, Any]:
        """The first line of a service that has just been started; nothing else may be running that speaks."""
        for line in self.lines(timeout=timeout):
            if line.child == child.name:
                if line.facts is None:
                    raise child.failure()
                return line.facts
        raise AssertionError("lines() does not end")
