"""The journal: one line of JSON for every event, with what followed and why. For explain, replay and people.

It is evidence, not state: nothing is decided from it, so a full disk costs lines and never a grant. Lines are
written together once the loop has served what is ready; a crash can lose the last of them and tear one.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from coslice.core.outcome import Step
from coslice.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT = 1
_KEY = "coslice_journal"


class JournalFile(msgspec.Struct, frozen=True):
    """``torn``: the writer was cut off within the last line, which is left out. A header within ``records``
    is a restart: times after it are on that header's ``clock``."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    torn: bool


class Journal:
    """``path`` None: nothing is kept. At ``max_bytes`` the file becomes ``<path>.1`` (one predecessor is
    kept)."""

    def __init__(
        self, path: str | Path | None, *, orchestrator: str = "", max_bytes: int | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self._orchestrator, self._max_bytes = orchestrator, max_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._lines: list[Any] = []
        self._flushing = False
        self._encoder = msgspec.json.Encoder()
        self._clock: tuple[float, float] | None = None
        self.lost = 0
        """Lines that could not be written."""

    def open(self, clock: float) -> None:
        """Begin, or go on with, the file. ``clock``: the driver clock's time now. Raises ``ConfigError``."""
        self._clock = (clock, time.time())
        if self.path is None:
            return
        if self.path.exists():
            _mend(self.path)
        self._begin()

    def record(
        self,
        group: str,
        at: float,
        event: msgspec.Struct,
        step: Step[Any, Any],
        summary: Mapping[str, object],
    ) -> None:
        """One event of one machine and its outcome. Encoded later: all of these are immutable."""
        self._put((group, at, event, step, summary))

    def note(
        self,
        at: float,
        *,
        job: str,
        name: str,
        session: str = "",
        value: float = 0.0,
        step: int = 0,
        text: str = "",
    ) -> None:
        """What a job wanted to be known: a reward, a step, a phase away from the accelerator."""
        note = {"job": job, "session": session, "name": name, "value": value, "step": step, "text": text}
        self._put({"t": at, "note": note})

    def line(self, obj: Mapping[str, object]) -> None:
        """Any other line; by habit it has ``t``, seconds on the journal's clock."""
        self._put(obj)

    def flush(self) -> None:
        """Hand what was recorded to the operating system. Never raises: see ``lost``."""
        self._flushing = False
        lines, self._lines = self._lines, []
        if not lines or self._file is None:
            return
        try:
            data = b"".join(self._encode(line) for line in lines)
            self._file.write(data)
            self._size += len(data)
            if self._max_bytes is not None and self._size > self._max_bytes:
                self._rotate()
        except OSError as error:
            if not self.lost:
                log.error("the journal %s cannot be written: %s; going on without it", self.path, error)
            self.lost += len(lines)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, line: object) -> None:
        if self._file is None:
            return
        self._lines.append(line)
        if self._flushing:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop in this thread
            self.flush()
            return
        self._flushing = True
        loop.call_soon(self.flush)

    def _encode(self, line: Any) -> bytes:
        if isinstance(line, tuple):
            group, at, event, step, summary = line
            reasons = [(reason.code, reason.text) for reason in step.reasons]
            line = {"t": at, "group": group, "event": event, "effects": step.effects, "reasons": reasons}
            line["state"] = summary
        return self._encoder.encode(line) + b"\n"

    def _begin(self) -> None:
        assert self.path is not None
        assert self._clock is not None
        clock, started = self._clock
        header = {_KEY: FORMAT, "started": started, "clock": clock, "orchestrator": self._orchestrator}
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "ab", buffering=0)
            self._size = os.fstat(fd).st_size + self._file.write(self._encode(header))
        except OSError as error:
            raise ConfigError(f"cannot write the journal {self.path}: {error.strerror}") from error

    def _rotate(self) -> None:
        assert self.path is not None
        assert self._file is not None
        self._file.close()
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._begin()


def read_journal(path: str | Path) -> JournalFile:
    """Everything whole in the file. Raises ``ConfigError`` naming the line where it is not a journal."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
    lines = data.split(b"\n")
    tail = lines.pop()  # empty unless the writer was cut off: a line is whole once it has its end
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not records or _KEY not in records[0]:
        raise ConfigError(f"{path}, line 1: not a coslice journal (its first line has no {_KEY!r})")
    if records[0][_KEY] != FORMAT:
        raise ConfigError(
            f"{path}, line 1: journal format {records[0][_KEY]!r}, and this version of coslice reads {FORMAT}"
        )
    return JournalFile(records[0], records[1:], torn=bool(tail))


def _parse(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, line {number}: not a coslice journal ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, line {number}: not a coslice journal (a line is not a JSON object)")
    return record


def _mend(path: Path) -> None:
    """Before going on with a file: what a crash left of its last line would spoil the next. Refuses foreign
    files."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
    start = f'{{"{_KEY}":'.encode()
    if b"\n" not in data and start.startswith(data[: len(start)]):  # the very first line was cut off
        whole = 0
    else:
        read_journal(path)
        whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
