"""The leader of several orchestrators is killed while groups are held and jobs wait: when do grants go on?

    python tools/failover.py --groups 100 --waiters 5 --json build/failover.json

Real processes: an etcd, three orchestrators; all jobs and agents (with simulated devices) in this process.
The holders yield right after the kill, so that every group owes a grant. ``elected_s``, ``first_s``,
``last_s``: from the kill to another leader, and to the first grant of the first and of the last group. Order,
losses and doubles are judged here. ``jobs_cpu_s``: what this process, which is no part of coslice's servers,
computed meanwhile; on few cores the orchestrators wait for it.
Needs etcd (``apt-get install etcd-server``).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.leaders import Crowd, Orchestrators
from store.etcd_server import EtcdServer


async def measure(orchestrators: Orchestrators, groups: int, waiters: int, ttl: float) -> dict[str, Any]:
    leader = await orchestrators.leader()
    crowd = Crowd(orchestrators.addresses, groups=groups, waiters=waiters)
    queues = await crowd.arrive()
    load = os.getloadavg()[0]
    killed, cpu = time.monotonic(), time.process_time()
    orchestrators.signal(leader, signal.SIGKILL)
    going_on = asyncio.create_task(crowd.go_on())
    await orchestrators.leader(other_than=leader)
    elected = time.monotonic()
    await going_on
    done, cpu = time.monotonic(), time.process_time() - cpu
    await crowd.close()
    assert {group: sorted(jobs) for group, jobs in crowd.turns.items()} == {
        group: sorted(jobs) for group, jobs in queues.items()
    }, "somebody had no turn, or two"
    firsts = sorted(at - killed for at in crowd.first.values())
    return {
        "groups": groups,
        "waiters": groups * waiters,
        "ttl_s": ttl,
        "target_s": ttl + 2,
        "elected_s": round(elected - killed, 2),
        "first_s": round(firsts[0], 2),
        "median_s": round(firsts[len(firsts) // 2], 2),
        "last_s": round(firsts[-1], 2),
        "all_turns_s": round(done - killed, 2),
        "jobs_cpu_s": round(cpu, 2),
        "doubles": len(crowd.doubles),
        "groups_in_order": sum(crowd.turns[group] == queue for group, queue in queues.items()),
        "load_before": round(load, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--waiters", type=int, default=5, help="of each group")
    parser.add_argument("--ttl", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coslice-failover-") as name:
        etcd = EtcdServer(Path(name) / "etcd")
        orchestrators = Orchestrators(Path(name), etcd.start().location(), ttl=options.ttl)
        try:
            for _ in range(3):
                orchestrators.start()
            found = asyncio.run(measure(orchestrators, options.groups, options.waiters, options.ttl))
        finally:
            orchestrators.close()
            etcd.kill()
    print(json.dumps(found))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
