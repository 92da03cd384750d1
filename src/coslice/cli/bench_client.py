"""One client process of ``coslice bench handoff``; prints its figures as JSON when it is done."""

import json
import sys
import time

import grpc

import coslice
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub

GROUP = "bench"
HOLD_S = 0.002
"""Long enough for the other client's acquire to be in the queue when we yield."""


class Native:
    def __init__(self, address: str, job: str) -> None:
        self._client = coslice.Client(address, job=job, groups=[GROUP], need=1)

    def acquire(self) -> None:
        self._client.acquire(GROUP, timeout=30.0)

    def give(self) -> None:
        self._client.yield_(GROUP)

    def close(self) -> None:
        self._client.close()


class Upstream:
    """As a client of llm-d's wire calls: one insecure channel, unary calls."""

    def __init__(self, address: str, job: str) -> None:
        self._job = job
        self._channel = grpc.insecure_channel(address)
        self._stub = TimeSliceOrchestratorServiceStub(self._channel)

    def acquire(self) -> None:
        self._stub.Acquire(up.AcquireRequest(job_id=self._job, group_id=GROUP), timeout=30.0)

    def give(self) -> None:
        self._stub.Yield(up.YieldRequest(job_id=self._job, group_id=GROUP), timeout=30.0)

    def close(self) -> None:
        self._channel.close()


def uncontended(client: Native | Upstream, rounds: int) -> dict[str, list[float]]:
    times = []
    for _ in range(rounds + 30):
        time.sleep(HOLD_S)
        begin = time.perf_counter()
        client.acquire()
        times.append((time.perf_counter() - begin) * 1e3)
        client.give()
    return {"acquire_ms": times[30:]}


def contend(client: Native | Upstream, job: str, rounds: int) -> dict[str, list[dict[str, object]]]:
    turns: list[dict[str, object]] = []
    for _ in range(rounds // 2 + 30):
        client.acquire()
        granted = time.monotonic()  # CLOCK_MONOTONIC: one clock for all processes of a machine
        time.sleep(HOLD_S)
        yielded = time.monotonic()
        client.give()
        turns.append({"job": job, "granted": granted, "yielded": yielded})
    return {"turns": turns}


def main() -> None:
    address, job, protocol, mode, rounds = sys.argv[1:6]
    client = Upstream(address, job) if protocol == "upstream" else Native(address, job)
    try:
        figures = (
            uncontended(client, int(rounds)) if mode == "uncontended" else contend(client, job, int(rounds))
        )
    finally:
        client.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
