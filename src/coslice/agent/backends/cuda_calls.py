"""Calls of the CUDA checkpoint API as values, and what their results mean. Both ways to make them
(``cuda_pool``, ``cuda_binary``) and the helper program speak in these.

Source of names, codes and states: the CUDA driver API's header and reference, "Checkpointing".
"""

from enum import IntEnum
from typing import Literal, Protocol

from msgspec import Struct

Action = Literal["hello", "state", "tid", "lock", "checkpoint", "restore", "unlock"]
Pair = tuple[str, str]
"""UUID of a device when it was checkpointed, and of the one to restore to."""

OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_FOUND, NOT_READY, NOT_SUPPORTED = 304, 401, 500, 600, 801
UNAVAILABLE = -1
"""Ours: there is no driver to call, or it lacks the function."""
GUARDED = -2
"""Ours: another call on the process is under way, perhaps of an agent that has ended."""
UNKNOWN_STATE = -1


class State(IntEnum):
    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class Request(Struct, frozen=True, kw_only=True):
    action: Action
    pid: int = 0
    timeout_ms: int = 0
    """Of a lock; 0 would be for ever, and is not used."""
    pairs: tuple[Pair, ...] = ()
    verify: bool = False
    """Read the state afterwards, also if all went well."""
    guard: str = ""
    """A file that is locked during the call: no two calls on one process, not even of two agent instances."""


class Reply(Struct, frozen=True, kw_only=True):
    code: int = OK
    name: str = ""
    """Of an error: the driver's name for it, or what is missing here."""
    state: int = UNKNOWN_STATE
    """Read after the call, if it failed or ``verify`` was set."""
    tid: int = 0
    began: float = 0.0
    seconds: float = 0.0
    """Spent in the driver, since ``began`` on the clock that all processes share (CLOCK_MONOTONIC)."""


class CallHangs(Exception):
    """A driver call did not return in time. It may yet, and nothing may be asked about the process before."""

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


class CallBroke(Exception):
    """Whoever made the call died in it. What has become of the process, only its state says."""


class Calls(Protocol):
    """A way to make calls. Each runs in a process of its own, so any number at once."""

    async def call(self, request: Request, *, deadline: float) -> Reply:
        """Raises ``CallHangs`` after ``deadline`` seconds, or if an earlier call on the pid still hangs, and
        ``CallBroke``. Cancelled, the call goes on, and counts as hanging until it is over."""
        ...

    async def warm(self, calls: int) -> None:
        """Be ready to make so many calls at once."""
        ...

    def hanging(self, pid: int) -> bool:
        """Is a call for it under way that nobody waits for, ours or an earlier agent's?"""
        ...

    async def close(self) -> None: ...


class UsableError(Exception):
    """This backend cannot work here; the text says why and what to do."""


def meaning(action: Action, code: int, name: str) -> str:
    """An error in words, with the remedy."""
    what = name if code == UNAVAILABLE else f"{name or 'CUDA error'} ({code})"
    why = _MEANINGS.get((action, code)) or _MEANINGS.get(("", code), "")
    return f"{what}: {why}" if why else what


_UNSUPPORTED = (
    "the driver cannot checkpoint this process. Known causes: managed memory (cudaMallocManaged: use device "
    "memory), CUDA IPC before driver 610 (start it under cuda-checkpoint --launch-job, or use another "
    "backend), a profiler or CUPTI client (stop it), MPS or MIG (turn it off), arm64 (not implemented there)"
)
_MEANINGS: dict[tuple[str, int], str] = {
    ("checkpoint", NOT_SUPPORTED): _UNSUPPORTED,
    ("", NOT_SUPPORTED): _UNSUPPORTED,
    ("", NOT_FOUND): "the driver is too old for checkpoints: 570 or later is needed",
    ("lock", NOT_READY): "the process did not finish its work on the device in time",
    ("checkpoint", OUT_OF_MEMORY): (
        "no host memory for the copy of its device memory, or the device is in MIG mode: give the job's "
        "cgroup and the node more memory, turn MIG off"
    ),
    ("restore", OUT_OF_MEMORY): "the device was full; the driver does not recover from this",
    ("", NOT_INITIALIZED): "it does not use CUDA (yet)",
    ("", OPERATING_SYSTEM): (
        "the driver cannot reach the process: run the agent as root or with CAP_SYS_PTRACE, in the node's "
        "pid namespace (hostPID), without hidepid on /proc; or the process is dying"
    ),
    ("", ILLEGAL_STATE): "it is not in the state for that",
    ("", INVALID_VALUE): "the process is gone, or is one of several that can only move together",
}
