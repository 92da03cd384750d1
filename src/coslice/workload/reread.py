"""Where dropped bytes are read again: safetensors and torch files, or a function of the user's.

Pieces are known by their content (size and SHA-256), never by name: prefixes that wrappers add do not matter,
a file that changed has other content, and nothing is unpickled. Called by the base of the torch adapter in
the mover's thread. Read with pread(2), not mapped: a file cut short is an error and not a bus error.
"""

import ctypes
import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coslice.errors import ConfigError, OperationFailed
from coslice.workload import copying

CHUNK = 16 << 20
_HEADER_MOST = 100 << 20
"""Safetensors' own limit for its header."""
_LOCAL = struct.Struct("<26xHH")
"""Of a zip's local header: 26 bytes, then the lengths of name and extra field."""
T = TypeVar("T")
R = TypeVar("R")
Loader = Callable[[], Any]
"""Returns tensors: a mapping of names, or an iterable of tensors or of (name, tensor)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``size`` bytes from ``offset`` of a file: one tensor's, as they are in memory."""

    path: str
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        """Raises ``OperationFailed`` for a file that cannot be read, or ends before."""
        with _opened(self.path) as file:
            for at in range(0, self.size, CHUNK):
                wanted = min(CHUNK, self.size - at)
                if len(data := os.pread(file.fileno(), wanted, self.offset + at)) != wanted:
                    raise OperationFailed(f"{self.path} ends before byte {self.offset + at + wanted}")
                yield data

    def read_into(self, address: int) -> None:
        with _opened(self.path) as file:
            for at in range(0, self.size, CHUNK):
                wanted = min(CHUNK, self.size - at)
                target = (ctypes.c_char * wanted).from_address(address + at)
                if os.preadv(file.fileno(), [target], self.offset + at) != wanted:
                    raise OperationFailed(f"{self.path} ends before byte {self.offset + at + wanted}")

    def digest(self) -> bytes:
        total = hashlib.sha256()
        for data in self.chunks():
            total.update(data)
        return total.digest()


def paths_of(given: Any) -> tuple[str, ...]:
    """A path, or several; a folder stands for the weights in it. Raises ``ConfigError``."""
    found: list[str] = []
    for each in [given] if isinstance(given, str | os.PathLike) else list(given):
        path = Path(os.path.abspath(each))
        inside = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin")) if path.is_dir() else [path]
        found += map(str, inside)
    if missing := [path for path in found if not os.path.isfile(path)]:
        raise ConfigError(f"reread: there is no file {missing[0]}")
    if not found:
        raise ConfigError(f"reread: no weights (*.safetensors, *.bin) in {given}")
    return tuple(found)


def entries(path: str) -> list[Entry]:
    """The tensors' bytes in a file; raises ``ConfigError`` for one of another kind."""
    try:
        with _opened(path) as file:
            head = file.read(8)
            if head[:2] == b"PK":
                return _torch_entries(path)
            return _safetensors_entries(path, head, file.read(_HEADER_MOST))
    except (ValueError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} is neither a safetensors file nor one of torch.save ({error}): pass reread= a function "
            "that returns the tensors"
        ) from None


def index(paths: Sequence[str], sizes: Collection[int]) -> dict[bytes, Entry]:
    """By digest, what the files have of pieces of these sizes. Reads all of that."""
    found = [entry for path in paths for entry in entries(path) if entry.size in sizes]
    return dict(zip(in_parallel(Entry.digest, found), found, strict=True))


def loaded_by(loader: Loader) -> Iterator[Any]:
    """The tensors that it returns, one by one; its own error is told as ``OperationFailed``."""
    try:
        given = loader()
        for each in given.values() if isinstance(given, Mapping) else given:
            yield each[1] if isinstance(each, tuple) else each
    except BaseException as error:
        if isinstance(error, GeneratorExit):
            raise
        raise OperationFailed(
            f"reread raised {type(error).__name__}: {error}: an error of the job's own"
        ) from error


def digest_at(address: int, size: int) -> bytes:
    return hashlib.sha256((ctypes.c_char * size).from_address(address)).digest()


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """In their order, on as many threads as copies get (and on this thread's cores)."""
    listed = list(items)
    if len(listed) < 2 or copying.threads() < 2:
        return [function(each) for each in listed]
    with ThreadPoolExecutor(copying.threads(), thread_name_prefix="coslice-read") as pool:
        return list(pool.map(function, listed))


def _opened(path: str) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OperationFailed(f"{path} cannot be read again ({error.strerror})") from None


def _safetensors_entries(path: str, head: bytes, rest: bytes) -> list[Entry]:
    """Eight bytes of length, so many bytes of JSON, then the tensors (the format's own description)."""
    (length,) = struct.unpack("<Q", head)
    if length > len(rest):
        raise ValueError("its header is longer than the file")
    described = json.loads(rest[:length])
    spans = [about["data_offsets"] for name, about in described.items() if name != "__metadata__"]
    return [Entry(path, 8 + length + int(begin), int(end) - int(begin)) for begin, end in spans]


def _torch_entries(path: str) -> list[Entry]:
    """The storages of a file of ``torch.save``: a zip whose members are not compressed."""
    found = []
    with zipfile.ZipFile(path) as archive, _opened(path) as file:
        for member in archive.infolist():
            if "/data/" in member.filename and member.compress_type == zipfile.ZIP_STORED:
                name, extra = _LOCAL.unpack(os.pread(file.fileno(), _LOCAL.size, member.header_offset))
                at = member.header_offset + _LOCAL.size + name + extra
                found.append(Entry(path, at, member.file_size))
    return found
