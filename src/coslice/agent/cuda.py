"""What is known of CUDA devices: only what torch says, and only where torch is installed.

The agent itself never needs a framework, opens no device and measures none: on a cuda group the figures of a
move are the workload's own (its allocator's), which the app channel takes as such.
"""

import importlib
import importlib.util

from msgspec import Struct


class Device(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    total_bytes: int


def cuda_available() -> bool:
    return bool(devices())


def device_memory() -> int:
    """Bytes of all CUDA devices of this node together; 0 without any."""
    return sum(device.total_bytes for device in devices())


def devices() -> tuple[Device, ...]:
    """The CUDA devices of this node; empty without torch or without a device. The import may take seconds."""
    if importlib.util.find_spec("torch") is None:
        return ()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(Device(index=i, name=p.name, total_bytes=p.total_memory) for i, p in enumerate(found))
