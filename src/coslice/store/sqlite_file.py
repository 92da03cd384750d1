"""Opening the file of ``SqliteStore``: whose it is, whether it is whole, which schema it has. Nothing of
another's file is changed before that is known."""

import os
import sqlite3
from pathlib import Path

from coslice.errors import ConfigError
from coslice.security.files import open_private

APPLICATION_ID = 0x636F736C  # "cosl", in the file's header
SCHEMA = 1
_LOG_BYTES = 4 << 20  # what the log holds before SQLite writes it back (wal_autocheckpoint, 1000 pages)

# Not WITHOUT ROWID (as files of before are, and may stay): there a value of more than a quarter of a page has
# pages of its own, and a group's passes that size to and fro with each turn: three pages a commit, not one.
CREATE = f"""
BEGIN IMMEDIATE;
CREATE TABLE state (key TEXT NOT NULL PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA};
COMMIT;
"""


def open_file(path: Path, max_pages: int | None = None, *, flush: bool = True) -> sqlite3.Connection:
    """The caller owns the path already (``Ownership``). Raises ``ConfigError`` saying what is wrong with
    the file."""
    try:
        os.close(open_private(path, os.O_RDWR))
        db = sqlite3.connect(
            path, timeout=0, isolation_level=None, cached_statements=256, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"cannot open the store {path}: {error}") from error
    try:
        _prepare(path, db, flush=flush)
        if max_pages is not None:
            db.execute(f"PRAGMA max_page_count = {max_pages:d}")
    except sqlite3.Error as error:
        db.close()
        raise _explained(path, error) from error
    except BaseException:
        db.close()
        raise
    return db


def _prepare(path: Path, db: sqlite3.Connection, *, flush: bool) -> None:
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    (objects,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    new = not objects and not application
    if not new:
        _check_ours(path, db, application, schema)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
    if new:
        db.executescript(CREATE)
    if flush:
        _grow_log(db)


def _grow_log(db: sqlite3.Connection) -> None:
    """Give the write-ahead log its size once, so that a commit overwrites it in place.

    A commit that makes the file longer flushes the file system's own journal too, and takes nearly twice as
    long. A transaction that is larger than the page cache spills into the log; rolled back, it leaves nothing
    but the length.
    """
    (cache,) = db.execute("PRAGMA cache_size").fetchone()
    db.execute("PRAGMA cache_size = 8")
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO state (key, version, value) VALUES ('', 0, zeroblob(?))", (_LOG_BYTES,))
    db.execute("ROLLBACK")
    db.execute(f"PRAGMA cache_size = {cache:d}")


def _check_ours(path: Path, db: sqlite3.Connection, application: int, schema: int) -> None:
    if application != APPLICATION_ID:
        raise ConfigError(f"{path} is an SQLite file of another program: give the store a path of its own")
    if schema != SCHEMA:
        raise ConfigError(
            f"{path} has schema {schema} and this version of coslice knows {SCHEMA}: "
            "use the coslice that wrote it, or start with a new file"
        )
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, str(verdict))


def _damaged(path: Path, how: str) -> ConfigError:
    return ConfigError(
        f"the store {path} is damaged ({how}): move it away and start with a new one; "
        "agents report their epochs, so old leases stay fenced"
    )


def _explained(path: Path, error: sqlite3.Error) -> ConfigError:
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_NOTADB":
        return ConfigError(f"{path} is not an SQLite file: give the store a path of its own")
    if name.startswith("SQLITE_CORRUPT"):
        return _damaged(path, str(error))
    if name.startswith("SQLITE_BUSY"):
        return ConfigError(f"{path} is held open by another program: close it first")
    return ConfigError(f"cannot open the store {path}: {error}")
