"""Nodes and clients around one real group, for tests: they behave as agents and clients do, with faults.

``Node`` is an agent with one device that holds one job's state at a time; it works on one operation at a
time, in order, and what it says travels on a stream that may be cut. ``World`` carries out the effects
and judges: it knows the truth about every device and what every client believes; it checks each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import ReasonCode
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.group import (
    Group,
    GroupRules,
    Rejected,
    new_group,
    next_deadline,
    restarted,
    resume,
    step,
)
from coslice.core.group_state import PARKED, drain_of, frozen_lease, open_asks, share_of, view_of
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, OpId, RequestId, SessionId
from coslice.core.invariants import check_group_step
from coslice.core.outcome import Step
from coslice.core.policy import Fifo, Policy

LIVE, SAVED, LOST = ContextState.LIVE, ContextState.SAVED, ContextState.LOST
RULES = GroupRules(max_hold=300.0, quantum=20.0, stuck_retry=15.0)


@dataclass
class Node:
    name: NodeId
    contexts: dict[JobId, ContextState] = field(default_factory=dict)
    incarnations: dict[JobId, Incarnation] = field(default_factory=dict)
    ops: list[fx.MakeResident] = field(default_factory=list)
    answers: dict[OpId, ev.OpSucceeded | ev.OpFailed] = field(default_factory=dict)
    epoch: int = 0
    version: int = 0
    up: bool = False
    mail: list[ev.GroupEvent] = field(default_factory=list)
    stuck: JobId | None = None
    ended: list[ev.EndedProcess] = field(default_factory=list)
    whole: bool = False
    """Its backend freezes processes as they are."""

    def facts(self) -> NodeFacts:
        contexts = tuple(
            ContextFact(
                job=j, state=s, bytes=100, pids=(1,), incarnation=self.incarnations[j], whole=self.whole
            )
            for j, s in sorted(self.contexts.items())
        )
        ended = tuple(self.ended)
        return NodeFacts(version=self.version, contexts=contexts, ended=ended, device_budget=150)

    def say(self, event: ev.GroupEvent) -> None:
        if self.up:
            self.mail.append(event)

    def push(self) -> None:
        self.version += 1
        self.say(ev.NodeReported(at=0.0, node=self.name, facts=self.facts()))

    def told(self, command: fx.MakeResident) -> None:
        if not self.up or any(o.op == command.op for o in self.ops):
            return
        if command.op in self.answers:
            self.say(self.answers[command.op])
        elif command.epoch > self.epoch:
            self.epoch = command.epoch
            self.ops.append(command)
        else:
            late = ev.OpFailed(at=0.0, op=command.op, node=self.name, culprit=command.job, reason="too old")
            self.say(late)

    def work(self, fault: str) -> None:
        """Finish the first operation; ``fault``: none, incoming, evictee or stuck."""
        command = self.ops.pop(0)
        out = [j for j, s in self.contexts.items() if s is LIVE and j != command.job]
        saved = self.contexts.get(command.job) is SAVED
        if out and (fault == "stuck" or self.stuck in out):
            self.stuck = out[0]
            self.answer(command, culprit=out[0], stuck=True)
            return
        if out and fault == "evictee":
            self.contexts[out[0]] = LOST
            self.answer(command, culprit=out[0], stuck=False)
            return
        for job in out:
            self.contexts[job] = SAVED
        if fault == "incoming":
            if command.job in self.contexts:
                self.contexts[command.job] = LOST
            self.answer(command, culprit=command.job, stuck=False)
            return
        if saved:
            self.contexts[command.job] = LIVE
        moved = {"restored": saved, "bytes_in": 100 * saved, "bytes_out": 100 * len(out)}
        self.version += 1
        done = ev.OpSucceeded(at=0.0, op=command.op, node=self.name, facts=self.facts(), **moved)
        self.answers[command.op] = done
        self.say(done)

    def answer(self, command: fx.MakeResident, *, culprit: JobId, stuck: bool) -> None:
        self.version += 1
        failed = ev.OpFailed(
            at=0.0,
            op=command.op,
            node=self.name,
            culprit=culprit,
            stuck=stuck,
            pid=7,
            reason="injected",
            facts=self.facts(),
        )
        self.answers[command.op] = failed
        self.say(failed)


@dataclass
class Client:
    """One process of a job, with what it believes."""

    session: SessionId
    job: JobId
    incarnation: Incarnation
    world: int = 0
    connected: bool = True
    count: int = 0
    asking: RequestId | None = None
    holding: tuple[RequestId, Epoch] | None = None
    confirmed: bool = False
    last_yield: Epoch | None = None
    home: str = ""
    pid: int = 0
    refused: list[fx.RefuseCode] = field(default_factory=list)


class World:
    def __init__(self, *nodes: str, rules: GroupRules = RULES, policy: Policy | None = None) -> None:
        self.now = 0.0
        self.policy = policy or Fifo()
        self.nodes = {NodeId(n): Node(NodeId(n)) for n in nodes}
        self.group: Group = new_group(GroupId("g"), nodes=tuple(self.nodes), rules=rules)
        self.clients: dict[SessionId, Client] = {}
        self.gone: set[RequestId] = set()  # abandoned: never to be granted again
        self.last: Step[Group, fx.GroupEffect] = Step(self.group)
        self.reasons: list[fx.Reason] = []
        self.effects: list[fx.GroupEffect] = []

    # ── one event ──

    def apply(self, event: ev.GroupEvent) -> Step[Group, fx.GroupEffect]:
        before = self.group
        frozen = msgspec.json.encode(before)
        taken = step(before, event, self.policy)
        assert step(before, event, self.policy) == taken, "same state and event, same outcome"
        assert msgspec.json.encode(before) == frozen, "a step changes nothing it was given"
        assert msgspec.json.decode(msgspec.json.encode(taken.state), type=Group) == taken.state
        check_group_step(before, event, taken)
        self.group, self.last = taken.state, taken
        known = {s for r in self.group.jobs for s in r.sessions}
        for client in self.clients.values():
            if client.session not in known:
                client.last_yield = None  # a session that ended is forgotten, and with it what it had done
        self.reasons += taken.reasons
        self.effects += taken.effects
        for effect in taken.effects:
            self.carry_out(effect)
        return taken

    def carry_out(self, effect: fx.GroupEffect) -> None:
        match effect:
            case fx.MakeResident():
                self.nodes[effect.node].told(effect)
            case fx.Grant():
                self.judge(effect)
                client = self.clients[effect.session]
                if client.connected and client.asking == effect.request:
                    client.asking, client.confirmed = None, False
                    client.holding = (effect.request, effect.epoch)
            case fx.Refuse():
                client = self.clients[effect.session]
                client.refused.append(effect.code)
                if client.asking == effect.request:
                    client.asking = None
            case fx.LoseLease():
                client = self.clients[effect.session]
                if client.connected and client.holding and client.holding[1] == effect.epoch:
                    client.holding = None
            case fx.ForgetJob():
                node = self.nodes[effect.node]
                if node.contexts.get(effect.job) is LOST:
                    del node.contexts[effect.job]
                    node.push()
            case fx.AskYield():
                pass

    def judge(self, grant: fx.Grant) -> None:
        assert grant.request not in self.gone, "5: granted after the caller left"
        for name in self.serving():
            view = view_of(self.group, name)
            if view is not None and view.outstanding and grant.reason.code is ReasonCode.JOINED:
                continue  # it came (back) to the group in the middle of this lease and is being made right
            for job, state in self.nodes[name].contexts.items():
                if job == grant.job:
                    assert state not in PARKED, f"2: {job} is granted but parked on {name}"
                else:
                    assert state is not LIVE, f"3: {grant.job} is granted while {job} is loaded on {name}"
        for other in self.clients.values():
            frozen = frozen_lease(self.group, other.job) is not None
            if other.connected and other.holding and other.job != grant.job and not frozen:
                raise AssertionError(f"1: {other.job} believes to hold the lock that {grant.job} gets")

    # ── what clients do ──

    def client(
        self, session: str, *, job: str, incarnation: str = "", world: int = 0, home: str = "", pid: int = 0
    ) -> Client:
        made = Client(SessionId(session), JobId(job), Incarnation(incarnation or f"{job}-1"), world)
        made.home, made.pid = home, pid
        return self.clients.setdefault(made.session, made)

    def ask(self, client: Client, **more: bool) -> Step[Group, fx.GroupEffect]:
        if client.asking is None:
            client.count += 1
            client.asking = RequestId(f"{client.session}/{client.count}")
        return self.apply(
            ev.AcquireRequested(
                at=self.now,
                job=client.job,
                incarnation=client.incarnation,
                session=client.session,
                request=client.asking,
                world=client.world,
                node=client.home,
                pid=client.pid,
                start_time=client.pid,
                **more,
            )
        )

    def confirm(self, client: Client) -> None:
        assert client.holding
        client.confirmed = True
        self.apply(ev.GrantConfirmed(at=self.now, request=client.holding[0]))

    def yield_(self, client: Client) -> None:
        """A client hears of a lease once all that it asked for with it is granted."""
        assert client.holding
        share = share_of(self.group, client.session)
        if share is not None and share.more:
            self.apply(ev.AcquireCompleted(at=self.now, request=share.request))
        client.last_yield, client.holding = client.holding[1], None
        self.apply(
            ev.LeaseYielded(at=self.now, job=client.job, session=client.session, epoch=client.last_yield)
        )

    def abandon(self, client: Client) -> None:
        request = client.asking or (client.holding and client.holding[0])
        assert request
        client.asking, client.holding = None, None
        self.gone.add(request)
        self.apply(ev.AcquireAbandoned(at=self.now, request=request))

    def drop(self, client: Client) -> None:
        client.connected = False
        self.apply(ev.SessionLost(at=self.now, session=client.session))

    def reconnect(self, client: Client) -> None:
        """As the client library does: hello, learn what is still held, ask again for what is open."""
        client.connected = True
        self.apply(ev.SessionResumed(at=self.now, session=client.session))
        share = share_of(self.group, client.session)
        if client.holding and (share is None or share.epoch != client.holding[1]):
            client.holding = None
        if client.asking:
            self.ask(client)

    def close(self, client: Client) -> None:
        client.asking = client.holding = None
        del self.clients[client.session]
        self.apply(ev.SessionClosed(at=self.now, session=client.session))

    def use_device(self, client: Client) -> None:
        """The holder's processes register and allocate, wherever the lock protects them."""
        for name in self.serving():
            node = self.nodes[name]
            if node.contexts.get(client.job) in (None, LOST):
                node.contexts[client.job] = LIVE
                node.incarnations[client.job] = client.incarnation
                node.push()

    def process_ends(self, name: str, client: Client) -> None:
        """The agent of a node sees the end of the client's process."""
        node = self.nodes[NodeId(name)]
        node.ended.append(
            ev.EndedProcess(
                job=client.job, incarnation=client.incarnation, pid=client.pid, start_time=client.pid
            )
        )
        node.push()

    # ── what nodes, time and operators do ──

    def attach(self, name: str) -> None:
        node = self.nodes[NodeId(name)]
        node.up, node.mail = True, []
        self.apply(ev.NodeAttached(at=self.now, node=node.name, epoch=Epoch(node.epoch), facts=node.facts()))

    def detach(self, name: str) -> None:
        node = self.nodes[NodeId(name)]
        node.up, node.mail = False, []
        self.apply(ev.NodeDetached(at=self.now, node=node.name))

    def deliver(self, node: Node) -> None:
        self.apply(msgspec.structs.replace(node.mail.pop(0), at=self.now))

    def settle(self) -> None:
        """Let every connected node finish and report all that it was told."""
        while busy := [n for n in self.nodes.values() if n.ops or n.mail]:
            for node in busy:
                if node.ops:
                    node.work("none")
                while node.mail:
                    self.deliver(node)

    def settle_only(self, name: str) -> None:
        node = self.nodes[NodeId(name)]
        while node.ops:
            node.work("none")
        while node.mail:
            self.deliver(node)

    def wait(self, seconds: float) -> None:
        """Time passes, deadline by deadline."""
        until = self.now + seconds
        while (due := next_deadline(self.group)) is not None and due <= until:
            self.now = max(self.now, due)
            self.apply(ev.DeadlinePassed(at=self.now))
            after = next_deadline(self.group)
            assert after is None or after > self.now, "what was due is done"
        self.now = until

    def restart(self, taken_up: Callable[[Group, float], Group] = restarted) -> None:
        """The orchestrator is killed and started again: every stream is cut, the clock begins anew."""
        stored = msgspec.json.decode(msgspec.json.encode(self.group), type=Group)
        self.now = 0.0
        self.group = taken_up(stored, self.now)
        for client in self.clients.values():
            client.connected = False
        for node in self.nodes.values():
            node.up, node.mail = False, []
        for effect in resume(self.group):
            self.carry_out(effect)

    def serving(self) -> list[NodeId]:
        return [n for n in self.group.nodes if drain_of(self.group, n) is None]

    def drain(self, name: str, *, reason: str = "") -> Step[Group, fx.GroupEffect]:
        return self.apply(ev.NodeDrained(at=self.now, node=NodeId(name), reason=reason))

    def undrain(self, name: str) -> Step[Group, fx.GroupEffect]:
        return self.apply(ev.NodeUndrained(at=self.now, node=NodeId(name)))

    def open_requests(self) -> list[RequestId]:
        return [a.request for a in open_asks(self.group)]


__all__ = ["LIVE", "LOST", "RULES", "SAVED", "Client", "Node", "Rejected", "World"]
