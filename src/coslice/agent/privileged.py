"""The one place of the agent that starts programs. Nothing in the agent's own process loads a device driver.

A driver call can hang for ever, and a crash in a driver takes its process along: so drivers are loaded by
**helpers**, small programs of ours (``python -m coslice.agent.…``) that answer one message at a time over a
socket of their own. The agent awaits answers with a deadline and goes on without a helper that does not come
back. A helper is never killed in the middle of a call, because that can leave the driver in disorder: it sees
the end of its socket and ends when its call has.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MESSAGE_MAX = 4 << 20


class HelperGone(Exception):
    """The helper ended (or could not be started) instead of answering; the text has its last words."""


class Helper:
    """One helper process. Make it inside a running loop. ``ask`` one thing at a time."""

    def __init__(self, module: str, *, heard: Callable[[bytes], bytes | None] | None = None) -> None:
        """``heard`` sees every message first and returns it if it is the answer to ``ask``."""
        self.module = module
        self._loop = asyncio.get_running_loop()
        self._heard = heard or (lambda message: message)
        self._answer: asyncio.Future[bytes] | None = None
        self.ended = asyncio.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.memfd_create("coslice-helper-errors", os.MFD_CLOEXEC)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_MAX)
            # A session of its own: Ctrl-C is for the agent, which lets its helpers finish.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        self._socket = ours
        ours.setblocking(False)
        self._loop.add_reader(ours, self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        return self._answer is not None

    async def ask(self, message: bytes) -> bytes:
        """Raises ``HelperGone``. A cancelled ``ask`` leaves the helper busy until its answer is in."""
        if self.ended.is_set():
            raise HelperGone(self._last_words())
        assert self._answer is None, "one question at a time"
        answer = self._answer = self._loop.create_future()
        try:
            self._socket.send(message)
        except OSError as error:
            self._end(str(error))
        try:
            return await asyncio.shield(answer)
        finally:
            if not answer.done():
                answer.add_done_callback(_consumed)

    async def idle(self) -> None:
        """Until nothing is asked of it any more, or it has ended."""
        if self._answer is not None:
            with contextlib.suppress(HelperGone):
                await asyncio.shield(self._answer)

    def close(self) -> None:
        """Let it end: at once if it is idle, after its call if not."""
        self._end("closed")

    def _readable(self) -> None:
        try:
            message = self._socket.recv(MESSAGE_MAX)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._end("")
        elif (answer := self._heard(message)) is not None and self._answer is not None:
            waiting, self._answer = self._answer, None
            waiting.set_result(answer)

    def _end(self, why: str) -> None:
        if self.ended.is_set():
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.ended.set()
        if self._answer is not None:
            waiting, self._answer = self._answer, None
            waiting.set_exception(HelperGone(why or self._last_words()))
            waiting.add_done_callback(_consumed)
        self._reap()

    def _reap(self) -> None:
        """It ends on its own now. Wait for it without a thread: a pidfd is readable when it has."""
        if self._process.poll() is not None:
            return self._close_errors()
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.poll()
            return self._close_errors()

        def ended() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self._process.poll()
            self._close_errors()

        self._loop.add_reader(pidfd, ended)
        return None

    def _close_errors(self) -> None:
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def _last_words(self) -> str:
        words = b""
        if self._errors >= 0:
            words = os.pread(self._errors, 4096, max(0, os.fstat(self._errors).st_size - 4096))
        text = words.decode(errors="replace").strip().splitlines()
        code = self._process.poll()
        how = f"the helper {self.module.rpartition('.')[2]} (pid {self.pid}) ended"
        if code is not None and code < 0:
            how += f" by signal {-code}"
        return f"{how}: {text[-1]}" if text else how


def _consumed(answer: "asyncio.Future[bytes]") -> None:
    if not answer.cancelled():
        answer.exception()  # whoever asked has gone; it has been seen


@dataclass(frozen=True)
class Ended:
    """A program that ran to its end."""

    code: int
    out: str
    err: str


async def run_program(command: Sequence[str | Path], *, keep: Sequence[int] = ()) -> Ended:
    """Run a program to its end, however long that takes; raises ``OSError`` if it cannot be started.

    ``keep``: descriptors that it inherits.

    Cancelled, it leaves the program to end by itself, and reaps it.
    """
    with contextlib.ExitStack() as stack:
        # Not pipes: who writes to one whose reader was killed is killed by it, in the middle of its work.
        out, err = stack.enter_context(_spool("out")), stack.enter_context(_spool("err"))
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=keep,
            start_new_session=True,
        )
        whole = asyncio.ensure_future(_ended(process, out, err, stack.pop_all()))
    _running.add(whole)
    whole.add_done_callback(_running.discard)
    return await asyncio.shield(whole)


async def _ended(
    process: asyncio.subprocess.Process, out: int, err: int, files: contextlib.ExitStack
) -> Ended:
    with files:
        code = await process.wait()
        return Ended(code, *(os.pread(fd, MESSAGE_MAX, 0).decode(errors="replace") for fd in (out, err)))


@contextlib.contextmanager
def _spool(name: str) -> Iterator[int]:
    fd = os.memfd_create(f"coslice-program-{name}", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


_running: set["asyncio.Future[Ended]"] = set()
