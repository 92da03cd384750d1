"""A process of its own: an orchestrator with many groups, an agent, and jobs that take turns all the time.

Prints the address of its dashboard, then that of the orchestrator; ends with its standard input.
"""

import argparse
import asyncio
import random
import sys
from contextlib import AsyncExitStack

import grpc
from orchestrator.raw_client import RawClient

from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.security.listening import LOCAL_ONLY, Security
from coslice.testing.fake_agent import FakeAgent, slow
from coslice.wire.v1 import coslice_pb2 as pb

MIB = 1 << 20


async def take_turns(client: RawClient, groups: list[str], hold: float, luck: random.Random) -> None:
    while True:
        answer = await client.answer(request := await client.ask(luck.choice(groups)))
        if answer.HasField("refused"):
            return  # it is faulted
        granted = await client.granted(request)
        await asyncio.sleep(hold * luck.uniform(0.3, 1.7))  # it computes
        await client.yielded(granted)
        await asyncio.sleep(hold * luck.uniform(0.1, 0.6))  # rewards


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--hold", type=float, default=1.0)
    parser.add_argument("--swap", type=float, default=0.15)
    parser.add_argument("--trouble", action="store_true", help="of jobs, and a drained node")
    parser.add_argument("--token-secret", help="ask viewers for a token")
    said = parser.parse_args()
    groups = [f"group-{n:03}" for n in range(said.groups)]
    jobs = [f"job-{n:02}" for n in range(said.jobs)]
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        board = Board()
        app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2), board=board)
        security = LOCAL_ONLY if said.token_secret is None else Security(token_secret=said.token_secret)
        http = HttpServer(board, "127.0.0.1:0", security)
        await http.start()
        stack.push_async_callback(http.stop)
        await app.start()
        stack.push_async_callback(app.stop)
        states = dict.fromkeys(jobs, 700 * MIB)
        swap = slow(said.swap)

        async def behave(command: pb.MakeResident) -> pb.OpFailed | None:
            await swap(command)
            bad = said.trouble and command.job == jobs[-1] and command.epoch > 3
            return pb.OpFailed(culprit=command.job, reason="the restore ran out of memory") if bad else None

        agent = FakeAgent(
            app.address, groups=groups, behaviour=behave, states=states, device_budget=1000 * MIB
        )
        await stack.enter_async_context(agent)
        turns = []
        for n, job in enumerate(jobs):
            client = RawClient(app.address, job)
            stack.push_async_callback(client.close)
            await client.connect()
            mine = [group for k, group in enumerate(groups) if (k + n) % 4 == 0]
            turns.append(asyncio.create_task(take_turns(client, mine, said.hold, random.Random(n))))
        if said.trouble:
            vanishing = RawClient(app.address, "job-vanished")
            stack.push_async_callback(vanishing.close)
            await (await vanishing.connect()).acquire(groups[0])
            vanishing.kill()
            await stack.enter_async_context(FakeAgent(app.address, node="spare", groups=groups[-1:]))
            await vanishing.stub.Drain(pb.DrainRequest(node="spare", by="ada", reason="new fan"))
        print(http.url, app.address, flush=True)
        until = loop.run_in_executor(None, sys.stdin.read)
        await asyncio.wait([until])
        for turn in turns:
            turn.cancel()
        for ended in await asyncio.gather(*turns, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, grpc.RpcError):
                raise ended


if __name__ == "__main__":
    asyncio.run(main())
