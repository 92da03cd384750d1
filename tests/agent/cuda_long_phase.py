"""A job of the end-to-end tests: one section, until a file is there. It registers nothing."""

import sys
from pathlib import Path

import coslice
from coslice.testing.gpu_job import Device

size, awaited = int(sys.argv[1]), Path(sys.argv[2])
rounds = 0
with coslice.connect().on_accelerators():
    device = Device(0)
    device.allocate(size)
    print("inside", flush=True)
    while not awaited.exists():
        rounds += 1
        device.fill(rounds)
        if not device.check():
            sys.exit(f"round {rounds}: the bytes on the device are not those that were written")
print(f"ended after {rounds} rounds", flush=True)
