"""Copies of what a store holds: a file that is written whole or not at all, and read only when it is whole.

A backup is an SQLite file with the table of ``sqlite_file`` and no log beside it, whatever the store was; so
it can be restored into any. It holds values, not versions: those are of the store they were written in.
SQLite keeps no checksums, so a digest of all values is beside them.
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from coslice.errors import ConfigError
from coslice.security.files import open_private
from coslice.store.base import Store
from coslice.store.sqlite_file import APPLICATION_ID, CREATE, SCHEMA

Values = dict[str, bytes]
DIGEST = "CREATE TABLE digest (sha256 BLOB NOT NULL)"


def write_backup(path: Path, values: Mapping[str, bytes], *, force: bool) -> None:
    """Mode 0600. Raises ``ConfigError`` if there is a file already (unless ``force``), or it cannot be
    written; then nothing of it is left."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already: choose another file, or say --force")
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            raise ConfigError(f"{path} is no plain file, and would be replaced by one: choose another")
        os.close(open_private(part, os.O_RDWR | os.O_EXCL))
        with closing(sqlite3.connect(part, isolation_level=None)) as db:
            db.executescript(CREATE)
            rows = ((key, number, value) for number, (key, value) in enumerate(sorted(values.items()), 1))
            db.execute("BEGIN")
            db.executemany("INSERT INTO state (key, version, value) VALUES (?, ?, ?)", rows)
            db.execute(DIGEST)
            db.execute("INSERT INTO digest (sha256) VALUES (?)", (_digest(values),))
            db.execute("COMMIT")  # flushed: synchronous is FULL unless somebody says otherwise
        part.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write the backup {path}: {error.strerror}: name another file") from error
    except sqlite3.Error as error:
        raise ConfigError(f"cannot write the backup {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _digest(values: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for key, value in sorted(values.items()):
        for part in (key.encode(), value):
            digest.update(len(part).to_bytes(8))
            digest.update(part)
    return digest.digest()


def _flush_folder(folder: Path) -> None:
    """So that the new name, too, survives a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_backup(path: Path) -> Values:
    """Raises ``ConfigError`` for what is no backup, is damaged, or was written by a newer coslice."""
    if not path.is_file():
        raise ConfigError(f"there is no backup {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise ConfigError(f"{path} is no backup of coslice: `coslice store backup` writes them")
            if schema > SCHEMA:
                raise ConfigError(
                    f"the backup {path} has file format {schema} and this coslice knows up to {SCHEMA}: "
                    "restore it with the newer coslice that wrote it"
                )
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise _damaged(path, verdict)
            values = dict(db.execute("SELECT key, value FROM state ORDER BY key").fetchall())
            # A file of an older coslice has none.
            signed = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digest'").fetchone()
            if signed and db.execute("SELECT sha256 FROM digest").fetchall() != [(_digest(values),)]:
                raise _damaged(path, "its content is not what was written")
            return values
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise ConfigError(
                f"{path} is no backup of coslice: `coslice store backup` writes them"
            ) from error
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, how: str) -> ConfigError:
    return ConfigError(f"the backup {path} is damaged or cut short ({how}): use another one")


async def put_back(store: Store, values: Mapping[str, bytes], *, force: bool) -> int:
    """Make the store hold these values and no others; returns how many were there before. The caller alone
    writes it.

    Raises ``ConfigError`` if it holds anything (unless ``force``). Interrupted, it is to be repeated.
    """
    there = await store.load()
    if there and not force:
        some = ", ".join([*there][:3]) + (", …" if len(there) > 3 else "")
        raise ConfigError(
            f"the store is not empty ({some}): make a backup of it first, then say --force to replace it"
        )
    writes = [store.save(key, value, expect=there.get(key, (b"", 0))[1]) for key, value in values.items()]
    deletes = [store.delete(key, expect=there[key][1]) for key in there if key not in values]
    await asyncio.gather(*writes, *deletes)
    return len(there)
