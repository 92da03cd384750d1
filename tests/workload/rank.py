"""One rank of a torch.distributed job: trains once undisturbed, once registered and moved between steps."""

import datetime
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload.nets import digests

from coslice.gate import GATE
from coslice.workload import register

STEPS = 3


class Run:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        # Gradients are views of the reducer's buckets here: memory that C++ shares with us moves too.
        self.net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
        self._data = torch.Generator().manual_seed(rank)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.net(torch.randn(4, 64, generator=self._data)).square().mean().backward()
        self.optimizer.step()


def main(rank: int, world: int, store: str, agent: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=90),
    )
    plain, moved = Run(rank), Run(rank)
    for _ in range(STEPS):
        plain.step()
    env = {"COSLICE_AGENT": agent, "COSLICE_JOB": "job-a", "COSLICE_GROUP": "g", "COSLICE_INCARNATION": "i"}
    handle = register(moved.net, moved.optimizer, env=env | {"RANK": str(rank)})
    for _ in range(STEPS):
        section = GATE.enter()
        moved.step()
        GATE.leave(section)
        pipe.send(handle.state_bytes)
        pipe.recv()  # state goes and comes meanwhile
    pipe.send((digests(plain.net, plain.optimizer), digests(moved.net, moved.optimizer)))
    handle.close()
    dist.destroy_process_group()
