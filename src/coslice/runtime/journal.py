"""The journal: one line of JSON for every event, with what followed and why. For explain, replay and people.

It is evidence, not state: nothing is decided from it, so a full disk costs lines and never a grant. Lines are
written together once the loop has served what is ready; a crash can lose the last of them and tear one. What
became unreadable in the middle is skipped, counted and said.
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
from coslice.security.files import open_private
from coslice.security.redact import redact

log = logging.getLogger(__name__)

FORMAT = 1
_KEY = "coslice_journal"


class JournalFile(msgspec.Struct, frozen=True):
    """``torn``: the writer was cut off within the last line, which is left out. ``damaged``: lines in the
    middle that could not be read, left out too. A header within ``records`` is a restart or a new file: times
    after it are on that header's ``clock``."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    torn: bool
    damaged: int = 0


class Journal:
    """``path`` None: nothing is kept. At ``max_bytes`` the file becomes ``<path>.1``, that one ``<path>.2``
    and so on; ``keep`` predecessors are kept."""

    def __init__(
        self,
        path: str | Path | None,
        *,
        orchestrator: str = "",
        max_bytes: int | None = None,
        keep: int = 1,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._orchestrator, self._max_bytes, self._keep = orchestrator, max_bytes, keep
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
        name, text = redact(name), redact(text)
        note = {"job": job, "session": session, "name": name, "value": value, "step": step, "text": text}
        self._put({"t": at, "note": note})

    def line(self, obj: Mapping[str, object]) -> None:
        """Any other line; by habit it has ``t``, seconds on the journal's clock."""
        self._put(obj)

    def flush(self) -> None:
        """Hand what was recorded to the operating system. Never raises: see ``lost``."""
        self._flushing = False
        lines, self._lines = self._lines, []
        if not lines:
            return
        if self._file is None:
            self.lost += len(lines)
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
        if self.path is None and self._file is None:
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
            fd = open_private(self.path, os.O_WRONLY | os.O_APPEND)
            self._file = os.fdopen(fd, "ab", buffering=0)
            self._size = os.fstat(fd).st_size + self._file.write(self._encode(header))
        except OSError as error:
            raise ConfigError(f"cannot write the journal {self.path}: {error.strerror}") from error

    def _rotate(self) -> None:
        assert self.path is not None
        assert self._file is not None
        full, self._file = self._file, None
        full.close()
        for number in range(self._keep, 0, -1):
            older = self.path if number == 1 else _numbered(self.path, number - 1)
            if older.exists():
                os.replace(older, _numbered(self.path, number))
        try:
            self._begin()
        except ConfigError as error:  # somebody is in our place; lines are lost, and nothing else
            log.error("%s; going on without it", error)


def read_journal(path: str | Path) -> JournalFile:
    """Everything whole in the file. Raises ``ConfigError`` if it is no journal."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
    lines = data.split(b"\n")
    tail = lines.pop()  # empty unless the writer was cut off: a line is whole once it has its end
    header = _header(path, lines[0] if lines else b"")
    found = [_parse(line) for line in lines[1:] if line.strip()]
    records = [record for record in found if record is not None]
    return JournalFile(header, records, torn=bool(tail), damaged=len(found) - len(records))


def read_journals(path: str | Path) -> JournalFile:
    """The file with its predecessors (``<path>.2``, ``<path>.1``), the oldest first, as one."""
    path = Path(path)
    files = [path]
    while (older := _numbered(path, len(files))).is_file():
        files.append(older)
    read = [read_journal(file) for file in reversed(files)]
    records = list(read[0].records)
    for following in read[1:]:
        records += [following.header, *following.records]
    # A predecessor that ends within a line lost that line: what follows is in the next file.
    damaged = sum(file.damaged for file in read) + sum(file.torn for file in read[:-1])
    return JournalFile(read[0].header, records, torn=read[-1].torn, damaged=damaged)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _header(path: str | Path, line: bytes) -> dict[str, Any]:
    header = _parse(line)
    if header is None or _KEY not in header:
        raise ConfigError(f"{path}, line 1: not a coslice journal (its first line has no {_KEY!r})")
    if header[_KEY] != FORMAT:
        raise ConfigError(
            f"{path}, line 1: journal format {header[_KEY]!r}, and this version of coslice reads {FORMAT}"
        )
    return header


def _parse(line: bytes) -> dict[str, Any] | None:
    """None: damaged."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record if isinstance(record, dict) else None


def _mend(path: Path) -> None:
    """Before going on with a file: what a crash left of its last line would spoil the next. Refuses foreign
    files."""
    try:
        fd = open_private(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
    with os.fdopen(fd, "r+b") as file:
        first = file.readline(1 << 16)
        start = f'{{"{_KEY}":'.encode()
        if b"\n" not in first and start.startswith(first[: len(start)]):  # the very first line was cut off
            file.truncate(0)
            return
        _header(path, first.rstrip(b"\n") if first.endswith(b"\n") else b"")
        file.truncate(_whole(file))


def _whole(file: BinaryIO) -> int:
    """Where the last whole line ends, found from the end: a journal may be large."""
    size = at = file.seek(0, os.SEEK_END)
    tail = b""
    while at > 0 and b"\n" not in tail:
        at = max(0, at - (1 << 16))
        file.seek(at)
        tail = file.read(size - at)
    return at + tail.rfind(b"\n") + 1
