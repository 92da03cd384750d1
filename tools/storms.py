"""Three figures of how coslice bears trouble: ``make storms`` (or one of them, with ``--json FILE``).

``restart``  kill -9 of the orchestrator with five waiters: is the order kept, and how soon after it is back
             (its socket answers) is the first of them granted?
``hung``     fifty groups hand over all the while; one group's agent is stopped. p99 of a hand-over in the
             other 49, before and while it hangs, in pairs of the same length one after the other.
``cancel``   ten thousand acquires, each cancelled at a random moment (some before they are sent, some while
             they wait, some as they are granted): what is left in the queue, who holds a lease?

Real processes and sockets: the orchestrator, the agents' processes and the clients.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import grpc
from faults.cluster import Cluster

import coslice
from coslice.client.aio import AsyncClient
from coslice.errors import AcquireTimeout
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

WAITERS = 5
GROUPS = 50
PAIRS = 5
SECONDS = 8.0
"""Of each half of a pair."""
CANCELLED = 10_000
JOBS = 20
BOUND = 120.0


def restart(cluster: Cluster, seed: int) -> dict[str, Any]:
    """The holder yields while the orchestrator is away, so the first turn is due as soon as it is back."""
    orchestrator = cluster.orchestrator()
    cluster.agent()
    holder = cluster.job("holder")
    names = [f"w{number}" for number in range(1, WAITERS + 1)]
    random.Random(seed).shuffle(names)
    waiters = [cluster.job(name) for name in names]
    holder.acquire()
    for count, waiter in enumerate(waiters, 1):
        waiter.tell("acquire")
        cluster.until_waiting(*names[:count])
    killed = time.monotonic()
    orchestrator.kill()
    holder.yield_()
    cluster.orchestrator()
    back = time.monotonic()
    first, epochs = math.nan, []
    for waiter in waiters:  # in the order of the queue: were it lost, the wait for one of them would not end
        epochs.append(waiter.expect("granted", within=BOUND)["epoch"])
        first = min(first, time.monotonic() - back) if epochs[1:] else time.monotonic() - back
        waiter.yield_()
    return {
        "waiters": WAITERS,
        "order_kept": epochs == sorted(epochs),
        "away_s": round(back - killed, 3),
        "first_grant_s": round(first, 3),
    }


def hung(cluster: Cluster, seed: int) -> dict[str, Any]:
    """Open loop: each group hands over at its own random moments, whatever the others do."""
    cluster.orchestrator()
    well = [f"g{number:02}" for number in range(1, GROUPS)]
    devices = [{"group": group, "device_budget": 64 << 20} for group in well]
    cluster.agent("well", well[0], groups=devices)
    victim = cluster.agent("hung", "g-hung")
    return asyncio.run(_hung(cluster, seed, well, victim.pid))


async def _hung(cluster: Cluster, seed: int, well: list[str], pid: int) -> dict[str, Any]:
    draw = random.Random(seed)
    samples: list[float] = []
    clients = [_client(cluster, f"{group}-{who}", group) for group in well for who in "ab"]
    pairs = list(zip(clients[::2], clients[1::2], strict=True))
    loops = [asyncio.create_task(_hand_over(a, b, draw, samples)) for a, b in pairs]
    await asyncio.sleep(SECONDS)  # until all are connected and warm
    halves: list[tuple[list[float], list[float]]] = []
    for number in range(PAIRS):
        say(f"pair {number + 1} of {PAIRS}")
        quiet_first = number % 2 == 0
        found: dict[bool, list[float]] = {}
        for stopped in (False, True) if quiet_first else (True, False):
            found[stopped] = await _half(cluster, pid if stopped else 0, samples)
        halves.append((found[False], found[True]))
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    ratios = [_p99(there) / _p99(quiet) for quiet, there in halves]
    quiet, there = ([one for half in side for one in half] for side in zip(*halves, strict=True))
    return {
        "groups": GROUPS,
        "handovers": len(quiet) + len(there),
        "p99_ms": round(1e3 * _p99(quiet), 2),
        "p99_with_one_hung_ms": round(1e3 * _p99(there), 2),
        "p50_ms": round(1e3 * statistics.median(quiet), 2),
        "p50_with_one_hung_ms": round(1e3 * statistics.median(there), 2),
        "ratio_of_p99": round(_p99(there) / _p99(quiet), 3),
        "median_of_paired_ratios": round(statistics.median(ratios), 3),
    }


async def _half(cluster: Cluster, pid: int, samples: list[float]) -> list[float]:
    """With a ``pid``: that agent is stopped meanwhile, and a job of its group waits for it."""
    waiter: asyncio.Task[Any] | None = None
    client: AsyncClient | None = None
    if pid:
        os.kill(pid, signal.SIGSTOP)
        client = _client(cluster, "waits", "g-hung")
        waiter = asyncio.create_task(client.acquire())
    try:
        await asyncio.sleep(1.0)
        samples.clear()
        await asyncio.sleep(SECONDS)
        return list(samples)
    finally:
        if pid and waiter is not None and client is not None:
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
            os.kill(pid, signal.SIGCONT)
            await client.close()


async def _hand_over(a: AsyncClient, b: AsyncClient, draw: random.Random, samples: list[float]) -> None:
    await a.acquire()
    while True:
        waiting = asyncio.create_task(b.acquire())
        await asyncio.sleep(draw.uniform(1.0, 3.0))
        begun = time.perf_counter()
        await a.yield_()
        await waiting
        samples.append(time.perf_counter() - begun)
        a, b = b, a


def cancel(cluster: Cluster, seed: int) -> dict[str, Any]:
    cluster.orchestrator()
    cluster.agent()
    begun = time.monotonic()
    granted = asyncio.run(_cancel(cluster, seed))
    took = time.monotonic() - begun
    with grpc.insecure_channel(cluster.address) as channel:
        stub = rpc.OrchestratorStub(channel)
        left = stub.GetStatus(pb.GetStatusRequest(group="pool"), timeout=BOUND).groups[0]
    return {
        "acquires": CANCELLED,
        "granted_first": granted,
        "queue_depth": len(left.waiters),
        "leases": int(left.state in ("held", "swapping")),
        "epochs": left.epoch,
        "seconds": round(took, 1),
    }


async def _cancel(cluster: Cluster, seed: int) -> int:
    """How many were granted before they were cancelled (and then given back by a yield)."""
    clients = [_client(cluster, f"job-{number}", "pool") for number in range(JOBS)]
    storms = [
        _storm(client, random.Random(seed + number), CANCELLED // JOBS)
        for number, client in enumerate(clients)
    ]
    granted = sum(await asyncio.gather(*storms))
    await asyncio.gather(*(client.close() for client in clients))
    return granted


async def _storm(client: AsyncClient, draw: random.Random, count: int) -> int:
    granted = 0
    for number in range(count):
        if number % 500 == 499:
            say(f"{client.config.job}: {number + 1} of {count}")
        if draw.random() < 0.5:  # the caller's own time is over …
            try:
                await client.acquire(timeout=_soon(draw))
            except AcquireTimeout:
                continue
        else:  # … or somebody cancels the caller
            asking = asyncio.create_task(client.acquire())
            await asyncio.sleep(_soon(draw))
            asking.cancel()
            try:
                await asking
            except asyncio.CancelledError:
                continue
        granted += 1
        await client.yield_()
    return granted


def _soon(draw: random.Random) -> float:
    """From before the request is on its way to after most are granted."""
    return draw.expovariate(1.0 / draw.choice((0.0005, 0.005, 0.05, 0.3)))


def _client(cluster: Cluster, job: str, group: str) -> AsyncClient:
    return coslice.AsyncClient.from_env({}, address=cluster.address, job=job, groups=(group,))


def _p99(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=100)[98] if len(samples) > 1 else math.nan


STORMS: dict[str, Callable[[Cluster, int], dict[str, Any]]] = {
    "restart": restart,
    "hung": hung,
    "cancel": cancel,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/storms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[[], *STORMS], help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"seed": options.seed}
    for which in options.which or STORMS:
        say(f"storm: {which}")
        with tempfile.TemporaryDirectory(prefix="coslice-storm-") as folder:
            cluster = Cluster(Path(folder))
            try:
                figures[which] = STORMS[which](cluster, options.seed)
            except KeyboardInterrupt:
                return 130
            finally:
                cluster.close()
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
