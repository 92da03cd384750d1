"""Memory really leaves the process, whatever the sizes of its tensors. Each case is a process of its own."""

import json
from pathlib import Path

import pytest
from forked import run

PROGRAM = """
import json, sys, threading
import torch
from torch import nn
from coslice.gate import GATE
from coslice.workload import register

def anonymous():  # exact; RssAnon in /proc/self/status may be off by some pages per core
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Anonymous"))

torch.set_num_threads(1)
count, floats, keep_gradients = json.loads(sys.argv[1])
model = nn.ParameterList([nn.Parameter(torch.randn(floats)) for _ in range(count)])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
handle = register(model, optimizer, env={})
shares = []

def work():
    for turn in range(3):
        section = GATE.enter()
        optimizer.zero_grad()
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
        if not keep_gradients:
            optimizer.zero_grad()
        GATE.leave(section)
        before, size = anonymous(), handle.state_bytes
        assert handle.offload() == size
        shares.append((before - anonymous()) / size)
        handle.restore()

if len(sys.argv) > 2:  # in a thread of its own, with a heap of its own
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
print(json.dumps(shares))
"""


def shares(folder: Path, *arguments: str) -> list[float]:
    done = run(PROGRAM, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    freed: list[float] = json.loads(done.stdout)
    return freed


@pytest.mark.parametrize(
    ("count", "floats", "gradients"),
    [(3, 2_000_000, True), (40, 100_000, True), (500, 1024, True), (2000, 256, False)],
    ids=["big", "middle", "4 KiB", "1 KiB"],
)
def test_95_percent_of_the_registered_bytes_leave_at_every_move(
    count: int, floats: int, gradients: bool, tmp_path: Path
) -> None:
    freed = shares(tmp_path, json.dumps([count, floats, gradients]))
    assert min(freed) >= 0.95, freed


def test_they_leave_when_a_thread_other_than_the_first_trains(tmp_path: Path) -> None:
    freed = shares(tmp_path, json.dumps([40, 100_000, True]), "thread")
    assert min(freed) >= 0.95, freed
