"""A survey: what NVML says of this node's devices at one moment. Plain values; who takes it is ``nvml``.

No information is not the same as idle: a survey that failed has ``error`` set and no devices.
"""

from collections.abc import Iterable

from msgspec import Struct


class Holder(Struct, frozen=True, kw_only=True):
    """A process on a device. ``bytes`` is None where the driver does not tell; 0: it looked, and made no
    context."""

    pid: int
    bytes: int | None = None


class Gpu(Struct, frozen=True, kw_only=True):
    index: int
    uuid: str
    """As NVML writes it: ``GPU-xxxxxxxx-…``."""
    name: str = ""
    total: int = 0
    used: int = 0
    free: int = 0
    persistence: bool | None = None
    """None: the driver does not tell."""
    mig: bool = False
    ecc_uncorrected: int | None = None
    mps_clients: tuple[int, ...] = ()
    holders: tuple[Holder, ...] = ()


class Survey(Struct, frozen=True, kw_only=True):
    driver: str = ""
    """Version of the kernel driver, for example ``580.95.05``."""
    cuda: int = 0
    """Highest version of the driver API, for example 13000 for 13.0."""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""

    @property
    def driver_version(self) -> tuple[int, ...]:
        parts = self.driver.split(".")
        return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()

    def gpu(self, uuid: str) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def usage(self) -> dict[int, dict[str, int | None]]:
        """Bytes by pid and device."""
        found: dict[int, dict[str, int | None]] = {}
        for gpu in self.gpus:
            for holder in gpu.holders:
                found.setdefault(holder.pid, {})[gpu.uuid] = holder.bytes
        return found

    def bytes_of(self, pids: Iterable[int]) -> int:
        wanted = frozenset(pids)
        return sum(holder.bytes or 0 for gpu in self.gpus for holder in gpu.holders if holder.pid in wanted)


class DeviceEvent(Struct, frozen=True, kw_only=True):
    """Something a device reported by itself."""

    uuid: str
    xid: int
    """NVIDIA's error number, as in the kernel log."""


XIDS = {
    13: "graphics engine exception, mostly the program's own",
    31: "memory page fault, mostly the program's own",
    43: "a program's channel was reset",
    45: "a program's channels were removed early",
    48: "double-bit ECC error",
    63: "a memory row or page was retired",
    64: "a memory row or page could not be retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error: reset the device",
    119: "GSP does not answer",
    120: "GSP error",
}
"""Meanings of the commonest, from NVIDIA's public list of Xid errors."""
