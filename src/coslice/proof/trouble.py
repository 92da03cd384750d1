"""What goes wrong in a world, each as one draw."""

from coslice.core import events as ev
from coslice.core.context import find
from coslice.core.effects import RunSnapshot
from coslice.core.group import Held
from coslice.core.group_state import drain_of, occupant
from coslice.core.ids import Epoch, JobId, SessionId
from coslice.proof import wire
from coslice.proof.device import MIB
from coslice.proof.node import Node
from coslice.proof.served import Served
from coslice.proof.work import Work


class Trouble(Work):
    """Callers and streams, deaths, moves and memory, operators and strangers."""

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


_OUT_FAULTS = ("fails", "half", "busy", "no_room", "silent", "lying")
_IN_FAULTS = ("fails", "half", "lost", "silent")
