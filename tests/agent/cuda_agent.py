"""An agent's backend in a process of its own, to be killed. Arguments: FOLDER OP,OP PID..."""

import asyncio
import sys
from pathlib import Path

from agent.cuda_world import CudaWorld


async def main() -> None:
    folder, ops, *pids = sys.argv[1:]
    world = CudaWorld(None, Path(folder))
    await world.start()
    members = [world.member("a", int(pid)) for pid in pids]
    for op in ops.split(","):
        await getattr(world.backend, op)(members, op=op)
    print("done", flush=True)


asyncio.run(main())
