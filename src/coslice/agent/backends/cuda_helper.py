"""The program that calls the CUDA driver, in a process of its own:
``python -m coslice.agent.backends.cuda_helper FD``.

One call at a time: a message with a ``Request`` in, one with a ``Reply`` out. Any call but a lock can hang
for ever, and then only this process hangs. It initialises CUDA itself, because without persistence mode a
restore otherwise ends the process that is restored. Decides nothing.
"""

import contextlib
import ctypes
import fcntl
import socket
import sys
import time
from typing import Any

import msgspec

from coslice.agent.backends.cuda_calls import GUARDED, UNAVAILABLE, UNKNOWN_STATE, Pair, Reply, Request, State

NEEDED = (
    "CUcheckpointLockArgs",
    "CUcheckpointRestoreArgs",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)
"""Some versions of cuda-bindings lack one or the other."""


class Unavailable(Exception):
    """This machine cannot do it; the text says what is missing."""


class Driver:
    def __init__(self) -> None:
        try:
            import cuda.bindings
            from cuda.bindings import driver
        except ImportError as error:
            raise Unavailable(
                f"cuda-bindings cannot be imported ({error}): pip install 'coslice[cuda]'"
            ) from None
        self._cuda: Any = driver
        missing = [name for name in NEEDED if not hasattr(driver, name)]
        if missing:
            raise Unavailable(
                f"cuda-bindings {cuda.bindings.__version__} lacks {', '.join(missing)}: install another "
                "version (12.9.x, or 13.4 and later)"
            )
        try:
            (code,) = driver.cuInit(0)
        except RuntimeError as error:  # no libcuda.so.1, or not a driver
            raise Unavailable(f"the CUDA driver cannot be loaded: {error}") from None
        if code != 0:
            raise Unavailable(f"the CUDA driver does not start: {self._name(code)}")

    def call(self, request: Request) -> Reply:
        began = time.monotonic()
        try:
            code, tid, state = self._do(request)
        except RuntimeError as error:  # the driver does not have this function
            raise Unavailable(f"the CUDA driver is too old: {error}") from None
        if state == UNKNOWN_STATE and (code or request.verify):
            state = self._state(request.pid)
        return Reply(
            code=int(code),
            name=self._name(code),
            state=state,
            tid=tid,
            began=began,
            seconds=time.monotonic() - began,
        )

    def _do(self, request: Request) -> tuple[Any, int, int]:
        """Result code, thread id, state."""
        cuda, pid = self._cuda, request.pid
        match request.action:
            case "state":
                try:
                    code, state = cuda.cuCheckpointProcessGetState(pid)
                except ValueError:  # a state that these bindings do not know
                    return 0, 0, UNKNOWN_STATE
                return code, 0, UNKNOWN_STATE if code else int(state)
            case "tid":
                code, tid = cuda.cuCheckpointProcessGetRestoreThreadId(pid)
                return code, 0 if code else int(tid), UNKNOWN_STATE
            case "lock":
                arguments = cuda.CUcheckpointLockArgs()
                arguments.timeoutMs = request.timeout_ms
                (code,) = cuda.cuCheckpointProcessLock(pid, arguments)
            case "checkpoint":
                (code,) = cuda.cuCheckpointProcessCheckpoint(pid, None)
            case "restore":
                (code,) = cuda.cuCheckpointProcessRestore(pid, self._restore_arguments(request.pairs))
            case "unlock":
                (code,) = cuda.cuCheckpointProcessUnlock(pid, None)
            case other:
                raise AssertionError(other)
        return code, 0, UNKNOWN_STATE

    def _restore_arguments(self, pairs: tuple[Pair, ...]) -> Any:
        if not pairs:
            return None
        cuda = self._cuda
        if not hasattr(cuda.CUcheckpointRestoreArgs, "gpuPairs"):
            raise Unavailable("this cuda-bindings cannot restore onto other devices: install 13.4 or later")
        arguments, made = cuda.CUcheckpointRestoreArgs(), []
        for old, new in pairs:
            pair = cuda.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
            made.append(pair)
        arguments.gpuPairs, arguments.gpuPairsCount = made, len(made)
        return arguments

    def _uuid(self, text: str) -> Any:
        value = self._cuda.CUuuid()
        data = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
        ctypes.memmove(value.getPtr(), data, 16)  # the bindings only read it
        return value

    def _state(self, pid: int) -> int:
        try:
            code, state = self._cuda.cuCheckpointProcessGetState(pid)
        except ValueError:  # one that these bindings do not know
            return UNKNOWN_STATE
        return UNKNOWN_STATE if code else State(int(state)).value

    def _name(self, code: Any) -> str:
        if int(code) == 0:
            return ""
        failed, name = self._cuda.cuGetErrorName(code)
        return f"CUDA error {int(code)}" if failed else name.decode()


def _guarded(driver: Driver, request: Request) -> Reply:
    if not request.guard:
        return driver.call(request)
    with open(request.guard, "w") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Reply(code=GUARDED)
        return driver.call(request)


def serve(channel: socket.socket) -> None:
    decode, encode = msgspec.json.Decoder(Request).decode, msgspec.json.Encoder().encode
    driver: Driver | None = None
    while message := channel.recv(1 << 16):
        try:
            driver = driver or Driver()
            request = decode(message)
            reply = Reply() if request.action == "hello" else _guarded(driver, request)
        except Unavailable as error:
            reply = Reply(code=UNAVAILABLE, name=str(error))
        except (
            Exception
        ) as error:  # the bindings', such as a state that they do not know: the next call may do
            reply = Reply(code=UNAVAILABLE, name=f"cuda-bindings failed: {error!r}")
        channel.send(encode(reply))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(OSError):
        serve(channel)


if __name__ == "__main__":
    main()
