"""Which CUDA devices this node has: by NVML (of the driver, with nvidia-ml-py), else by torch, where that is
installed.

Asked once, before the agent serves. NVML runs in a program of its own, because a driver may hang; what is on
the devices later is ``discovery``'s to say.
"""

import ctypes
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from coslice.agent.discovery.nvml import Message

SECONDS = 30.0
"""Opening cold devices takes seconds."""


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
    """The CUDA devices of this node; empty without a driver, or without a package that can ask it."""
    return _by_nvml() or _by_torch()


def _by_nvml() -> tuple[Device, ...]:
    if importlib.util.find_spec("pynvml") is None:
        return ()
    command = [sys.executable, "-P", "-m", "coslice.agent.discovery.nvml", "-"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
        survey = msgspec.json.decode(done.stdout, type=Message).survey
    except (subprocess.TimeoutExpired, OSError, msgspec.DecodeError):
        return ()
    if survey is None:
        return ()
    return tuple(Device(index=gpu.index, name=gpu.name, total_bytes=gpu.total) for gpu in survey.gpus)


def _by_torch() -> tuple[Device, ...]:
    if importlib.util.find_spec("torch") is None or not _driver():
        return ()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(Device(index=i, name=p.name, total_bytes=p.total_memory) for i, p in enumerate(found))


def _driver() -> bool:
    """Could torch find a device here? To import it takes seconds, and most nodes without a driver have it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # of ROCm, whose devices torch calls CUDA's as well
    return True
