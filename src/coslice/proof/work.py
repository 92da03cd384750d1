"""What goes on in a world without anybody's fault, each as one draw."""

from collections.abc import Callable
from random import Random

from coslice.core.effects import RefuseCode
from coslice.core.group_state import frozen_lease, view_of
from coslice.core.ids import JobId
from coslice.proof.client import Client
from coslice.proof.device import MIB
from coslice.proof.joint import Setup, World
from coslice.proof.node import Node
from coslice.proof.served import Served
from coslice.proof.story import Story


class Work:
    """Draws what happens next. A draw returns False if there was nothing for it to happen to."""

    def __init__(self, seed: int, story: Story, setup: Callable[[Random], Setup]) -> None:
        self.rng = Random(seed)
        self.story = story
        self.world = World(setup(self.rng), story)

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


_AGAIN = frozenset(
    {None, RefuseCode.JOB_RUNNING, RefuseCode.GROUP_EMPTY, RefuseCode.FAILED, RefuseCode.LIMIT}
)
