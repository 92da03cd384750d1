"""``coslice bench driver``: how many hand-overs a second one process carries.

The real lock machine, driver, journal and SQLite with ``synchronous=FULL``, without wire and agents. Two jobs
take turns on each of many groups; a node answers at once.

A hand-over is everything from one job's yield to the other's confirmed grant: yield, swap command, its
success, grant, confirmation, and the next request of the job that yielded. ``uncontended_ms``: one group
alone, from an acquire to its durable grant, beside ``save_ms``, one bare save of the same bytes.
"""

import asyncio
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.group_state import Group
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.outcome import Step
from coslice.core.policy import policy_named
from coslice.runtime.clock import LoopClock
from coslice.runtime.driver import Driver
from coslice.runtime.journal import Journal
from coslice.store import Store, make_store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

CLOCK = LoopClock()
CODEC = Codec(Group, kind="group")
NODE = NodeId("node-0")


class Table:
    """One group, its node and its jobs: each hands on as soon as it is granted."""

    def __init__(self, name: str, store: Store, journal: Journal) -> None:
        self.hand_overs = 0
        self.requests = 0
        self.playing = False
        self.granted = asyncio.Event()
        self._journal = journal
        self._slot = Slot(store, name, CODEC)
        self.driver: Driver[Group, ev.GroupEvent, fx.GroupEffect] = Driver(
            name=name,
            state=core.new_group(GroupId(name), nodes=[NODE], at=CLOCK.now()),
            step=functools.partial(core.step, policy=policy_named("fifo")),
            next_deadline=core.next_deadline,
            deadline_passed=lambda at: ev.DeadlinePassed(at=at),
            clock=CLOCK,
            save=self._slot.save,
            perform=self._perform,
            record=self._record,
        )
        self.tell = self.driver.tell
        self.tell(ev.NodeAttached(at=CLOCK.now(), node=NODE, epoch=Epoch(0), facts=ev.NodeFacts()))

    def request(self, job: JobId) -> ev.AcquireRequested:
        self.requests += 1
        return ev.AcquireRequested(
            at=CLOCK.now(),
            job=job,
            incarnation=Incarnation(job),
            session=SessionId(job),
            request=RequestId(f"{job}/{self.requests}"),
        )

    def _perform(self, effect: fx.GroupEffect) -> None:
        match effect:
            case fx.MakeResident():
                self.tell(ev.OpSucceeded(at=CLOCK.now(), op=effect.op, node=effect.node, restored=True))
            case fx.Grant():
                self.hand_overs += 1
                self.granted.set()
                self.tell(ev.GrantConfirmed(at=CLOCK.now(), request=effect.request))
                if self.playing:
                    self.tell(self.yielded(effect))
                    self.tell(self.request(effect.job))
            case fx.Refuse() | fx.LoseLease() | fx.AskYield() | fx.ForgetJob():
                raise AssertionError(f"the bench goes wrong: {effect}")

    @staticmethod
    def yielded(grant: fx.Grant) -> ev.LeaseYielded:
        return ev.LeaseYielded(at=CLOCK.now(), job=grant.job, session=grant.session, epoch=grant.epoch)

    def _record(self, at: float, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        self._journal.record(self.driver.name, at, event, step, {"epoch": step.state.epoch})


async def many(store: Store, journal: Journal, *, groups: int, seconds: float) -> dict[str, float]:
    tables = [Table(f"group-{n:03}", store, journal) for n in range(groups)]
    tasks = [asyncio.create_task(table.driver.run()) for table in tables]
    for table in tables:
        table.playing = True
        for job in ("job-a", "job-b"):
            table.tell(table.request(JobId(job)))
    await asyncio.sleep(seconds / 5)  # warm
    before, commits, begun, cpu = _count(tables), _commits(store), time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - begun, time.process_time() - cpu
    done, commits = _count(tables) - before, _commits(store) - commits
    for table in tables:
        table.playing = False
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    broken = [result for result in results if isinstance(result, Exception)]
    if broken:
        raise broken[0]
    return {
        "handoffs_per_s": round(done / took, 1),
        "commits_per_s": round(commits / took, 1),
        "cpu": round(used / took, 3),
        "slowest_group": min(table.hand_overs for table in tables),
    }


async def alone(store: Store, journal: Journal, rounds: int = 300) -> dict[str, Any]:
    table = Table("alone", store, journal)
    task = asyncio.create_task(table.driver.run())
    job, acquired, yielded, saved = JobId("job-a"), [], [], []
    version, data = 0, CODEC.encode(table.driver.state)
    for _ in range(rounds):
        table.granted.clear()
        begun = time.perf_counter()
        await table.driver.post(table.request(job))
        await table.granted.wait()  # there already, but for the first time: then the node answers first
        acquired.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        epoch = table.driver.state.epoch
        await table.driver.post(ev.LeaseYielded(at=CLOCK.now(), job=job, session=SessionId(job), epoch=epoch))
        yielded.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        version = await store.save("bare", data, expect=version)
        saved.append(time.perf_counter() - begun)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return {
        "uncontended_ms": _ms(acquired),
        "yield_ms": _ms(yielded),
        "save_ms": _ms(saved),
    }


def _ms(seconds: list[float]) -> dict[str, float]:
    marks = statistics.quantiles(seconds, n=100)
    return {"p50": round(marks[49] * 1e3, 3), "p99": round(marks[98] * 1e3, 3)}


def _count(tables: list[Table]) -> int:
    return sum(table.hand_overs for table in tables)


def _commits(store: Store) -> int:
    return int(getattr(store, "commits", 0))


async def bench(folder: Path, *, groups: int, seconds: float) -> dict[str, Any]:
    store = make_store(folder / "bench.db")
    await store.load()
    journal = Journal(folder / "journal.jsonl", orchestrator="bench")
    journal.open(CLOCK.now())
    result: dict[str, Any] = {"groups": groups}
    result |= await alone(store, journal)
    result |= await many(store, journal, groups=groups, seconds=seconds)
    journal.close()
    await store.close()
    return result


def bench_driver(*, groups: int, seconds: float, out: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=".", prefix=".driver-bench-") as folder:  # a real disk, not a tmpfs
        result = asyncio.run(bench(Path(folder), groups=groups, seconds=seconds))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result.items():
        print(f"{key:18} {value}")
