"""One client process of ``coslice bench handoff``; prints its figures as JSON when it is done."""

import json
import sys
import time

import coslice

GROUP = "bench"
HOLD_S = 0.002
"""Long enough for the other client's acquire to be in the queue when we yield."""


def uncontended(client: coslice.Client, rounds: int) -> dict[str, list[float]]:
    times = []
    for _ in range(rounds + 30):
        time.sleep(HOLD_S)
        begin = time.perf_counter()
        client.acquire(GROUP, timeout=30.0)
        times.append((time.perf_counter() - begin) * 1e3)
        client.yield_(GROUP)
    return {"acquire_ms": times[30:]}


def contend(client: coslice.Client, job: str, rounds: int) -> dict[str, list[dict[str, object]]]:
    turns: list[dict[str, object]] = []
    for _ in range(rounds // 2 + 30):
        grant = client.acquire(GROUP, timeout=30.0)
        granted = time.monotonic()  # CLOCK_MONOTONIC: one clock for all processes of a machine
        time.sleep(HOLD_S)
        yielded = time.monotonic()
        client.yield_(GROUP)
        turns.append({"job": job, "epoch": grant.leases[0].epoch, "granted": granted, "yielded": yielded})
    return {"turns": turns}


def main() -> None:
    address, job, mode, rounds = sys.argv[1:5]
    client = coslice.Client(address, job=job, groups=[GROUP], need=1)
    try:
        figures = (
            uncontended(client, int(rounds)) if mode == "uncontended" else contend(client, job, int(rounds))
        )
    finally:
        client.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
