"""When two states of an explored world are the same: a key in which only what can matter is left.

Epochs, versions of facts and numbers of requests are replaced by their rank (the machines only compare them,
and new ones are above all others), times by what is left of them, prose and statistics are dropped, and so is
what nobody can refer to any more (an old report, an old yield, an abandoned request). Jobs are equal, nodes
are equal: of all ways to name them the least key is taken.
"""

from hashlib import blake2b
from itertools import groupby, permutations, product
from typing import Any

import msgspec

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group import Held, Resident, Swapping
from coslice.core.group_state import active, drain_of, occupant, open_asks
from coslice.core.holdings import Context, Leaving, Live, Lost, Operation, Partly, Returning, Saved
from coslice.core.ids import Epoch, JobId, NodeId
from coslice.core.policy import Waiter
from coslice.proof import wire
from coslice.proof.client import Client
from coslice.proof.device import CLIENTS
from coslice.proof.joint import World
from coslice.proof.node import Node
from coslice.proof.served import Served
from coslice.proof.shell import Person

Key = bytes
Part = tuple[Any, ...]
"""Nested tuples of numbers, truth values and names of kinds."""

_STATES = {state: i for i, state in enumerate(ev.ContextState)}
_encode = msgspec.msgpack.Encoder().encode


class Known(msgspec.Struct, frozen=True):
    """What the explorer knows of a state beside its world."""

    left: dict[JobId, int]
    """Acquires of each job."""
    stubborn: tuple[tuple[NodeId, JobId], ...]
    echo: NodeId | None
    budget: tuple[int, ...]


def key_of(world: World, known: Known) -> Key:
    look = _Look(world, known)
    orders = look.orders()
    if len(orders) == 1:
        return _Naming(look, orders[0]).key()
    return min([_Naming(look, order).key() for order in orders])


def named_key_of(world: World, known: Known) -> Key:
    """The same with the names as they are: to see that calling names equal loses nothing."""
    return _Naming(_Look(world, known), world.setup.jobs).key(merge=False)


_KINDS: dict[type, int] = {kind: i for i, kind in enumerate((Live, Leaving, Saved, Returning, Lost, Partly))}


class _Look:
    """A state, sorted by job and by node once for all ways to name the jobs."""

    def __init__(self, world: World, known: Known) -> None:
        self.world, self.known = world, known
        self.group = group = world.shell.locks[world.setup.groups[0]]
        self.clients: dict[str, Client] = {c.job: c for c in world.clients.values()}
        self.records = {record.job: record for record in group.jobs}
        self.people: dict[str, Person] = {p.job: p for p in world.shell.people.values()}
        self.lost = {s.session.split(".")[0] for s in group.lost}
        self.views = {view.node: view for view in group.views}
        self.calm = not self._may_end()
        """No process will end any more while somebody waits for its session."""
        self.asks = {a.request for a in open_asks(group)}
        if isinstance(group.occupancy, Held):
            self.asks.update(h.request for h in active(group.occupancy))
        self.asks.update(h.request for lease in group.frozen for h in active(lease))

    def _may_end(self) -> bool:
        """May a process still end while its session is waited for? Then it matters which are clients' own."""
        if self.known.budget[0] > 0 or self.known.stubborn:
            return True
        for node in self.world.nodes.values():
            for served in node.served.values():
                if served.kills or served.news:
                    return True
                for context in served.holdings.contexts:
                    place = context.place
                    if isinstance(place, Lost) or (
                        isinstance(place, Leaving | Returning)
                        and (served.asked is None or place.attempt != 1)
                    ):
                        return True
        return False

    def orders(self) -> list[tuple[JobId, ...]]:
        """The ways to name the jobs that must be tried: those that their marks do not tell apart."""
        marks = sorted([(self._mark(job), job) for job in self.world.setup.jobs])
        ties = [[job for _, job in group] for _, group in groupby(marks, key=_first)]
        if len(ties) == len(marks):
            return [tuple([job for _, job in marks])]
        choices = product(*(permutations(tie) for tie in ties))
        return [tuple(job for tie in choice for job in tie) for choice in choices]

    def _mark(self, job: JobId) -> Part:
        """The same for the same job under another name."""
        place = -1
        for i, waiter in enumerate(self.group.waiters):
            if waiter.job == job:
                place = i
        client = self.clients.get(job)
        doing = (-1,) if client is None else (client.inside, client.ask is not None, len(client.stream.down))
        there = sorted(
            [
                _KINDS[type(context.place)]
                for node in self.world.nodes.values()
                for served in node.served.values()
                for context in served.holdings.contexts
                if context.job == job
            ]
        )
        return self.known.left[job], place, occupant(self.group) == job, doing, there


def _first(mark: tuple[Part, JobId]) -> Part:
    return mark[0]


class _Naming:
    """The world with its jobs numbered in one order."""

    def __init__(self, look: _Look, order: tuple[JobId, ...]) -> None:
        self.look, self.world, self.known, self.group = look, look.world, look.known, look.group
        self.job: dict[str, int] = {job: i for i, job in enumerate(order)} | {"": -1}
        self.order = order
        self.requests: dict[str, list[int]] = {}
        self.epochs: list[int] = []

    def key(self, *, merge: bool = True) -> Key:
        """The epochs stand in lists beside the parts, in the order of the walk: only they are ranked."""
        whole = (self.known.budget, self._lock(), tuple([self._job(job) for job in self.order]))
        mentioned = [self.epochs]
        nodes = []
        for node in self.world.nodes.values():
            self.epochs = []
            nodes.append(self._node(node))
            mentioned.append(self.epochs)
        rank = {epoch: i for i, epoch in enumerate(sorted({0}.union(*mentioned)))}
        ranks = [[rank[epoch] for epoch in epochs] for epochs in mentioned]
        packed = [_encode((node, r)) for node, r in zip(nodes, ranks[1:], strict=True)]
        if merge:
            packed.sort()
        return blake2b(_encode((whole, ranks[0])) + b"".join(packed), digest_size=16).digest()

    # ── numbers that stand for something ──

    def _epoch(self, epoch: int) -> bool:
        self.epochs.append(epoch)
        return True

    def _request(self, name: str) -> Part:
        """Of a job's requests only equality counts: which one it is in the order of this walk."""
        session, number = name.rsplit("/", 1)
        seen = self.requests.setdefault(session, [])
        if int(number) not in seen:
            seen.append(int(number))
        return self.job[session.split(".")[0]], seen.index(int(number))

    # ── the lock ──

    def _lock(self) -> Part:
        group, now = self.group, self.group.occupancy
        on: Part
        match now:
            case Held():
                on = ("held", *self._lease(now))
            case Swapping():
                waiter = None if now.waiter is None else self._waiter(now.waiter)
                on = (
                    "swapping",
                    self.job[now.incoming],
                    self.job[now.outgoing or ""],
                    self._epoch(now.epoch),
                    waiter,
                )
            case Resident(job=job):
                on = ("resident", self.job[job])
            case _:
                on = ("empty",)
        waiting = tuple((self.job[w.job], self._waiter(w)) for w in group.waiters)
        frozen = tuple(self._lease(lease) for lease in group.frozen)
        return on, waiting, frozen, group.settle_by is not None, self._epoch(group.epoch)

    def _lease(self, held: Held) -> Part:
        shares = tuple(
            (
                self._request(h.request),
                self._epoch(h.epoch),
                h.state,
                h.confirmed,
                h.confirm_by is not None,
            )
            for h in held.holders
        )
        return self.job[held.job], self._epoch(held.epoch), shares

    def _waiter(self, waiter: Waiter) -> Part:
        return tuple(self._request(a.request) for a in waiter.asks), waiter.attempts

    # ── a job: its client, its record, its session ──

    def _job(self, job: JobId) -> Part:
        look = self.look
        record, client, person = look.records.get(job), look.clients.get(job), look.people.get(job)
        known: Part = ()
        if record is not None:
            yields: Part = ()
            if client is not None and client.givings:
                pending = {epoch for giving in client.givings for _, epoch in giving.leases}
                yields = tuple(self._epoch(y.epoch) for y in record.yields if y.epoch in pending)
            known = (len(record.sessions), record.fault is not None, yields)
        met = () if person is None else (person.connected, len(person.groups))
        mine = () if client is None else self._client(client)
        return self.known.left[job], known, job in look.lost, met, mine

    def _client(self, client: Client) -> Part:
        return (
            client.stream.live,
            client.stream.greeted,
            None if client.ask is None else self._request(client.ask.request),
            tuple((self._request(r), self._epoch(e)) for r, e in client.holds.values()),
            client.inside,
            tuple(self._epoch(epoch) for giving in client.givings for _, epoch in giving.leases),
            tuple(self._request(r) for r in client.abandons if r in self.look.asks),
            client.refused is not None,
            tuple(self._server(m) for m in client.stream.down),
        )

    def _server(self, message: wire.Down) -> Part:
        match message:
            case wire.Granted():
                epochs = tuple(self._epoch(epoch) for _, epoch in message.leases)
                return "granted", self._request(message.request), epochs
            case wire.LeaseLost():
                return "lost", self._epoch(message.epoch)
            case wire.Welcome():
                return "welcome", tuple(self._epoch(epoch) for _, epoch in message.held)
            case wire.Refused():
                return "refused", self._request(message.request)
            case wire.Yielded():
                return "yielded", self._request(message.ident)
            case _:
                return (type(message).__name__,)

    # ── a node: what the lock knows of it, its stream, its holdings, the truth ──

    def _node(self, node: Node) -> Part:
        view = self.look.views.get(node.name)
        now, served = self.group.occupancy, next(iter(node.served.values()))
        versions = sorted(self._versions(node, served))
        seen: Part = ()
        if view is not None:
            facts = self._facts(view.facts, versions)
            seen = (view.attached, self._epoch(view.outstanding), facts)
        pending = isinstance(now, Swapping) and node.name in now.pending
        stuck = tuple(self.job[s.job] for s in self.group.stuck if s.node == node.name)
        drained = drain_of(self.group, node.name)
        out: Part = () if drained is None else (self._epoch(drained.epoch), self._at_home(node))
        stream = node.stream
        down = tuple(
            (self.job[m.command.job], self._epoch(m.command.epoch), self._jobs(m.command.freeze))
            for m in stream.down
            if isinstance(m, wire.Told)
        )
        back = tuple(self._said(m, versions) for m in stream.back if isinstance(m, wire.Said))
        talk = (stream.live, stream.greeted, node.name in self.world.shell.attached, down, back)
        stays = tuple(sorted(self.job[job] for name, job in self.known.stubborn if name == node.name))
        mine = (self._holdings(served, down), self._truth(served), self._dead(served.holdings.ended))
        homes = () if self.look.calm else self._homes(node)
        return seen, pending, stuck, out, talk, mine, stays, self.known.echo == node.name, homes

    def _dead(self, ended: tuple[ev.EndedProcess, ...]) -> Part:
        """Of the processes that were seen to end only those matter whose sessions are still known."""
        if not ended:
            return ()
        known = {(p.pid, r.job) for r in self.group.jobs for p in r.processes}
        return tuple(sorted([self.job[e.job] for e in ended if (e.pid, e.job) in known]))

    def _homes(self, node: Node) -> Part:
        """Whose own process this node has, or is to have; any other process of a job ends with no word."""
        served = next(iter(node.served.values()))
        begun = {p.job for n in self.world.nodes.values() for s in n.served.values() for p in s.own()}
        mine = [self.job[p.job] for p in served.own()]
        mine += [
            self.job[c.job] for c in self.look.clients.values() if c.home == node.name and c.job not in begun
        ]
        news = [
            self.job[e.job]
            for e in served.news
            if isinstance(e, ev.MemberGone) and int(e.member.rpartition("/")[2]) > CLIENTS
        ]
        return tuple(sorted(mine)), tuple(sorted(news))

    def _at_home(self, node: Node) -> Part:
        """Who has a process there that asks, or will: on a drained node that alone keeps it waiting."""
        known = {r.job for r in self.group.jobs for p in r.processes if p.node == node.name}
        asks = {c.job for c in self.look.clients.values() if c.home == node.name}
        return self._jobs(tuple(known | asks))

    def _versions(self, node: Node, served: Served) -> set[int]:
        found = {0, served.holdings.version}
        view = self.look.views.get(node.name)
        if view is not None:
            found.add(view.facts.version)
        for message in node.stream.back:
            if isinstance(message, wire.Said) and message.event.facts is not None:
                found.add(message.event.facts.version)
        return found

    def _facts(self, facts: ev.NodeFacts | None, versions: list[int]) -> Part:
        if facts is None:
            return ()
        dead = self._dead(facts.ended)
        there = tuple((self.job[c.job], _STATES[c.state]) for c in facts.contexts)
        return versions.index(facts.version), there, dead

    def _said(self, said: wire.Said, versions: list[int]) -> Part:
        event = said.event
        facts = self._facts(event.facts, versions)
        match event:
            case ev.OpSucceeded():
                return "done", self._epoch(_epoch_in(event.op)), facts
            case ev.OpFailed():
                return "failed", self._epoch(_epoch_in(event.op)), self.job[event.culprit], event.stuck, facts
            case _:
                return "facts", facts

    def _holdings(self, served: Served, down: Part) -> Part:
        held = served.holdings
        contexts = tuple(self._context(served, context) for context in held.contexts)
        said: Part = ()
        now = self.group.occupancy
        wanted = now.epoch if isinstance(now, Held | Swapping) else 0
        if held.finished is not None:
            told = {m.command.epoch for m in self._told(served.holdings.node)}
            if held.finished.epoch == wanted or held.finished.epoch in told:
                culprit = held.finished.culprit if isinstance(held.finished, fx.ReportFailed) else JobId("")
                kind = isinstance(held.finished, fx.ReportDone)
                said = (kind, self._epoch(held.finished.epoch), self.job[culprit])
        ops = tuple(self._operation(op) for op in (held.running, held.queued))
        recent = tuple(self.job[job] for job in held.recent)
        return contexts, said, ops, recent, self._epoch(held.epoch)

    def _told(self, node: NodeId) -> list[wire.Told]:
        return [m for m in self.world.nodes[node].stream.down if isinstance(m, wire.Told)]

    def _operation(self, op: Operation | None) -> Part:
        if op is None:
            return ()
        return self.job[op.job], self._epoch(op.epoch), op.restores, self._jobs(op.freeze)

    def _jobs(self, jobs: tuple[JobId, ...]) -> Part:
        return tuple(sorted([self.job[job] for job in jobs]))

    def _context(self, served: Served, context: Context) -> Part:
        members = tuple((m.parked, m.part, m.seen) for m in context.members)
        place = context.place
        what: Part
        match place:
            case Live(whole=whole):
                what = (whole, self._prose(place.reason))
            case Leaving():
                since = place.stuck_since
                what = (
                    place.attempt,
                    place.effort,
                    round(place.until - served.at, 3),
                    None if since is None else round(since - served.at, 3),
                    place.touched,
                    len(place.of),
                    self._prose(place.reason),
                )
            case Returning():
                what = (
                    place.attempt,
                    place.effort,
                    round(place.until - served.at, 3),
                    self._prose(place.reason),
                )
            case _:
                what = ()
        return self.job[context.job], _KINDS[type(place)], members, context.use > 0, what

    def _prose(self, reason: str) -> str:
        for job, number in self.job.items():
            if job and reason:
                reason = reason.replace(job, f"#{number}")
        return reason

    def _truth(self, served: Served) -> Part:
        alive = sorted(
            (self.job[p.job], p.parked, p.kept == p.content, p.lost) for p in served.device.alive.values()
        )
        asked: Part = ()
        if served.asked is not None:
            asked = (
                self.job[served.asked.job],
                isinstance(served.asked, fx.RunSnapshot),
                self._epoch(_epoch_in(served.asked.op)),
                served.asked.attempt,
                len(served.asked_of),
            )
        news = tuple((type(e).__name__, self.job[getattr(e, "job", "")]) for e in served.news)
        return tuple(alive), asked, tuple(self.job[j] for j in served.kills), news


def _epoch_in(op: str) -> Epoch:
    """``group/epoch/node``."""
    return Epoch(int(op.split("/")[1]))
