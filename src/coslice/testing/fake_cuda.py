"""A node with imaginary GPUs: builds the fake driver libraries with gcc and controls what they do.

The real ``cuda-bindings`` and ``nvidia-ml-py`` run against them: what is faked is the driver below our code,
at its C interface (``tests/fakes/fake.h`` says how). Used by the tests, by ``coslice bench swap`` and by
``benchmarks/gpu_check.py``; needs a source checkout and gcc.

    node = FakeNode(tmp_path, devices=2, capacity=64 << 20)
    subprocess.Popen([...], env=node.environment())
    node.fault("checkpoint", pid, "error", 2, count=1)
"""

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<Q40xIIQQ")  # magic, the mutex, changed, poisonings, random, calls
_SLOT = struct.Struct("<iiQiiiiiiiii16i4x16Q16Q")
_SLOTS, _DEVICES = 64, 16
STATES = ("running", "locked", "checkpointed", "failed")


class CannotBuild(RuntimeError):
    """The fakes are not to be had here; the text says why."""


def sources() -> Path:
    """Where the C sources are; raises ``CannotBuild`` outside a source checkout."""
    folder = Path(__file__).resolve().parents[3] / "tests" / "fakes"
    if not (folder / "cuda.c").is_file():
        raise CannotBuild(
            "the fake driver is built from tests/fakes of a source checkout, which is not here: "
            "clone the repository and install it with pip install -e"
        )
    return folder


def build(folder: Path) -> Path:
    """Compile the fakes into ``folder``, unless they are there and up to date; raises ``CannotBuild``."""
    compiler, code = shutil.which("gcc"), sources()
    if compiler is None:
        raise CannotBuild("the fake driver is built with gcc, which is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("-O2", "-Wall", "-Wextra", "-pthread")
    for source, name in (("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        shared = ("-shared", "-fPIC", f"-Wl,-soname,{name}")
        _compile([compiler, *flags, *shared, str(code / source)], folder / name)
    program = [compiler, *flags, str(code / "cuda_checkpoint.c"), str(folder / "libcuda.so.1")]
    _compile(program, folder / "cuda-checkpoint")
    return folder


def _compile(command: list[str], target: Path) -> None:
    newest = max(source.stat().st_mtime for source in sources().glob("*.[ch]"))
    if target.exists() and target.stat().st_mtime > newest:
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:  # several may build at once
        made = Path(scratch) / target.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"gcc could not build {target.name}: {done.stderr.strip()}")
        made.replace(target)


def uuid(device: int) -> str:
    """The UUID of a fake device, as NVML writes it."""
    text = (b"coslice-fake" + b"\0\0\0" + bytes([device])).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@dataclass(frozen=True)
class Slot:
    """One process as the fake driver knows it."""

    pid: int
    state: str
    working: bool
    """One of its calls is in the driver now."""
    poisoned: bool
    bytes: tuple[int, ...]
    """On each device now."""


@dataclass(frozen=True)
class Call:
    """One call of the checkpoint API. ``code`` is None while it has not returned."""

    at_us: int
    caller: int
    op: str
    pid: int
    code: int | None


class FakeNode:
    """``folder`` is the node's state; the libraries are in ``libraries`` (built if need be)."""

    def __init__(self, folder: Path, *, libraries: Path | None = None, **config: object) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.libraries = build(libraries or folder / "lib")
        self._config: dict[str, object] = {}
        self.configure(**config)

    @property
    def binary(self) -> Path:
        return self.libraries / "cuda-checkpoint"

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """``base`` (this process's environment) plus what makes a program find the fakes."""
        values = dict(os.environ if base is None else base)
        path = [str(self.libraries), *filter(None, [values.get("LD_LIBRARY_PATH")])]
        return values | {"LD_LIBRARY_PATH": ":".join(path), "COSLICE_FAKE_CUDA": str(self.folder)}

    def configure(self, **config: object) -> None:
        """Keys of ``config`` in fake.h: ``devices``, ``capacity``, ``driver``, ``mig``, …; also per device
        (``capacity_1=...``)."""
        self._config |= config
        lines = []
        for key, value in self._config.items():
            name, _, device = key.rpartition("_")
            lines.append(f"{name}.{device}={value}" if name and device.isdigit() else f"{key}={value}")
        self._write("config", "".join(f"{line}\n" for line in lines))

    def fault(
        self, op: str, pid: int | None, kind: str, arg: int | None = None, *, count: int | None = None
    ) -> None:
        """Have calls ``op`` on ``pid`` (None: any) go wrong from now on, ``count`` times (None: always)."""
        if count is not None and arg is None:
            arg = 0
        words = [op, "*" if pid is None else pid, kind, arg, count]
        line = " ".join(str(word) for word in words if word is not None)
        path = self.folder / "faults"
        self._write("faults", (path.read_text() if path.exists() else "") + f"{line}\n")

    def heal(self) -> None:
        """No faults any more. What hangs goes on hanging."""
        (self.folder / "faults").unlink(missing_ok=True)

    def release(self) -> None:
        """Let go whatever hangs, now and later."""
        (self.folder / "release").touch()

    def idle(self) -> None:
        """Let all work on the devices end, now and later."""
        (self.folder / "idle").touch()

    def xid(self, device: int, code: int) -> None:
        with (self.folder / "xid").open("a") as file:
            file.write(f"{device} {code}\n")

    def calls(self, op: str | None = None, pid: int | None = None) -> Sequence[Call]:
        """The checkpoint calls so far, begun ones included."""
        path = self.folder / "log"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            words = line.split()
            code = int(words[4]) if len(words) > 4 else None
            found.append(Call(int(words[0]), int(words[1]), words[2], int(words[3]), code))
        return [c for c in found if op in (None, c.op) and pid in (None, c.pid)]

    def slots(self) -> dict[int, Slot]:
        """The processes that the driver knows, by pid. Ended ones may still be listed."""
        path = self.folder / "shm"
        data = path.read_bytes() if path.exists() else b""
        found = {}
        for index in range(_SLOTS if data else 0):
            fields = _SLOT.unpack_from(data, _HEADER.size + index * _SLOT.size)
            pid, state, poisoned = fields[0], fields[3], fields[6]
            if pid:
                on_device = fields[12 + _DEVICES : 12 + 2 * _DEVICES]
                found[pid] = Slot(pid, STATES[state], fields[5] > 0, bool(poisoned), tuple(on_device))
        return found

    @property
    def poisonings(self) -> int:
        """How many processes were ever destroyed by a restore."""
        path = self.folder / "shm"
        return 0 if not path.exists() else int(_HEADER.unpack_from(path.read_bytes(), 0)[2])

    def _write(self, name: str, text: str) -> None:
        scratch = self.folder / f".{name}"
        scratch.write_text(text)
        scratch.replace(self.folder / name)
