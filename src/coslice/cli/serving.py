"""The shell of the long-running processes: parts start in order, serve until a signal, stop in reverse;
SIGHUP has them read their files again."""

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console

from coslice.cli.regroup import GroupsFile, Policies
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.observe.tracing import Exporting
from coslice.security.files import private_directory
from coslice.security.listening import Security

log = logging.getLogger(__name__)
console = Console(stderr=True, highlight=False, emoji=False)


class Part(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def reload(self) -> tuple[str, ...]:
        """Read files again that may change while it runs; returns what changed. Raises ``ConfigError``."""
        ...


class App(Part, Protocol):
    async def wait(self) -> None:
        """Blocks while all is well."""
        ...


class Serving(NamedTuple):
    apps: Sequence[App]
    """Their end is the end of the process."""
    parts: Sequence[Part]
    """All that are told to read their files again."""
    groups: GroupsFile | Policies | None = None
    files: Sequence[str] = ()
    """Secrets and certificates: replaced, they are read again."""


class StateDir:
    """The folder of store and journal: kept by default, a temporary one that goes away with ``ephemeral``."""

    def __init__(self, folder: Path | None, name: str, *, ephemeral: bool) -> None:
        self._folder, self._name, self._ephemeral = folder, name, ephemeral

    def __enter__(self) -> Path:
        if self._ephemeral:
            self._path = Path(tempfile.mkdtemp(prefix="coslice-"))
            return self._path
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self._path = self._folder or Path(base) / "coslice" / self._name
        return private_directory(self._path)

    def __exit__(self, *_: object) -> None:
        if self._ephemeral:
            shutil.rmtree(self._path, ignore_errors=True)


class Sight:
    """What a process shows of itself: its HTTP pages (``--http``) and its traces (``--otlp``)."""

    def __init__(self, http: str | None, otlp: str | None, security: Security, *, service: str) -> None:
        self.board = Board() if http else None
        self._server = HttpServer(self.board, http, security) if http and self.board else None
        self.tracing = Exporting(otlp, service=service) if otlp else None

    async def start(self, stack: AsyncExitStack) -> None:
        """First of all: whoever asks while the rest starts is told so."""
        if self.tracing is not None:
            stack.push_async_callback(asyncio.to_thread, self.tracing.close)
        if self._server is not None:
            await start(stack, self._server)

    def parts(self) -> "tuple[Part, ...]":
        return () if self._server is None else (self._server,)

    def data(self) -> dict[str, str]:
        return {} if self._server is None else {"http": self._server.url}

    def text(self) -> str:
        if self._server is None or self.board is None:
            return ""
        dashboard = f"\n  dashboard: {self._server.url}/" if "/" in self.board.open else ""
        return f"{dashboard}\n  metrics: {self._server.url}/metrics"


async def start(stack: AsyncExitStack, app: Part) -> None:
    # Registered first: a start that fails half-way must be undone as well.
    stack.push_async_callback(app.stop)
    await app.start()


def run_until_signal(serve: Callable[[AsyncExitStack], Awaitable[Serving]]) -> None:
    """Until a signal, or until a part of an app breaks: then raises ``Crashed``, and the next start takes up
    what was saved. A process that lives on and serves nothing would be worse."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        files: list[Serving] = []
        reading: set[asyncio.Task[None]] = set()
        one_at_a_time = asyncio.Lock()
        await one_at_a_time.acquire()  # whatever changes while it starts is read once it serves
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
        had_terminal = _terminal()

        def hung_up() -> None:
            """By one who changed files, or because the terminal is gone: then there is none any more."""
            if had_terminal and not _terminal():
                stop.set()
            else:
                task = asyncio.ensure_future(_reload(files, one_at_a_time))
                reading.add(task)
                task.add_done_callback(reading.discard)

        loop.add_signal_handler(signal.SIGHUP, hung_up)
        async with AsyncExitStack() as stack:
            serving = asyncio.ensure_future(serve(stack))
            await _first(stop.wait(), serving)  # it may wait for another process, and a signal still ends it
            if serving.done() and not serving.cancelled():
                files.append(serving.result())
                one_at_a_time.release()
                ends = [app.wait() for app in serving.result().apps]
                await _first(stop.wait(), *ends, follow(serving.result(), one_at_a_time))
            if console.is_terminal:  # where it is a log, only log lines go
                console.print("stopping …", style="dim")

    asyncio.run(main())


async def _first(*waits: Awaitable[object]) -> None:
    """Until the first of them is over; the others are called off. Raises what that one raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


def _terminal() -> bool:
    """Does this process have a controlling terminal?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _reload(files: Sequence[Serving], one_at_a_time: asyncio.Lock) -> None:
    """``one_at_a_time`` is held while it starts."""
    async with one_at_a_time:
        changed = _reread([part for serving in files for part in serving.parts], "SIGHUP")
        if changed is None:
            return
        said = ", ".join(changed) or "token secret and certificates are as before"
        for groups in (serving.groups for serving in files if serving.groups is not None):
            try:
                done = await groups.reload()
                said += f"; {', '.join(done) or 'groups are as before'}"
            except ConfigError as error:
                log.error("SIGHUP: groups are as before: %s", error)
        log.warning("SIGHUP: read again: %s. Options and settings need a restart", said)


def _reread(parts: Sequence[Part], why: str) -> list[str] | None:
    """What changed; None: something cannot be used, which is logged, and nothing did."""
    try:
        return list(dict.fromkeys(name for part in parts for name in part.reload()))
    except (ConfigError, OSError) as error:  # a disk may be full: that ends nobody who serves
        log.error("%s: nothing is changed: %s", why, error)
        return None


async def follow(serving: Serving, one_at_a_time: asyncio.Lock, *, look_s: float = 30.0) -> None:
    """Secrets and certificates that are renewed where they are. Never returns."""
    seen: list[tuple[int, ...]] = []  # the first look reads them: they may be other than when it started
    while serving.files:
        await asyncio.sleep(look_s)  # a kubelet that replaces the files of a secret tells nobody
        if (now := await asyncio.to_thread(_marks, serving.files)) == seen:
            continue
        seen = now
        async with one_at_a_time:
            if changed := _reread(serving.parts, "files have changed"):
                log.warning("files have changed: read again: %s", ", ".join(changed))
    await asyncio.Event().wait()


def _marks(files: Sequence[str]) -> list[tuple[int, ...]]:
    """What is other once a file was replaced or written; a missing one has none."""
    marks: list[tuple[int, ...]] = []
    for file in files:
        try:
            found = os.stat(file)
            marks.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            marks.append(())
    return marks


def say(as_json: bool, data: dict[str, object], text: str) -> None:
    if as_json:
        print(json.dumps(data), flush=True)
    else:
        console.print(text, soft_wrap=True)
