"""Everything that can happen in a world, each as one draw: work that goes on, and trouble.

A seed draws which kinds of trouble it has and how much of each (a run with every kind at once would get
nowhere), the sizes of everything, and then one thing after the other. All choices come from one generator,
so a seed replays exactly.
"""

from collections.abc import Callable
from random import Random

from coslice.core import events as ev
from coslice.core.context import NodeRules, find
from coslice.core.effects import RefuseCode, RunSnapshot
from coslice.core.group import GroupRules, Held
from coslice.core.group_state import drain_of, frozen_lease, occupant, view_of
from coslice.core.ids import Epoch, GroupId, JobId, NodeId, SessionId
from coslice.core.policy import NAMES
from coslice.sim import wire
from coslice.sim.client import Client
from coslice.sim.device import MIB
from coslice.sim.joint import Setup, World
from coslice.sim.node import Node, Served
from coslice.sim.story import Story

CAPACITY = 100 * MIB
Draw = Callable[[], bool]
NODE_LOSS = 60.0


def setup_for(rng: Random) -> Setup:
    """What kind of cluster the seed has."""
    freezing = rng.random() < 0.3
    groups = 2 if rng.random() < 0.25 else 1
    nodes = rng.choice((1, 1, 2, 2, 3))
    jobs = rng.choice((2, 3, 3, 4))
    return Setup(
        groups=tuple(GroupId(f"g{i}") for i in range(groups)),
        nodes=tuple(NodeId(f"n{i}") for i in range(nodes)),
        jobs=tuple(JobId("abcd"[i]) for i in range(jobs)),
        rules=GroupRules(
            quantum=20.0,
            max_hold=rng.choice((10.0, 60.0)) if freezing else rng.choice((60.0, 200.0)),
            on_overrun=rng.choice(("evict", "evict", "warn")),
            node_loss=NODE_LOSS,
            op_timeout=900.0 if freezing else rng.choice((60.0, 900.0)),
            stuck_retry=15.0,
            max_attempts=rng.choice((2, 3)),
        ),
        node_rules=NodeRules(
            retries=rng.choice((0, 1, 1, 2)),
            on_stuck=rng.choice(("kill", "kill", "wait")),
            stuck_grace=rng.choice((0.0, 12.0)),
            snapshot_timeout=20.0,
            restore_timeout=20.0,
            room_wait=rng.choice((1.0, 5.0)),
        ),
        policy=rng.choice(("fifo", *NAMES)),
        capacity=CAPACITY,
        divisible=frozenset(JobId(name) for name in "abcd" if rng.random() < 0.5),
        whole=frozenset(JobId(name) for name in "abcd" if freezing and rng.random() < 0.7),
    )


class Storm:
    """Draws what happens next. A draw returns False if there was nothing for it to happen to."""

    def __init__(self, seed: int, story: Story) -> None:
        self.rng = Random(seed)
        self.story = story
        self.world = World(setup_for(self.rng), story)
        self._plan()
        for job in self.world.setup.jobs:
            self._start(job)

    def _plan(self) -> None:
        work: tuple[tuple[int, Draw], ...] = (
            (14, self.client_acts),
            (10, self.client_heard),
            (10, self.client_told),
            (10, self.node_heard),
            (8, self.node_told),
            (9, self.move_ends),
            (4, self.agent_learns),
            (5, self.comes_back),
            (3, self.loss_noticed),
            (2, self.time_jumps),
            (2, self.job_starts),
        )
        trouble: tuple[tuple[int, Draw], ...] = (
            (3, self.call_cancelled),
            (2, self.client_stream_breaks),
            (2, self.agent_stream_breaks),
            (1, self.orchestrator_crashes),
            (1, self.agent_crashes),
            (1, self.client_dies),
            (1, self.job_dies),
            (1, self.process_dies),
            (2, self.message_doubled),
            (2, self.message_overtaken),
            (1, self.message_vanishes),
            (4, self.move_fails),
            (1, self.move_ends_late),
            (1, self.agent_hangs),
            (1, self.client_stops),
            (1, self.loop_stalls),
            (1, self.nodes_change),
            (3, self.node_drained),
            (1, self.job_forgotten),
            (1, self.job_evicted),
            (2, self.stranger_yields),
            (1, self.out_of_memory),
            (2, self.newcomer_registers),
            (1, self.hangs_up),
        )
        self._work = [draw for weight, draw in work for _ in range(weight)]
        chosen = [t for t in trouble if self.rng.random() < 0.4] or [self.rng.choice(trouble)]
        self._trouble = [draw for weight, draw in chosen for _ in range(weight)]
        self._much = self.rng.choice((0.03, 0.08, 0.16))

    def step(self) -> None:
        """One thing happens, a moment after the last."""
        world, rng = self.world, self.rng
        world.advance(rng.random() * 0.2)
        if rng.random() < self._much and rng.choice(self._trouble)():
            return
        for _ in range(12):
            if rng.choice(self._work)():
                return
        self.time_jumps()

    # ── small helps ──

    def _one(self, things: list[Client] | list[Served] | list[Node]) -> int:
        return int(self.rng.random() * len(things))

    def _fault(self, kind: str, text: str) -> bool:
        self.story.fault(self.world.now, kind, text)
        return True

    def _client(self) -> Client | None:
        clients = [c for c in self.world.clients.values() if not c.stopped]
        return clients[self._one(clients)] if clients else None

    def _served(self) -> tuple[Node, Served] | None:
        """A group of an agent that runs."""
        nodes = [n for n in self.world.nodes.values() if n.alive and not n.hung]
        if not nodes:
            return None
        node = nodes[self._one(nodes)]
        served = list(node.served.values())
        return node, served[self._one(served)]

    def _start(self, job: JobId) -> None:
        self.world.start(job, processes=2 if self.rng.random() < 0.25 else 1)

    # ── work ──

    def client_heard(self) -> bool:
        clients = [c for c in self.world.clients.values() if c.stream.back]
        if not clients:
            return False
        self.world.hear_client(clients[self._one(clients)])
        return True

    def client_told(self) -> bool:
        clients = [c for c in self.world.clients.values() if c.stream.down and not c.stopped]
        if not clients:
            return False
        self.world.tell_client(clients[self._one(clients)])
        return True

    def node_heard(self) -> bool:
        nodes = [n for n in self.world.nodes.values() if n.stream.back and not n.stream.torn]
        if not nodes:
            return False
        self.world.hear_node(nodes[self._one(nodes)])
        return True

    def node_told(self) -> bool:
        nodes = [n for n in self.world.nodes.values() if n.stream.down and not n.hung and not n.stream.torn]
        if not nodes:
            return False
        self._tell(nodes[self._one(nodes)])
        return True

    def _tell(self, node: Node, index: int = 0, *, keep: bool = False) -> None:
        self.world.tell_node(node, index, keep=keep)

    def move_ends(self) -> bool:
        found = self._served()
        if found is None or found[1].asked is None:
            return False
        self._finish(*found, "ok")
        return True

    def _finish(self, node: Node, served: Served, how: str) -> None:
        assert served.asked is not None
        inside = self.world.inside(served.group, served.asked.job)
        leaves = self.rng.choice((0, 0, 0, 1, 2, 30)) * MIB  # what the process cannot give back
        served.finish(how, leaves=leaves, inside=inside)
        self.world.after_node(node, served.group)

    def agent_learns(self) -> bool:
        found = self._served()
        if found is None:
            return False
        node, served = found
        if served.kills:
            self.world.finish_kill(node, served.group)
        elif served.news:
            served.learn(int(self.rng.random() * len(served.news)))
            self.world.after_node(node, served.group)
        elif unseen := served.unseen():
            self.world.process_returns(node, served, unseen[int(self.rng.random() * len(unseen))])
            self.world.after_node(node, served.group)
        else:
            return False
        return True

    def comes_back(self) -> bool:
        """Whatever is away returns: a dead or hung agent, a broken stream, a stopped client."""
        world = self.world
        away: list[Callable[[], None]] = []
        for node in world.nodes.values():
            if not node.alive:
                away.append(lambda node=node: node.start(world.now))  # type: ignore[misc]
            elif node.hung:
                away.append(lambda node=node: setattr(node, "hung", False))  # type: ignore[misc]
            elif node.stream.torn:
                away.append(node.stream.cut)
            elif not node.stream.live:
                away.append(lambda node=node: world.attach(node))  # type: ignore[misc]
        for client in world.clients.values():
            if client.stopped:
                away.append(lambda client=client: setattr(client, "stopped", False))  # type: ignore[misc]
            elif not client.stream.live:
                away.append(lambda client=client: world.dial(client))  # type: ignore[misc]
        if not away:
            return False
        away[int(self.rng.random() * len(away))]()
        for node in world.nodes.values():
            node.publish()
        return True

    def loss_noticed(self) -> bool:
        world = self.world
        if sessions := world.unnoticed():
            world.notice_client(sessions[int(self.rng.random() * len(sessions))])
        elif nodes := world.unnoticed_nodes():
            world.notice_node(min(nodes))
        else:
            return False
        return True

    def time_jumps(self) -> bool:
        gap = self.world.next_due() - self.world.now
        if gap > 1000.0:
            self.world.advance(1.0)
            return True
        self.world.advance(max(0.0, gap) if self.rng.random() < 0.7 else self.rng.random() * gap)
        return True

    def job_starts(self) -> bool:
        """A job that ended, or was told that it is at fault, is started again."""
        job = self.rng.choice(self.world.setup.jobs)
        clients = self.world.of_job(job)
        if any(c.refused is None or c.refused is RefuseCode.JOB_RUNNING for c in clients):
            return False
        self._end(job)
        self._start(job)
        return True

    def _end(self, job: JobId) -> None:
        """All its processes exit, in an order and at moments that the agents learn one by one."""
        world = self.world
        for client in world.of_job(job):
            if client.stream.live and not client.stopped and self.rng.random() < 0.5:
                world.goodbye(client)
                client.stream.live = False  # it stays until the orchestrator has read it, or the silence
            if client.session in world.clients:
                world.die(client)
        for node in world.nodes.values():
            for served in node.served.values():
                for process in served.device.of(job):
                    served.bury(process.pid)

    def client_acts(self) -> bool:
        client = self._client()
        if client is None:
            return False
        if client.inside:
            self._works(client)
        elif client.ask is None and client.stream.live and client.refused in _AGAIN:
            self._asks(client)
        else:
            return False
        return True

    def _asks(self, client: Client) -> None:
        groups = self.world.setup.groups
        if self._unheard(client.job):
            return
        wanted = groups if len(groups) > 1 and self.rng.random() < 0.4 else (self.rng.choice(groups),)
        need = self.rng.choice((0, 0, 20, 40)) * MIB
        self.world.client_says(client, client.acquire(wanted, need))

    def _unheard(self, job: JobId) -> bool:
        """Is the word that a process of the job was set aside still on its way? It does not ask then."""
        for node in self.world.nodes.values():
            for served in node.served.values():
                if node.name in self.world.shell.attached and served.device.has_parked(job):
                    view = view_of(self.world.shell.locks[served.group], node.name)
                    if view is not None and view.facts.version < served.holdings.version:
                        return True
        return False

    def _works(self, client: Client) -> None:
        world, rng = self.world, self.rng
        draw = rng.random()
        frozen = any(frozen_lease(world.shell.locks[g], client.job) is not None for g in client.using)
        if draw < (0.03 if frozen else 0.15 if client.job in world.setup.whole else 0.4):
            world.leave(client)
            return
        world.compute(client)
        if not client.on:
            return
        group, name = rng.choice(client.on)
        node = world.nodes[name]
        served = node.served[group]
        stands = frozen_lease(world.shell.locks[group], client.job) is not None
        if stands or not world.is_current(client, group) or not node.alive or node.hung:
            return
        size = rng.randint(1, 60) * MIB
        if not served.device.of(client.job):
            if size <= served.room():
                world.begin(client, node, group, size)
        elif draw < 0.7:
            served.grow(client.job, size)
            world.after_node(node, group)

    # ── trouble: callers and streams ──

    def call_cancelled(self) -> bool:
        client = self._client()
        if client is None or client.ask is None:
            return False
        self.world.client_says(client, client.cancel())
        return self._fault("cancelled call", client.session)

    def client_stream_breaks(self) -> bool:
        client = self._client()
        if client is None or not client.stream.live:
            return False
        client.stream.cut()
        return self._fault("client stream broken", client.session)

    def agent_stream_breaks(self) -> bool:
        nodes = [n for n in self.world.nodes.values() if n.stream.live]
        if not nodes:
            return False
        node = nodes[self._one(nodes)]
        node.stream.cut()
        return self._fault("agent stream broken", node.name)

    def message_doubled(self) -> bool:
        """A request is sent twice, a command or a report arrives twice."""
        draw = self.rng.random()
        if draw < 0.4:
            clients = [c for c in self.world.clients.values() if c.stream.back and c.stream.greeted]
            if not clients:
                return False
            client = clients[self._one(clients)]
            first = client.stream.back[0]
            if isinstance(first, wire.Goodbye | wire.Hello):
                return False
            client.stream.back.insert(0, first)
            return self._fault("message doubled", f"{first}")
        nodes = [n for n in self.world.nodes.values() if n.stream.greeted and not n.stream.torn]
        if not nodes:
            return False
        node = nodes[self._one(nodes)]
        if draw < 0.7 and node.stream.down and not node.hung:
            self._fault("message doubled", f"a command to {node.name}")
            self._tell(node, keep=True)
        elif node.stream.back:
            self._fault("message doubled", f"a report of {node.name}")
            self.world.hear_node(node, keep=True)
        else:
            return False
        return True

    def message_overtaken(self) -> bool:
        """Worse than any stream: a command or a report arrives before an older one."""
        nodes = [n for n in self.world.nodes.values() if n.stream.greeted and not n.stream.torn]
        if not nodes:
            return False
        node = nodes[self._one(nodes)]
        if len(node.stream.down) > 1 and not node.hung:
            self._fault("message overtaken", f"a command to {node.name}")
            self._tell(node, self.rng.randrange(1, len(node.stream.down)))
        elif len(node.stream.back) > 1:
            self._fault("message overtaken", f"a report of {node.name}")
            self.world.hear_node(node, self.rng.randrange(1, len(node.stream.back)))
        else:
            return False
        return True

    def message_vanishes(self) -> bool:
        """Lost inside a stream that seems well for a while, and breaks later."""
        nodes = [n for n in self.world.nodes.values() if n.stream.greeted and not n.stream.torn]
        if not nodes:
            return False
        stream = nodes[self._one(nodes)].stream
        way = stream.down if self.rng.random() < 0.5 else stream.back
        if not way:
            return False
        del way[self.rng.randrange(len(way))]
        stream.torn = True
        return self._fault("message lost", nodes[0].name)

    # ── trouble: deaths ──

    def orchestrator_crashes(self) -> bool:
        if self.rng.random() < 0.5:
            self.world.fuse = self.rng.randrange(3)
            return self._fault("orchestrator killed", f"after {self.world.fuse} more effects")
        self._fault("orchestrator killed", "now")
        self.world.crash_orchestrator()
        return True

    def agent_crashes(self) -> bool:
        found = self._served()
        if found is None:
            return False
        node, served = found
        self._fault("agent killed", node.name)
        if self.rng.random() < 0.5 and served.holdings.running is not None:
            self._die_saving(node, served)
        node.crash()
        return True

    def _die_saving(self, node: Node, served: Served) -> None:
        """It dies between saving what an event did and carrying that out."""
        done = self.rng.randrange(2)
        if served.due is not None:
            served.at = max(served.at, served.due)
            served.hear(ev.DeadlinePassed(at=served.at), done=done)
        elif node.stream.down:
            told = node.stream.down.pop(0)
            if not isinstance(told, wire.Told):
                return
            at = node.served[told.group]
            event = ev.MakeResidentCommanded(
                at=at.at,
                op=told.command.op,
                epoch=told.command.epoch,
                job=told.command.job,
                need=told.command.need,
                freeze=told.command.freeze,
            )
            at.hear(event, done=done)

    def client_dies(self) -> bool:
        client = self._client()
        if client is None:
            return False
        self.world.die(client)
        return self._fault("client killed", client.session)

    def job_dies(self) -> bool:
        job = self.rng.choice(self.world.setup.jobs)
        if not self.world.of_job(job) and self.rng.random() < 0.5:
            return False
        self._end(job)
        self._start(job)
        return self._fault("job started again", job)

    def process_dies(self) -> bool:
        nodes = list(self.world.nodes.values())
        node = nodes[self._one(nodes)]
        served = node.served[self.rng.choice(self.world.setup.groups)]
        alive = list(served.device.alive)
        if not alive:
            return False
        pid = alive[self.rng.randrange(len(alive))]
        self._fault("process killed", f"{pid} of {served.device.alive[pid].job} on {served.name}")
        self.world.process_ends(node, served, pid)
        return True

    def client_stops(self) -> bool:
        client = self._client()
        if client is None:
            return False
        client.stopped = True
        return self._fault("client stopped", client.session)

    def agent_hangs(self) -> bool:
        found = self._served()
        if found is None:
            return False
        found[0].hung = True
        return self._fault("agent hangs", found[0].name)

    def loop_stalls(self) -> bool:
        """The orchestrator stands still for a long time, sees it, and gives everybody fresh grace."""
        self.world.set_time(self.world.now + self.rng.random() * 100.0)
        self.world.shell.stall()
        self.world.advance(0.0)
        return self._fault("orchestrator stalled", f"until {self.world.now:.1f}")

    def hangs_up(self) -> bool:
        """A client says goodbye in the middle of whatever it does."""
        client = self._client()
        if client is None or not client.stream.greeted:
            return False
        self._fault("goodbye", client.session)
        self.world.goodbye(client)
        while client.stream.back and client.stream.greeted:
            self.world.hear_client(client)
        if client.session in self.world.clients:
            self.world.die(client)
        return True

    # ── trouble: moves, memory and people ──

    def move_fails(self) -> bool:
        found = self._served()
        if found is None or found[1].asked is None:
            return False
        node, served = found
        assert served.asked is not None
        out = isinstance(served.asked, RunSnapshot)
        how = self.rng.choice(_OUT_FAULTS if out else _IN_FAULTS)
        self._fault(f"{'snapshot' if out else 'restore'} {how}", f"{served.asked.job} on {served.name}")
        self._finish(node, served, how)
        return True

    def move_ends_late(self) -> bool:
        found = self._served()
        if found is None or found[1].late is None:
            return False
        node, served = found
        assert served.late is not None
        job = served.late[0].job
        context = find(served.holdings, job)
        if context is None or served.asked is None or served.asked.job != job:
            return False
        self._fault("move ends late", f"{job} on {served.name}")
        served.finish_late(self.rng.randrange(3), inside=self.world.inside(served.group, job))
        self.world.after_node(node, served.group)
        return True

    def out_of_memory(self) -> bool:
        """The agent ends a job for taking more than the device has."""
        found = self._served()
        if found is None:
            return False
        node, served = found
        here = [p.job for p in served.device.alive.values() if not p.parked and not p.away]
        if not here:
            return False
        job = here[self.rng.randrange(len(here))]
        self._fault("out of memory", f"{job} on {served.name}")
        served.kills.insert(0, job)
        self.world.finish_kill(node, served.group)
        return True

    def newcomer_registers(self) -> bool:
        """A process comes up without holding the lock: beside the others if it fits, else set aside."""
        found = self._served()
        client = self._client()
        if found is None or client is None:
            return False
        node, served = found
        job, size = client.job, self.rng.randint(1, 40) * MIB
        state = self.world.shell.locks[served.group]
        if len(served.device.of(job)) > 1 or job in self.world.setup.whole:
            return False  # (of those that can be frozen none registers state, so none is set aside)
        if any(p.incarnation != client.incarnation for p in served.device.of(job)):
            return False
        parked = not served.fits(job, size)
        asks = any(c.ask is not None or served.group in c.using for c in self.world.of_job(job))
        asks = asks or any(w.job == job for w in state.waiters)
        if asks or occupant(state) == job:  # set aside while its job is being granted: not until the next
            return False
        self._fault("newcomer", f"{job} on {served.name}")
        self.world.begin(client, node, served.group, size, parked=parked)
        return True

    def nodes_change(self) -> bool:
        world = self.world
        group = self.rng.choice(world.setup.groups)
        there = world.shell.locks[group].nodes
        name = self.rng.choice(world.setup.nodes)
        rest = tuple(n for n in there if n != name) if name in there else (*there, name)
        self._fault("nodes changed", f"{group}: {', '.join(rest) or 'none'}")
        world.shell.post(group, ev.NodesChanged(at=world.shell.at, nodes=rest))
        world.shell.run()
        world.flush()
        if name in rest:
            world.nodes[name].stream.cut()  # its agent dials again to join
        return True

    def node_drained(self) -> bool:
        """An operator takes a node out for maintenance, or lets it serve again."""
        world, group = self.world, self.rng.choice(self.world.setup.groups)
        node, at = self.rng.choice(world.setup.nodes), world.shell.at
        out = drain_of(world.shell.locks[group], node) is not None
        world.shell.operator_says(
            group, ev.NodeUndrained(at=at, node=node) if out else ev.NodeDrained(at=at, node=node)
        )
        world.flush()
        return self._fault("node serves again" if out else "node drained", f"{node} of {group}")

    def job_forgotten(self) -> bool:
        """An operator clears what is left of a job. One that runs is refused."""
        world, job = self.world, self.rng.choice(self.world.setup.jobs)
        return self._asked("job forgotten", job, ev.JobForgotten(at=world.shell.at, job=job))

    def job_evicted(self) -> bool:
        world, job = self.world, self.rng.choice(self.world.setup.jobs)
        return self._asked("job evicted", job, ev.JobEvicted(at=world.shell.at, job=job, reason="drawn"))

    def _asked(self, kind: str, job: JobId, event: ev.JobForgotten | ev.JobEvicted) -> bool:
        """An operator says so; whoever it does not apply to is refused, and nothing happened."""
        world, group = self.world, self.rng.choice(self.world.setup.groups)
        done = world.shell.operator_says(group, event)
        world.flush()
        return done and self._fault(kind, f"{job} of {group}")

    def stranger_yields(self) -> bool:
        world = self.world
        group = self.rng.choice(world.setup.groups)
        state = world.shell.locks[group]
        held = state.occupancy
        if not isinstance(held, Held):
            return False
        draw = self.rng.random()
        job, session, epoch = held.job, held.holders[0].session, held.epoch
        if draw < 0.35:
            session = SessionId("stranger")
        elif draw < 0.7:
            job = JobId("stranger")
        else:
            epoch = Epoch(epoch + 1)
        self._fault("stranger yields", f"{job} {session} {epoch}")
        world.shell.stranger_yields(group, job, session, epoch)
        return True


_AGAIN = frozenset(
    {None, RefuseCode.JOB_RUNNING, RefuseCode.GROUP_EMPTY, RefuseCode.FAILED, RefuseCode.LIMIT}
)
_OUT_FAULTS = ("fails", "half", "busy", "no_room", "silent", "lying")
_IN_FAULTS = ("fails", "half", "lost", "silent")
