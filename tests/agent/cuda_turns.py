"""A job of the end-to-end tests: device memory that only its sections touch. It registers nothing.

Each turn begins when a line comes on stdin.
"""

import argparse
import sys

import coslice
from coslice.testing.gpu_job import Device

parser = argparse.ArgumentParser()
parser.add_argument("--bytes", type=int, required=True)
parser.add_argument("--turns", type=int, required=True)
options = parser.parse_args()

orchestrator = coslice.connect()
device: Device | None = None
for turn in range(options.turns):
    sys.stdin.readline()
    with orchestrator.on_accelerators():
        if device is None:
            device = Device(0)
            device.allocate(options.bytes)
        if not device.check():
            sys.exit(f"turn {turn}: the bytes on the device are not those of the last turn")
        device.fill(turn + 1)
    print(f"turn {turn}", flush=True)
