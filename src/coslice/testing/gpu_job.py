"""A small GPU program for tests: fills device memory and checks its bytes. Run it by its path.

Uses ``libcuda.so.1`` alone (the real one or the fake), so it starts at once. Says what it does as JSON lines;
commands come on stdin: ``check`` (are all bytes as written?), ``fill N``, ``alloc BYTES``, ``end``, and with
the fake driver ``work`` (be busy on the device until the node is told to be idle). ``--children N`` starts
that many programs like itself, as ranks of one job.
"""

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
from typing import Any

CHUNK = 16 << 20
"""So that filling many gigabytes takes seconds."""


class Device:
    """Device memory of this process: one allocation per call of ``allocate``."""

    def __init__(self, ordinal: int) -> None:
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._held: list[tuple[int, int]] = []
        self._seed = 0
        self._made: tuple[tuple[int, int], bytearray] = ((-1, -1), bytearray())
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._cuda, name)(*args):
            raise SystemExit(f"{name}: error {code}")

    def allocate(self, size: int, *, managed: bool = False) -> None:
        address = ctypes.c_uint64()
        if managed:
            self._call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), 1)
        else:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._held.append((address.value, size))
        self.fill(self._seed)

    def fill(self, seed: int) -> None:
        self._seed = seed
        for address, offset, length in self._chunks():
            pattern = (ctypes.c_char * length).from_buffer(self._pattern(offset, length))
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address + offset), pattern, ctypes.c_size_t(length))

    def check(self) -> bool:
        found = bytearray(CHUNK)
        space = (ctypes.c_char * CHUNK).from_buffer(found)
        for address, offset, length in self._chunks():
            self._call("cuMemcpyDtoH_v2", space, ctypes.c_uint64(address + offset), ctypes.c_size_t(length))
            # Of bytearrays: views are compared element by element, at a twentieth of the speed.
            if (found if length == CHUNK else found[:length]) != self._pattern(offset, length):
                return False
        return True

    def work(self) -> None:
        self._call("cuFakeWork")

    def _chunks(self) -> list[tuple[int, int, int]]:
        return [
            (address, offset, min(CHUNK, size - offset))
            for address, size in self._held
            for offset in range(0, size, CHUNK)
        ]

    def _pattern(self, offset: int, length: int) -> bytearray:
        """Bytes that say whose they are, so that another process's or another place's are noticed. Valid
        until the next call."""
        key = (self._seed, length)
        if self._made[0] != key:
            word = f"{os.getpid()}/{self._seed};".encode()
            self._made = (key, bytearray((word * (length // len(word) + 1))[:length]))
        place = f"{offset:016x}".encode()[:length]
        self._made[1][: len(place)] = place
        return self._made[1]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--managed", action="store_true")
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--map", help="a file to keep mapped, as a library would")
    parser.add_argument("--probe", action="store_true", help="initialise CUDA, hold no device memory")
    options = parser.parse_args()
    if options.children:
        return lead(options)
    mapped = None
    if options.map:
        with open(options.map, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
    if options.probe:
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        device = None
    else:
        device = Device(options.device)
        device.allocate(options.bytes, managed=options.managed)
    say(event="ready", pid=os.getpid(), bytes=options.bytes)
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        if word == "end":
            break
        if device is None:
            continue
        if word == "check":
            say(event="checked", pid=os.getpid(), ok=device.check())
        elif word == "fill":
            device.fill(int(value))
            say(event="filled", pid=os.getpid())
        elif word == "alloc":
            device.allocate(int(value))
            say(event="allocated", pid=os.getpid())
        elif word == "work":
            device.work()
            say(event="worked", pid=os.getpid())
    del mapped
    return None


def lead(options: argparse.Namespace) -> None:
    """Ranks as children, as torchrun has them: this process itself never touches the device."""
    command = [sys.executable, __file__, "--bytes", str(options.bytes), "--device", str(options.device)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.children)
    ]

    def relay(rank: "subprocess.Popen[str]") -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            print(line, end="", flush=True)

    threads = [threading.Thread(target=relay, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        if line.strip() == "end":
            break
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
        rank.wait()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
