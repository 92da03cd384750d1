"""What ``coslice doctor`` looks at: a machine as files, variables and a survey; so tests can build one."""

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from coslice.agent.discovery.survey import Survey


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, and something is not there."""
    WARNING = "warning"
    """May fail under circumstances."""
    PROBLEM = "problem"
    """Will fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``fix``: what to do, as a command where there is one. Problems and warnings have one."""

    check: str
    level: Level
    text: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "text": self.text, "fix": self.fix}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A process of this user."""

    pid: int
    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Machine:
    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=dict)
    survey: Survey = field(default_factory=Survey)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the installed packages that matter, by name."""
    programs: frozenset[str] = frozenset()
    """What is in the PATH."""
    uid: int = 0
    arch: str = "x86_64"
    system: str = "Linux"
    memlock: int = -1
    """``ulimit -l`` in bytes; -1: unlimited."""
    files: int = -1
    """``ulimit -n``."""
    shm: int = 0
    """Size of /dev/shm in bytes; 0: there is none."""

    @classmethod
    def here(cls) -> "Machine":
        wanted = ("cuda-bindings", "nvidia-ml-py", "torch", "httpx", "jax", "coslice")
        versions = {name: version for name in wanted if (version := _version(name))}
        return cls(
            env=dict(os.environ),
            survey=_survey(),
            packages=versions,
            programs=frozenset(name for name in ("cuda-checkpoint", "nvidia-smi") if shutil.which(name)),
            uid=os.geteuid(),
            arch=platform.machine(),
            system=platform.system(),
            memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shm=_size("/dev/shm"),
        )

    def read(self, path: str) -> str:
        """Empty where it is not there, or not ours to read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def available_memory(self) -> int:
        for line in self.read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return 0

    def processes(self) -> Iterator[Program]:
        """Those whose environment we may read, in order of pid."""
        pids = sorted(int(path.name) for path in (self.root / "proc").iterdir() if path.name.isdigit())
        for pid in pids:
            command = tuple(filter(None, self.read(f"/proc/{pid}/cmdline").split("\0")))
            pairs = (entry.partition("=") for entry in self.read(f"/proc/{pid}/environ").split("\0"))
            if command:
                env = {name: value for name, equals, value in pairs if equals}
                yield Program(pid=pid, command=command, env=env)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _size(path: str) -> int:
    try:
        return os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
    except OSError:
        return 0


def _survey() -> Survey:
    """By a helper process: a driver that hangs shall not hang us."""
    import asyncio

    from coslice.agent.discovery.surveyor import Surveyor

    async def ask() -> Survey:
        surveyor = Surveyor()
        try:
            return await surveyor.survey()
        finally:
            await surveyor.close()

    return asyncio.run(ask())
