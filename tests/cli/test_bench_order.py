"""What ``coslice bench handoff`` reads from the journal: in order, or how it is not."""

from pathlib import Path
from typing import Any

from coslice.cli.bench_order import Order, order_of
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.group_state import Held, Swapping
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId, op_id
from coslice.core.policy import policy_named
from coslice.runtime.journal import Journal, read_journal

NODE = NodeId("n0")


class Lock:
    """A real group and a real journal, without a driver between them."""

    def __init__(self, path: Path, policy: str) -> None:
        self.path, self.policy, self.at = path, policy_named(policy), 0.0
        self.group = core.new_group(GroupId("pool"), nodes=[NODE], at=0.0)
        self.journal = Journal(path)
        self.journal.open(0.0)
        self.apply(ev.NodeAttached(at=0.0, node=NODE, epoch=Epoch(0), facts=ev.NodeFacts()))

    def apply(self, event: Any) -> None:
        step = core.step(self.group, event, policy=self.policy)
        self.group = step.state
        self.journal.record("pool", event.at, event, step, {})

    def ask(self, job: str, request: str = "") -> None:
        self.at += 1.0
        self.apply(
            ev.AcquireRequested(
                at=self.at,
                job=JobId(job),
                incarnation=Incarnation(""),
                session=SessionId(job),
                request=RequestId(request or f"{job}/{self.at}"),
                final=True,
            )
        )

    def give(self) -> None:
        self.at += 1.0
        held = self.group.occupancy
        assert isinstance(held, Held)
        session = held.holders[0].session
        self.apply(ev.LeaseYielded(at=self.at, job=held.job, session=session, epoch=held.epoch))
        swap = self.group.occupancy
        if isinstance(swap, Swapping):
            self.apply(ev.OpSucceeded(at=self.at, op=op_id(self.group.id, swap.epoch, NODE), node=NODE))

    def records(self) -> list[dict[str, Any]]:
        self.journal.close()
        return read_journal(self.path).records


def played(path: Path, policy: str) -> list[dict[str, Any]]:
    """a holds; b, c and d ask in that order, b twice; c gives up."""
    lock = Lock(path, policy)
    lock.ask("a")
    lock.ask("b", "b/1")
    lock.ask("c", "c/1")
    lock.ask("d")
    lock.ask("b", "b/1")
    lock.apply(ev.AcquireAbandoned(at=lock.at, request=RequestId("c/1"), reason="enough"))
    lock.give()
    lock.give()
    lock.give()
    return lock.records()


def test_first_come_first_served(tmp_path: Path) -> None:
    found = order_of(played(tmp_path / "journal", "fifo"), "pool")
    assert found == Order(jobs=["a", "b", "d"], requests=4)


def test_a_grant_past_somebody_who_asked_before_is_found(tmp_path: Path) -> None:
    found = order_of(played(tmp_path / "journal", "priority:class/d=1"), "pool")
    assert found == Order(jobs=["a", "d", "b"], requests=4, out_of_order=1)


def test_what_is_missing_or_too_much_is_found(tmp_path: Path) -> None:
    records = played(tmp_path / "journal", "fifo")
    first = next(i for i, record in enumerate(records) if record["event"]["type"] == "LeaseYielded")
    assert order_of(records[:first], "pool").lost == 2
    unyielded = [*records]
    unyielded[first] = {**records[first], "event": {"type": "NodeReported"}}
    assert order_of(unyielded, "pool").double_grants == 1
    assert order_of(records, "another") == Order(jobs=[])
