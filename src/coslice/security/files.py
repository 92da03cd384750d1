"""Files and folders that are ours alone: modes 0600 and 0700, links not followed, another user's refused.

State, journals and sockets lie in folders that others may write to (/tmp is one): whoever puts a link or a
file of his own in our place must not make us write where he wants, or read what he wrote.
"""

import os
import stat
from pathlib import Path

from coslice.errors import ConfigError

_OTHERS = 0o027
"""Mode bits that a secret must not have. Its group may read: that is how secrets are mounted into pods."""


def private_directory(path: str | Path) -> Path:
    """Made if need be, mode 0700. Raises ``ConfigError`` for a link, a file or another user's folder."""
    directory = Path(path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(directory)
        if stat.S_ISLNK(found.st_mode):
            raise ConfigError(
                f"{directory} is a link, and links are not followed here: name the folder itself"
            )
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{directory} is not a folder: choose another")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{directory} belongs to user {found.st_uid} and we are user {os.geteuid()}: choose another"
            )
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot use {directory}: {error.strerror}; choose another folder") from None
    return directory


def open_private(path: str | Path, flags: int) -> int:
    """A descriptor of a regular file of ours, made with mode 0600 if need be.

    Raises ``OSError`` as open(2) does, ``ConfigError`` for a link, a device or another user's file.
    """
    if os.path.islink(path):
        raise ConfigError(f"{path} is a link, and links are not followed here: name the file itself")
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no plain file: choose another place")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to user {found.st_uid} and we are user {os.geteuid()}: move it away or "
                "choose another place"
            )
        os.fchmod(fd, 0o600)  # it may be older than our umask
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_secret(path: str | Path, what: str) -> bytes:
    """A secret's content (links are fine: pods have them). ``ConfigError`` if others may read it."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path} ({error.strerror})") from None
    if found.st_mode & _OTHERS or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"the {what} {path} can be read or changed by others (mode {stat.S_IMODE(found.st_mode):04o}, "
            f"owner {found.st_uid}): chmod 600 it, and let it belong to user {os.geteuid()}"
        )
    return content


def read_pem(path: str) -> bytes:
    """A file of certificates. Raises ``ConfigError``."""
    try:
        with open(path, "rb") as file:
            content = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"cannot read the certificate {path}: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError(f"{path} holds no certificate in PEM format")
    return content


def write_secret(path: str | Path, content: bytes) -> None:
    """A new file, mode 0600. Raises ``ConfigError`` if there is one already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: remove it, or name another file") from None
    except OSError as error:  # not "PATH: why": from the name of a secret on that would be hidden
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None
    with os.fdopen(fd, "wb") as file:
        file.write(content)
