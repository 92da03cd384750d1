"""Writes down what this process does with its phases, for ``coslice check-phases``; loaded for nothing else.

One file of JSON lines for each process, below the folder that ``COSLICE_RECORD_PHASES`` names. What it means
is for the reader to say (``coslice.testing.phase_rules``).
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from coslice.gate import GATE

if TYPE_CHECKING:
    from coslice.client.holder import Held

_OURS = ("coslice.", "torch.", "contextlib", "functools")
"""Frames of these are never the line that a user wants to be shown."""
_RUNNERS = ("asyncio.", "concurrent.", "threading", "ray.")
"""They call what a user decorated: then it says more than the line that started them."""

_recorders: list[Recorder] = []


def registered(adapters: Iterable[Any]) -> None:
    """State was registered: work with it belongs into a phase."""
    for recorder in _recorders:
        recorder.registered(adapters)


class Recorder:
    """``saw`` is a watcher of ``client.holder``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._outside: set[str] = set()
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self._exits)
        _recorders.append(self)

    def _start(self) -> None:
        self._lock = threading.Lock()  # a forked child's own: another thread may have had the old one
        self._entered: dict[int, BaseException | None] = {}
        """Record → what was being handled already when it was entered."""
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):  # the check is over, and this process goes on
            # Unbuffered: a child must not write again what another thread of its parent was writing.
            path = self._folder / f"{os.getpid()}-{time.time_ns()}.jsonl"
            self._file = path.open("ab", buffering=0)
        self._write("starts", argv=sys.argv)

    def saw(self, what: str, held: Held[Any]) -> None:
        facts: dict[str, Any] = {}
        if what == "enters":
            self._entered[id(held)] = sys.exc_info()[1]
        elif what == "leaves":
            before, error = self._entered.pop(id(held), None), sys.exc_info()[1]
            if error not in (None, before) and not isinstance(error, GeneratorExit):
                facts["error"] = type(error).__name__
        self._write(what, record=id(held), groups=held.groups, phase=held.phase, where=_where(), **facts)

    def _exits(self) -> None:
        error = getattr(sys, "last_type", None)  # nobody caught it
        self._write("exits", **({"error": error.__name__} if error is not None else {}))

    def registered(self, adapters: Iterable[Any]) -> None:
        for adapter in adapters:
            roots = getattr(adapter, "roots", None)
            if roots is None:
                continue
            for module in roots.modules.values():
                module.register_forward_pre_hook(lambda *_: self._works("a forward pass"))
            for optimizer in roots.optimizers.values():
                optimizer.register_step_pre_hook(lambda *_: self._works("an optimizer's step"))

    def _works(self, what: str) -> None:
        if not GATE.active:
            where = _where()
            if where not in self._outside:  # once for each line is enough
                self._outside.add(where)
                self._write("outside", work=what, where=where)

    def _write(self, what: str, **facts: Any) -> None:
        line = json.dumps(
            {
                "at": time.monotonic(),
                "pid": os.getpid(),
                "thread": threading.get_ident(),
                "what": what,
                **facts,
            }
        )
        with self._lock, contextlib.suppress(OSError):  # a full disk is the reader's to tell, not the job's
            if self._file is not None:
                self._file.write(line.encode() + b"\n")


def _where() -> str:
    """``file:line`` of the innermost frame that is neither ours nor the framework's; of the decorated
    function itself where a loop or a pool called it."""
    frame: FrameType | None = sys._getframe(1)
    decorated = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "coslice.client.decorator" and (fn := frame.f_locals.get("fn")) is not None:
            if (code := getattr(inspect.unwrap(fn), "__code__", None)) is not None:
                decorated = f"{code.co_filename}:{code.co_firstlineno}"
        elif module.startswith(_RUNNERS):
            if decorated:
                return decorated
        elif not (module.startswith(_OURS) or module == "coslice"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return decorated
