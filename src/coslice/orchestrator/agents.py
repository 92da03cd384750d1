"""The agents' streams: commands down, reports up. One link per node.

No command is kept here: what a node still has to do follows from its group's state, and the core says it
again when the node attaches. Commands are named by their operation, so repeating them is harmless. What a
report means is the core's business.
"""

import logging

import grpc

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import drain_of
from coslice.core.ids import Epoch, GroupId, JobId, NodeId, check_name
from coslice.orchestrator import convert
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.outbox import End, Outbox
from coslice.runtime.clock import Clock
from coslice.wire import protocol
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)


class Link:
    """One agent's stream while it lasts."""

    def __init__(self, hello: pb.AgentHello, peer: str) -> None:
        self.node = NodeId(hello.node)
        self.instance, self.accelerator, self.peer = hello.instance, hello.accelerator, peer
        self.outbox: Outbox[pb.AgentCommand] = Outbox()
        self.locks: dict[GroupId, GroupLock] = {}
        self.before: dict[GroupId, GroupLock] = {}
        """Groups of the stream that this one replaced."""


class Agents:
    def __init__(self, *, groups: Groups, clock: Clock, instance: str) -> None:
        self._groups, self._clock, self._instance = groups, clock, instance
        self._links: dict[NodeId, Link] = {}
        self._expected: dict[GroupId, JobId] = {}
        self._stopping = False

    def __len__(self) -> int:
        """Nodes that are attached."""
        return len(self._links)

    def attached(self, node: NodeId) -> bool:
        return node in self._links

    def command(self, group: GroupId, effect: fx.MakeResident, traceparent: str = "") -> None:
        """Send it if the node is there; if not, it follows from the group's state when the node attaches."""
        link = self._links.get(effect.node)
        if link is not None and group in link.locks:
            link.outbox.put(convert.make_resident(group, effect, traceparent))

    def forget(self, group: GroupId, effect: fx.ForgetJob) -> None:
        link = self._links.get(effect.node)
        if link is not None and group in link.locks:
            link.outbox.put(pb.AgentCommand(forget_job=pb.ForgetJob(group=group, job=effect.job)))

    def changed(self, group: GroupId) -> None:
        """Tell nodes that have saved state on disk who is next, so that it can be fetched meanwhile. Not
        drained ones: nobody is next there."""
        lock = self._groups.get(group)
        if lock is None or not lock.state.waiters:
            self._expected.pop(group, None)
            return
        job = lock.state.waiters[0].job
        if self._expected.get(group) == job:
            return
        self._expected[group] = job
        for view in lock.state.views:
            if not view.facts.disk_used or drain_of(lock.state, view.node) is not None:
                continue
            if (link := self._links.get(view.node)) and group in link.locks:
                link.outbox.put(pb.AgentCommand(expect=pb.Expect(group=group, job=job)))

    def refusal(self, hello: pb.AgentHello) -> str | None:
        """Why this agent cannot attach, or None. Raises ``ValueError`` for malformed names."""
        node = NodeId(check_name("node", hello.node))
        convert.token("instance", hello.instance)
        for offer in hello.groups:
            check_name("group", offer.group)
        other = self._links.get(node)
        if other is None or other.instance == hello.instance:
            return None
        return (
            f"node {node} is attached already: agent instance {other.instance} from {other.peer}. "
            "Stop that agent, or give this one another node name"
        )

    def admit(self, hello: pb.AgentHello, peer: str) -> Link:
        """The link of an accepted hello. A stream that the agent had before ends: it may be half-open."""
        link = Link(hello, peer)
        old = self._links.get(link.node)
        if old is not None:
            link.before = old.locks
            old.outbox.close(End(grpc.StatusCode.ABORTED, "another stream of this agent took over"))
        self._links[link.node] = link
        return link

    async def join(self, link: Link, hello: pb.AgentHello) -> None:
        """The node joins the groups it offers and hears what it has yet to do there."""
        offers: list[pb.GroupOffer] = []
        for offer in hello.groups:
            fresh = sum(1 for one in offers if self._groups.get(one.group) is None)
            if self._groups.accepts(offer.group, link.node, beside=fresh):
                offers.append(offer)
        unknown = [offer.group for offer in hello.groups if offer not in offers]
        if unknown:
            log.warning("node %s offers groups that are not open to it: %s", link.node, ", ".join(unknown))
        welcome = pb.AgentWelcome(
            orchestrator=self._instance, unknown_groups=unknown, protocol=protocol.PROTOCOL
        )
        link.outbox.put(pb.AgentCommand(welcome=welcome))
        for offer in offers:
            await self._join(link, offer)
        for group, lock in link.before.items():
            if group not in link.locks:
                lock.tell(ev.NodeDetached(at=self._clock.now(), node=link.node))

    async def _join(self, link: Link, offer: pb.GroupOffer) -> None:
        if self._links.get(link.node) is not link:
            return
        lock = self._groups.open(offer.group)
        link.locks[lock.id] = lock
        if (out := self._groups.drained(link.node)) is not None and drain_of(lock.state, link.node) is None:
            at = self._clock.now()
            await lock.post(ev.NodeDrained(at=at, node=link.node, reason=out.reason, by=out.by))
        await lock.post(
            ev.NodeAttached(
                at=self._clock.now(),
                node=link.node,
                epoch=Epoch(max(0, offer.epoch)),
                facts=convert.facts(offer.residency, link.accelerator),
            )
        )

    def report(self, link: Link, message: pb.AgentMessage) -> None:
        """Hand a report to its group. Of a link that was replaced, or for a group not its own: nothing."""
        if self._links.get(link.node) is not link:
            return
        at, kind = self._clock.now(), message.WhichOneof("kind")
        if kind == "echo":  # what came before it is with its groups already, ahead of whatever they hear next
            link.outbox.put(pb.AgentCommand(echo=message.echo))
        elif kind == "done" and (lock := link.locks.get(GroupId(message.done.group))):
            lock.tell(convert.op_succeeded(message.done, link.node, link.accelerator, at=at))
        elif kind == "failed" and (lock := link.locks.get(GroupId(message.failed.group))):
            lock.tell(convert.op_failed(message.failed, link.node, link.accelerator, at=at))
        elif kind == "residency" and (lock := link.locks.get(GroupId(message.residency.group))):
            facts = convert.facts(message.residency, link.accelerator)
            lock.tell(ev.NodeReported(at=at, node=link.node, facts=facts))
        else:
            log.warning("node %s sent %s for a group it does not serve; ignored", link.node, kind)

    def detached(self, link: Link) -> None:
        """The stream is gone. One that was replaced says nothing."""
        if self._links.get(link.node) is not link:
            return
        del self._links[link.node]
        if not self._stopping:
            for lock in link.locks.values():
                lock.tell(ev.NodeDetached(at=self._clock.now(), node=link.node))

    def stop(self, end: End) -> None:
        self._stopping = True
        for link in self._links.values():
            link.outbox.close(end)
