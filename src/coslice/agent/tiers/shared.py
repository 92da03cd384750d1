"""Copies of frozen weights that processes of this node share: sealed memory files, by digest of content.

A process makes one and hands it over; others that name the same digest get it. All processes that register
are of one user (the registry sees to it), a sealed file can be changed by nobody, and who takes one compares
it with its own weights, so a wrong one harms nobody. Nothing here knows budgets; ``tiers.host`` counts them.
"""

import fcntl
import os
import re
from dataclasses import dataclass, field

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class NotShareable(Exception):
    """What was handed over is no sealed memory file of the size that was said."""


@dataclass(slots=True)
class _Shared:
    fd: int
    size: int
    users: set[str] = field(default_factory=set)


class SharedFiles:
    """``users`` are names of members' buffers. A file lives as long as it has a user."""

    def __init__(self) -> None:
        self._files: dict[str, _Shared] = {}

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self._files.values())

    def __contains__(self, digest: str) -> bool:
        return digest in self._files

    def use(self, digest: str, size: int, user: str) -> int | None:
        """Its descriptor; None: nobody has made it. Raises ``NotShareable``."""
        check_digest(digest)
        file = self._files.get(digest)
        if file is None:
            return None
        if file.size != size:
            raise NotShareable(f"under this digest there are {file.size} bytes, not {size}")
        file.users.add(user)
        return file.fd

    def add(self, digest: str, fd: int, size: int, user: str) -> None:
        """Owns ``fd`` from here on. The digest is new."""
        self._files[digest] = _Shared(fd, size, {user})

    def leave(self, user: str, only: str = "") -> None:
        """``only``: this digest; empty: all."""
        for digest, file in list(self._files.items()):
            if only in ("", digest):
                file.users.discard(user)
            if not file.users:
                os.close(self._files.pop(digest).fd)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()


def check_digest(digest: str) -> None:
    """Raises ``NotShareable``."""
    if not _DIGEST.fullmatch(digest):
        raise NotShareable("a digest is 64 hexadecimal digits")


def check_sealed(fd: int, size: int) -> None:
    """Raises ``NotShareable``."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NotShareable("it is no memory file") from None
    status = os.fstat(fd)
    if seals & _SEALS != _SEALS or status.st_size != size or status.st_uid != os.getuid():
        raise NotShareable(f"it is not a sealed memory file of {size} bytes of this user")
